"""python -m tests.soak.shift: a fleet of real processes whose load shifts, with `launch autoscale` beside it.

`launch local` with timed engines serves a load in phases: long prompts with short answers, then half the prompt and twice the
answer, and so on. Says for every few seconds which share of the requests that came then kept both time limits, and after how many
seconds from each shift that share was back. Knows the command line and HTTP.
"""

import argparse
import contextlib
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from common.processes.local_fleet import local_fleet
from common.processes.router_client import RequestFailed, RouterClient
from launch.child import RoleProcess, launch_command

STEP_COST = "0.02,0.003,0.0008"
"""Seconds of a step, of each prompt token and of each decode row: short prompts take as long as long ones do elsewhere."""
PROMPT, ANSWER = 200, 222
"""Mean tokens in the first phase."""
TTFT_S, ITL_S = 2.0, 0.05
BIN_S = 5.0
WELL = 0.9
STOP_S = 10.0


@dataclass
class ShiftResult:
    """What clients of the fleet got."""

    phase_s: float
    kept: dict[int, list[bool]] = field(default_factory=lambda: defaultdict(list))
    """Whether each request kept both limits, by the number of the bin in which it came."""
    failures: list[str] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)

    def attainment(self, number: int) -> float:
        return sum(self.kept[number]) / max(1, len(self.kept[number]))

    def back_after_s(self, phase: int) -> float:
        """Seconds from the beginning of a phase until a bin and the one behind it are well; infinite: never in it."""
        bins = range(int(phase * self.phase_s / BIN_S), int((phase + 1) * self.phase_s / BIN_S) - 1)
        for number in bins:
            if self.attainment(number) >= WELL and self.attainment(number + 1) >= WELL:
                return number * BIN_S - phase * self.phase_s
        return float("inf")


def ask(client: RouterClient, prompt: int, answer: int, seed: int, result: ShiftResult, came_s: float) -> None:
    """One request, as long as it takes."""
    random, began, first, last, tokens = Random(seed), time.monotonic(), 0.0, 0.0, 0
    body = {"model": "demo", "prompt": [random.randint(3, 200) for _ in range(prompt)], "max_tokens": answer, "ignore_eos": True}
    try:
        for _ in client.stream("/v1/completions", body | {"stream": True}):
            last = time.monotonic()
            first, tokens = first or last, tokens + 1
    except RequestFailed as error:
        result.failures.append(str(error))
    is_kept = bool(first) and first - began <= TTFT_S and (last - first) / max(1, answer - 1) <= ITL_S
    result.kept[int(came_s / BIN_S)].append(is_kept)


@contextlib.contextmanager
def autoscaled(url: str, flags: Sequence[str]) -> Iterator[None]:
    command = launch_command("autoscale", [f"--router={url}", f"--slo-ttft-s={TTFT_S}", f"--slo-itl-s={ITL_S}", *flags])
    process = RoleProcess("autoscale", command, lambda event: None)
    try:
        yield
    finally:
        process.terminate()
        if not process.wait(STOP_S):
            process.kill()


def shift(phases: int, phase_s: float, rate: float, prefill: int, decode: int, scaled: bool, flags: Sequence[str]) -> ShiftResult:
    """Run the load through a fleet. flags: of launch autoscale."""
    result, random, threads = ShiftResult(phase_s), Random(1), list[threading.Thread]()
    size = (f"--prefill={prefill}", f"--decode={decode}", "--max-running=64", "--chunk-tokens=256")
    with local_fleet("--executor=timed", f"--step-cost={STEP_COST}", *size) as fleet:
        client = RouterClient(fleet.url)
        with autoscaled(fleet.url, flags) if scaled else contextlib.nullcontext():
            began, came_s, number = time.monotonic(), 0.0, 0
            while (came_s := came_s + random.expovariate(rate)) < phases * phase_s:
                time.sleep(max(0.0, began + came_s - time.monotonic()))
                factor = 2 if int(came_s / phase_s) % 2 else 1
                lengths = (
                    max(2, round(random.expovariate(factor / PROMPT))),
                    max(2, round(random.expovariate(1 / ANSWER / factor))),
                )
                number += 1
                arguments = (client, *(min(length, 900) for length in lengths), number, result, came_s)
                threads.append(threading.Thread(target=ask, args=arguments, daemon=True))
                threads[-1].start()
            for thread in threads:
                thread.join()
            result.decisions = client.get("/cluster/decisions")["decisions"]
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phases", type=int, default=3)
    parser.add_argument("--phase-s", type=float, default=90.0)
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--prefill", type=int, default=3)
    parser.add_argument("--decode", type=int, default=3)
    parser.add_argument("--fixed", action="store_true", help="without launch autoscale")
    parser.add_argument("flags", nargs="*", help="flags of launch autoscale, behind --")
    given = parser.parse_args(arguments)
    sizes = given.prefill, given.decode
    result = shift(given.phases, given.phase_s, given.rate, *sizes, scaled=not given.fixed, flags=given.flags)
    for number in sorted(result.kept):
        sys.stdout.write(f"{number * BIN_S:5.0f} s  {result.attainment(number):6.1%} of {len(result.kept[number])}\n")
    back = [result.back_after_s(phase) for phase in range(given.phases)]
    made = [each for each in result.decisions if each["action"] != "stay"]
    sys.stdout.write(json.dumps({"back_after_s": back, "failures": result.failures[:5], "decisions": made}, indent=1) + "\n")
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
