"""The parts of `launch bench engine` that need whole processes: real fleets on one device, and the benchmarks of pushes.

Owns what is started with which flags, and what is kept of the figures. Starts them as a user does, from the command line.
"""

import http
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.client import completion_of_ids
from bench.engine.answers import agreement
from bench.engine.figures import Agreement, Check, Exposed, Figure, Pushed
from bench.engine.plan import CheckRing, MeasureExposed, MeasurePush, Task
from common.config import EngineConfig
from common.errors import TandemError
from common.flags import to_flags
from common.processes.local_fleet import FleetFailed, connected, local_fleet
from engine.device import device_of

AT_ONCE = 4
COUNTED_S, LOOK_EVERY_S = 5.0, 0.1
Say = Callable[[str], None]


class BenchFailed(TandemError):
    """A benchmark that was started did not end as it should."""


def figures_of(task: CheckRing | MeasurePush | MeasureExposed, say: Say) -> Iterator[Figure]:
    match task:
        case CheckRing():
            return _ring(task, say)
        case MeasurePush():
            return _pushed(task, say)
        case MeasureExposed():
            return _exposed(task, say)


# --- one device, two instances -----------------------------------------------------------------------------------------------


def _ring(task: CheckRing, say: Say) -> Iterator[Check | Agreement]:
    """The demo model. float32 attends in torch, where a token does not depend on its batch; bfloat16 as the device has it."""
    exact = task.dtype == "float32"
    engine = replace(
        _on_device(task),
        dtype=task.dtype,
        attention="torch" if exact else task.engine.attention,
        kv_memory="16MiB" if task.is_quick else "256MiB",
        context_tokens=0,
        max_running=16,
        chunk_tokens=128,
    )
    count, longest, tokens = (3, 40, 4) if task.is_quick else (24, 1500, 48)
    random = np.random.default_rng(8)
    prompts = [random.integers(300, 2000, length).tolist() for length in random.integers(1, longest, count)]
    flags = [*to_flags(engine), "--dead-after-s=60", "--log-level=warning"]
    say("starting a fleet of two instances and a fleet of one")
    with ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:
            started = [
                pool.submit(stack.enter_context, local_fleet(f"--prefill={prefills}", *flags, on_output=sys.stderr.write))
                for prefills in (1, 0)
            ]
        ring, colocated = (fleet.result().url for fleet in started)
        say("asking both")
        answers = [_answers(url, prompts, tokens) for url in (ring, colocated)]
        pushed = _bytes_pushed(ring)
    yield agreement(
        f"prefill and decode on one device, {task.dtype}: greedy tokens are those of colocated serving",
        *answers,
        must_be_equal=exact,
    )
    yield Check(
        rule=f"prefill and decode on one device, {task.dtype}: KV was pushed", met=pushed > 0, figure=f"{pushed / 1e6:.1f} MB"
    )


def _answers(url: str, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Greedy, several asked at once. Raises FleetFailed."""

    def ask(prompt: list[int]) -> list[int]:
        data = completion_of_ids("demo", prompt, tokens, return_token_ids=True)
        with connected(url) as connection:
            connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        if response.status != http.HTTPStatus.OK:
            raise FleetFailed(f"HTTP {response.status}: {text.decode(errors='replace')}")
        ids: list[int] = json.loads(text)["choices"][0]["token_ids"]
        return ids

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, prompts))


def _bytes_pushed(url: str) -> int:
    """What the instances have counted. Counters come with heartbeats, so the first ones are waited for."""
    until = time.monotonic() + COUNTED_S
    while True:
        with connected(url) as connection:
            connection.request("GET", "/cluster")
            instances = json.loads(connection.getresponse().read())["instances"]
        pushed = sum(int(instance["counters"]["bytes_pushed"]) for instance in instances)
        if pushed or time.monotonic() > until:
            return pushed
        time.sleep(LOOK_EVERY_S)


# --- other benchmarks --------------------------------------------------------------------------------------------------------


def _pushed(task: MeasurePush, say: Say) -> Iterator[Pushed]:
    device = _on_device(task).device
    sizes = ["--page-bytes=256KiB,2MiB", "--pages=32,1024", "--memory=2GiB", "--seconds=0.2", "--repeat=3", "--idle-s=0.2"]
    host = _bench("transfer", ["--quick"] if task.is_quick else sizes, ["--transport=nixl", f"--device={device}"], say)["host"]
    for row in host["rows"]:
        way, point = row["way"], row["point"]
        yield Pushed(
            way=" ".join(filter(None, (way["transport"], way["kind"]))),
            page_bytes=point["page_bytes"],
            pages=point["pages"],
            arrangement=point["arrangement"],
            gb_per_s=median(sample["gb_per_s"] for sample in row["samples"]),
        )
    if host["skipped"]:
        raise BenchFailed("; ".join(f"{way} was skipped: {reason}" for way, reason in host["skipped"].items()))


def _exposed(task: MeasureExposed, say: Say) -> Iterator[Exposed]:
    """Of a model like Qwen3-0.6B, with the demo model's vocabulary, so that five instances find room on a card."""
    engine = replace(_on_device(task), kv_memory="3GiB", max_running=8, graph_sizes="1", context_tokens=0)
    engine = replace(engine, chunk_tokens=engine.chunk_tokens or 2048)
    shape = ["--layers=28", "--hidden=1024", "--kv-heads=8", "--head-dim=128", "--chunks=1,2,8", "--repeat=5"]
    quick = replace(engine, kv_memory="16MiB", chunk_tokens=64, page_size=16)
    flags = ["--quick", "--chunks=1", *to_flags(quick)] if task.is_quick else [*shape, *to_flags(engine)]
    (measured,) = _bench("overlap", ["--model=random"], flags, say)["models"]
    samples = measured["samples"]
    for chunks, tokens in measured["prompt_tokens"].items():
        for fleet in dict.fromkeys(sample["fleet"] for sample in samples):
            mine = [sample for sample in samples if (sample["fleet"], str(sample["chunks"])) == (fleet, chunks)]
            yield Exposed(
                fleet=fleet,
                prompt_tokens=tokens,
                first_token_ms=1e3 * median(sample["first_token_s"] for sample in mine),
                push_ms=1e3 * median(sample["push_s"] for sample in mine),
                exposed_ms=1e3 * median(sample["exposed_s"] for sample in mine),
            )


def _bench(name: str, first: Sequence[str], more: Sequence[str], say: Say) -> dict[str, Any]:
    """What `python -m benchmarks.NAME` writes with --json. Raises BenchFailed with the end of its output."""
    say(f"python -m benchmarks.{name}")
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", *first, *more, f"--json={figures}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            raise BenchFailed(f"benchmarks.{name} ended with {done.returncode}: {' / '.join(done.stdout.splitlines()[-8:])}")
        written: dict[str, Any] = json.loads(figures.read_text())
    return written


def _on_device(task: Task) -> EngineConfig:
    """The engine with its device by name, so that all instances are on the same one; without grammars, which nobody asks for."""
    return replace(task.engine, device=str(device_of(task.engine.device)), grammar="off")
