"""The same load from three clients in turns, `launch bench serve`, `vllm bench serve` and aiperf: do their percentiles agree?

Owns the comparison. The server is `launch local --executor timed`, whose steps take a known time, or with --double the server
double, whose delays are known. Every client sends prompts of the same length at the same even rate; none comes twice, so no cache
holds it. Prints a Markdown table; judges nothing. The other clients are installed apart from Tandem: vLLM's from its source with
VLLM_TARGET_DEVICE=empty.

    python -m tests.bench.side_by_side --vllm VENV/bin/python --aiperf VENV/bin/aiperf
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import machine_line, markdown_table, say, this_hardware
from bench.workloads import prompt_vocabulary
from common.config import DEMO_MODEL
from common.model_path import resolve_model_path
from common.processes.local_fleet import local_fleet

PERCENTILES = ("p50", "p90", "p99")
VLLM = (
    "import argparse; from vllm.benchmarks.serve import *; p = argparse.ArgumentParser(); add_cli_args(p); main(p.parse_args())"
)
TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
IN_AIPERF = {
    "ttft": "time_to_first_token",
    "tpot": "inter_token_latency",
    "itl": "inter_chunk_latency",
    "e2el": "request_latency",
}
"""What aiperf calls an inter-token latency is a mean of each answer, which is TPOT elsewhere."""

Times = dict[tuple[str, str], float]
"""By metric and percentile, ms."""


@dataclass(frozen=True, slots=True)
class Load:
    """What every client sends. prompts: a JSONL file with `prompt` in each line, for aiperf with `text` too."""

    url: str
    prompts: Path
    count: int
    rate: float
    output_tokens: int


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm", help="a Python that imports vllm.benchmarks.serve")
    parser.add_argument("--aiperf", help="aiperf's command")
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--prompts", type=int, default=250)
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--double", nargs=2, type=float, metavar=("TTFT_S", "ITL_S"), help="the double with these delays")
    flags = parser.parse_args()
    hardware = this_hardware()
    clients: dict[str, Callable[[Load, Path], Times]] = {"launch bench serve": ours}
    if flags.vllm:
        clients["vllm bench serve"] = lambda load, folder: vllms(flags.vllm, load, folder)
    if flags.aiperf:
        clients["aiperf"] = lambda load, folder: aiperfs(flags.aiperf, load, folder)
    runs: dict[str, list[Times]] = {name: [] for name in clients}
    with tempfile.TemporaryDirectory() as folder, server(flags.double) as url:
        for number in range(flags.runs):
            for name, client in clients.items():
                say(f"run {number + 1}, {name}, load {os.getloadavg()[0]:.1f}")
                own = Path(folder) / f"{number} {name}"
                own.mkdir()
                write_prompts(own / "prompts.jsonl", flags.prompts, flags.input_tokens)
                load = Load(url, own / "prompts.jsonl", flags.prompts, flags.rate, flags.output_tokens)
                runs[name].append(client(load, own))
    sys.stdout.write(f"{machine_line(hardware, f'{os.getloadavg()[0]:.1f} at the end')}\n\n{markdown_table(lines(runs))}\n")


@contextlib.contextmanager
def server(delays_s: list[float] | None) -> Iterator[str]:
    """Its URL."""
    if not delays_s:
        with local_fleet("--executor=timed", "--log-level=warning") as fleet:
            yield fleet.url
        return
    command = [sys.executable, "-m", "tests.bench.double", f"--ttft-s={delays_s[0]}", f"--itl-s={delays_s[1]}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as double:
        try:
            assert double.stdout is not None
            yield f"http://127.0.0.1:{int(double.stdout.readline())}"
        finally:
            double.kill()


def write_prompts(path: Path, count: int, tokens: int) -> None:
    words, random = prompt_vocabulary(DEMO_MODEL, "text"), np.random.default_rng()
    texts = [words.write(words.draw(random, tokens)) for _ in range(count)]
    path.write_text("".join(f"{json.dumps({'prompt': text})}\n" for text in texts))


def ours(load: Load, folder: Path) -> Times:
    run(
        *(sys.executable, "-m", "launch.main", "bench", "serve", f"--base-url={load.url}", "--disable-tqdm", "--ignore-eos=on"),
        *("--dataset-name=custom", f"--dataset-path={load.prompts}", f"--custom-output-len={load.output_tokens}"),
        *(f"--num-prompts={load.count}", f"--request-rate={load.rate}", "--burstiness=inf", f"--json={folder}/figures.json"),
    )
    return in_vllms_keys(folder)


def vllms(python: str, load: Load, folder: Path) -> Times:
    run(
        *(python, "-c", VLLM, "--backend=openai", f"--base-url={load.url}", "--disable-tqdm", "--ignore-eos", "--num-warmups=1"),
        *("--dataset-name=custom", f"--dataset-path={load.prompts}", f"--custom-output-len={load.output_tokens}"),
        *("--skip-chat-template", "--disable-shuffle", "--model=demo", f"--tokenizer={tokenizer()}", "--temperature=0"),
        *(f"--num-prompts={load.count}", f"--request-rate={load.rate}", "--burstiness=inf"),
        *("--percentile-metrics=ttft,tpot,itl,e2el", "--metric-percentiles=50,90,99"),
        *("--save-result", f"--result-dir={folder}", "--result-filename=figures.json"),
    )
    return in_vllms_keys(folder)


def aiperfs(command: str, load: Load, folder: Path) -> Times:
    texts = folder / "texts.jsonl"
    texts.write_text(load.prompts.read_text().replace('{"prompt": ', '{"text": '))
    inputs = json.dumps({"ignore_eos": True, "max_tokens": load.output_tokens, "temperature": 0})
    run(
        *(command, "profile", "--model=demo", f"--tokenizer={tokenizer()}", f"--url={load.url}", "--endpoint-type=completions"),
        *("--streaming", "--use-server-token-count", "--custom-dataset-type=single_turn", f"--input-file={texts}"),
        *(f"--extra-inputs={inputs}", f"--request-count={load.count}", f"--request-rate={load.rate}"),
        *("--arrival-pattern=constant", "--warmup-request-count=1", "--random-seed=0", "--ui=none", "--no-gpu-telemetry"),
        *("--no-server-metrics", f"--artifact-dir={folder}"),
    )
    read: dict[str, Any] = json.loads((folder / "profile_export_aiperf.json").read_text())
    answered = read["request_count"]["avg"]
    assert answered == load.count, f"aiperf: {answered} of {load.count} requests were answered"
    return {(metric, each): read[name][each] for metric, name in IN_AIPERF.items() for each in PERCENTILES}


def in_vllms_keys(folder: Path) -> Times:
    read: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    assert read["completed"] == read["num_prompts"], read
    return {(metric, each): read[f"{each}_{metric}_ms"] for metric in TITLES for each in PERCENTILES}


def tokenizer() -> Path:
    return resolve_model_path(DEMO_MODEL, weights=False)


def run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{command[:4]} failed:\n{done.stdout[-3000:]}")


def lines(runs: dict[str, list[Times]]) -> list[tuple[str, ...]]:
    """For each percentile the runs of every client, one after the other."""
    head = ("ms", "", *runs)
    rows = []
    for metric, title in TITLES.items():
        for each in PERCENTILES:
            cells = [" / ".join(f"{times[metric, each]:.2f}" for times in of_client) for of_client in runs.values()]
            rows.append((title, each, *cells))
    return [head, *rows]


if __name__ == "__main__":
    main()
