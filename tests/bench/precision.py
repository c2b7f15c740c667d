"""What the client of `launch bench serve` adds to its own figures: a run against the server double, whose delays are known.

Owns the comparison. The double runs in a process of its own and says how late it was itself: what is reported beyond that is the
client's, or the machine's. Prints a Markdown table; judges nothing.

    python -m tests.bench.precision --streams 200 --ttft-s 0.2 --itl-s 0.02 --tokens 100
"""

import argparse
import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

import numpy as np

from bench.options import LoadOptions, ServeOptions, TargetOptions, WorkloadOptions
from bench.report import machine_line, markdown_table, this_hardware
from bench.serve import MeasuredLoad, measure

PERCENTILES = (50, 90, 99)


def run(flags: argparse.Namespace) -> tuple[MeasuredLoad, dict[str, list[float]]]:
    """Returns what the client reports, and how late the double was."""
    delays = {"ttft_s": flags.ttft_s, "itl_s": flags.itl_s, "stall_s": flags.stall_s, "stall_at_s": flags.seconds / 2}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in delays.items()]
    command = [sys.executable, "-m", "tests.bench.double", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as double:
        try:
            assert double.stdout is not None
            port = int(double.stdout.readline())
            # As many are open as come in the time that one takes.
            rate = flags.streams / (flags.ttft_s + flags.itl_s * (flags.tokens - 1))
            prompts = {"random_input_len": 16, "random_output_len": flags.tokens, "num_prompts": int(rate * flags.seconds)}
            bench = ServeOptions(
                target=TargetOptions(port=port), workload=WorkloadOptions(**prompts), load=LoadOptions(request_rate=rate)
            )
            measured = measure(bench)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/late") as answer:
                return measured, json.load(answer)
        finally:
            double.kill()


def lines(flags: argparse.Namespace, measured: MeasuredLoad, did: dict[str, list[float]]) -> list[tuple[str, ...]]:
    whole = [answer for answer in measured.answers if not answer.error]
    rows = [
        ("TTFT, from when it was due", flags.ttft_s, [answer.ttft_s for answer in whole]),
        ("sent after it was due", 0, [answer.queue_s for answer in whole]),
        ("TTFT, from the sending", flags.ttft_s, [answer.first_s - answer.sent_s for answer in whole]),
        ("the double's delay of a first token", 0, did["first_s"]),
        ("ITL", flags.itl_s, np.concatenate([answer.gaps_s for answer in whole])),
        ("the double's delay of another token", 0, did["later_s"]),
    ]
    head = ("ms", "known", "mean", *(f"p{each}" for each in PERCENTILES))
    return [head, *(_line(name, 1000 * known_s, 1000 * np.array(values)) for name, known_s, values in rows)]


def _line(name: str, known_ms: float, values: Any) -> tuple[str, ...]:
    return name, f"{known_ms:g}", *(f"{each:.2f}" for each in (values.mean(), *np.percentile(values, PERCENTILES)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--ttft-s", type=float, default=0.2)
    parser.add_argument("--itl-s", type=float, default=0.02)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--stall-s", type=float, default=0.0, help="in the middle, the double does nothing for so long")
    flags = parser.parse_args()
    hardware = this_hardware()
    measured, did = run(flags)
    figures = measured.figures
    tokens, cpu_s = figures["total_output_tokens"], measured.cpu_s
    sys.stdout.write(f"{machine_line(hardware, f'{os.getloadavg()[0]:.1f} at the end')}\n\n")
    sys.stdout.write(f"{markdown_table(lines(flags, measured, did))}\n\n")
    sys.stdout.write(
        f"{figures['completed']} requests, {figures['failed']} failed, at most {figures['max_concurrent_requests']} at once; "
        f"{figures['output_throughput']:,.0f} tokens/s, {figures['max_output_tokens_per_s']:,.0f} in the best second; "
        f"client: {cpu_s:.2f} s of CPU in {figures['duration']:.2f} s, "
        f"{cpu_s / figures['duration']:.1%} of a core, {1e6 * cpu_s / tokens:.1f} us a token\n"
    )


if __name__ == "__main__":
    main()
