"""What `launch bench engine` measures besides steps, each task in a process: the machine and its ceilings, correctness, and
sequences without HTTP.

Owns the list of all that tasks do.
"""

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from bench.offline import WARM_UP, sequences_of, serve
from bench.options import QUICK_OFFLINE, OfflineOptions
from bench.report import Spread
from benchmarks import engine_steps, pushes
from benchmarks.engine import EngineTask, Section
from benchmarks.engine_figures import WORKLOADS, Ceilings, Check, Fact, Figure, Offline
from benchmarks.engine_steps import Say, checkpoint, current, timed_s
from common.host import mps_is_there
from common.options import with_defaults
from engine.backends import device_of, with_device_defaults
from engine.torch_executor import TorchExecutor

COPY_BYTES = {"cuda": 2**32, "cpu": 2**26}
"""Many times what a cache holds."""
MATMUL_SIDE = {"cuda": 8192, "cpu": 512}
CEILING_REPEATS = 20
FACTS = {
    "card": "nvidia-smi --query-gpu=name,driver_version,compute_mode,mig.mode.current,memory.total --format=csv,noheader",
    "clocks": "nvidia-smi --query-gpu=clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu --format=csv,noheader",
    "NVLink": "nvidia-smi nvlink --status",
    "cards": "nvidia-smi topo --matrix",
    "CUDA": "nvcc --version",
}
CHECKS = {
    "the kernels' contract": ("tests/gpu/test_kernels.py", "tests/engine/cpu/test_kernels.py -k norm"),
    "attention against its definition": ("tests/gpu/test_attention.py", "tests/engine/attention/test_paged.py -k window"),
    "tokens against transformers": (
        "tests/gpu/test_engine.py -k transformers",
        "tests/engine/models/test_dense_models.py -k full_batch",
    ),
}
"""On a card, and where there is none."""
PYTEST_FLAGS = ("-n0", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Tasks are forked from a process that has imported what pytest would rewrite."""


def measure_environment(task: EngineTask, say: Say) -> Iterator[Figure]:
    for name, command in FACTS.items():
        try:
            told = subprocess.run(command.split(), capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")
        except (OSError, subprocess.SubprocessError) as error:
            told = [f"not known: {error}"]
        lines = (" ".join(re.sub(r"\x1b\[\d*m", "", line).split()) for line in told)  # nvidia-smi underlines heads of tables
        yield Fact(name=name, text="; ".join(line for line in lines if line))
    yield Fact(name="MPS", text="on" if mps_is_there(os.environ) else "off")


def measure_ceilings(task: EngineTask, say: Say) -> Iterator[Figure]:
    """Copies and products of matrices, in the run whose figures are shares of them."""
    device = current(task.engine.device)
    side, dtype = MATMUL_SIDE[device.type], torch.bfloat16 if device.type == "cuda" else torch.float32
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    source.view(torch.int64).random_()
    target = torch.empty_like(source)
    copies = timed_s(lambda: target.copy_(source), device, CEILING_REPEATS)
    a, b = torch.randn(2, side, side, device=device).to(dtype).unbind()
    out = torch.empty_like(a)
    products = timed_s(lambda: torch.mm(a, b, out=out), device, CEILING_REPEATS)
    yield Ceilings(
        device=str(device),
        copy_gb_per_s=Spread.of(2 * len(source) / 1e9 / seconds for seconds in copies),
        matmul=f"{side}^3 {str(dtype).removeprefix('torch.')}",
        matmul_tflop_per_s=Spread.of(2 * side**3 / 1e12 / seconds for seconds in products),
    )


class _Results:
    """A plugin of pytest that keeps what became of each test."""

    def __init__(self) -> None:
        self.outcomes, self.failed = Counter[str](), list[str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
            self.failed += [report.nodeid] if report.failed else []

    def pytest_collectreport(self, report: Any) -> None:
        self.failed += [report.nodeid] if report.failed else []


def measure_checks(task: EngineTask, say: Say) -> Iterator[Figure]:
    """Tests of the repository, in this process."""
    import pytest

    for name, (on_card, without) in CHECKS.items():
        say(name)
        results, chosen = _Results(), on_card if device_of(task.engine.device).type == "cuda" else without
        with contextlib.redirect_stdout(sys.stderr):
            status = pytest.main([*chosen.split(), *PYTEST_FLAGS], plugins=[results])
        failed = results.failed or ([f"pytest ends with {status}"] if status else [])
        yield Check(
            name=name,
            passed=results.outcomes["passed"],
            skipped=results.outcomes["skipped"],
            failed=len(failed),
            first=next(iter(failed), ""),
        )


def measure_offline(task: EngineTask, say: Say) -> Iterator[Figure]:
    ready = threading.Event()
    with checkpoint(task.model, task.engine) as (model, engine):
        engine = with_device_defaults(replace(engine, grammar="off"))
        with contextlib.closing(TorchExecutor(model, engine, ready.set, say)) as executor:
            for workload, largest_id in {"": 1, **WORKLOADS}.items():
                options = with_defaults(OfflineOptions(largest_id=largest_id), QUICK_OFFLINE if task.is_quick else {})
                sequences = sequences_of(options, executor.description.model.vocab_size) if workload else [WARM_UP]
                _, ran = serve(executor, engine.chunk_tokens, ready, sequences, options.temperature)
                answers = sum(each.answer_tokens for each in sequences)
                if workload:
                    yield Offline(
                        workload=workload,
                        model=task.model,
                        answer_tokens=answers,
                        seconds=ran.seconds,
                        tokens_per_s=answers / ran.seconds,
                    )


ACTS: Mapping[Section, Callable[[EngineTask, Say], Iterator[Figure]]] = {
    "environment": measure_environment,
    "ceilings": measure_ceilings,
    "checks": measure_checks,
    "steps": engine_steps.measure_steps,
    "eager": engine_steps.measure_steps,
    "offline": measure_offline,
    "pushes": pushes.measure_pushes,
    "host": engine_steps.measure_host,
    "sampling": engine_steps.measure_sampling,
    "adapters": engine_steps.measure_sampling,
}
