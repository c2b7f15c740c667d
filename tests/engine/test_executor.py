"""The contract of an executor that computes: rows that grow, answers that are resumed, and digests of what is in memory.

Also the report of a step's layers while it computes, and what stays of a step: no OpenMP threads that make those of others sleep,
but its memory, so that the next step of the same size touches no page that the system must clear.
"""

import binascii
import ctypes
import json
import platform
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from common.config import EngineConfig, ModelConfig
from common.executor import Chunk, Executor, ExecutorFailed, RowStart, StepHandle, StepPlan, StepResult
from common.ids import Int32Array
from common.sampling_params import SamplingParams
from common.step_cost import StepCost
from engine.step_runner import LayerProgress, PendingStep
from engine.timed import Pace
from engine.torch_executor import TorchExecutor
from tests.builders import HandClock
from tests.engine.checkpoints import llama, saved
from tests.engine.churn import answer_without_drafts, asked_by, check
from tests.engine.driver import Driver
from tests.engine.packed import CAN_RECORD, pack_everything
from tests.engine.toy import ToyExecutor

GREEDY = SamplingParams(max_new_tokens=99, temperature=0.0, seed=11)
SAMPLED = SamplingParams(max_new_tokens=99, temperature=1.0, top_p=0.95, seed=11)
EITHER = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
TOKENS = 30
STEP_S = 0.5
WAIT_S = 60.0


class Engine:
    """An executor, and how to wait for it: wait returns once the next step may have completed."""

    def __init__(self, executor: Executor, wait: Callable[[], None]) -> None:
        self.executor = executor
        self.description = executor.description
        self._wait = wait

    def finished(self, handle: StepHandle) -> StepResult:
        while (result := handle.poll()) is None:
            self._wait()
        return result

    def run(self, plan: StepPlan) -> StepResult:
        return self.finished(self.executor.launch(plan))

    def answers(
        self,
        prompts: list[Int32Array],
        sampling: SamplingParams,
        tokens: int = TOKENS,
        chunk_tokens: int = 1000,
        growing: bool = False,
    ) -> list[list[int]]:
        return Driver(self.run, self.description, growing).answers(prompts, tokens, sampling, chunk_tokens)


def toy() -> Engine:
    return Engine(ToyExecutor(128, 24), lambda: pytest.fail("its steps complete at launch"))


def toy_with_time() -> Engine:
    """Whoever waits lets the time of a step pass."""
    clock = HandClock()

    def wait() -> None:
        clock.now_s += STEP_S

    cost = StepCost(step_s=STEP_S, chunk_token_s=0.0, decode_row_s=0.0)
    return Engine(ToyExecutor(128, 24, Pace(cost, clock)), wait)


def torch_on_cpu(model: Path) -> Engine:
    ready = threading.Event()

    def wait() -> None:
        assert ready.wait(WAIT_S), "nobody woke the loop"
        ready.clear()

    config = EngineConfig(device="cpu", page_size=8, kv_memory="2MiB", max_running=24)
    return Engine(TorchExecutor(ModelConfig(model=str(model)), config, ready.set, lambda text: None), wait)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(llama(), tmp_path_factory.mktemp("llama"))


WAYS = ["toy", "toy with time", "torch on cpu", "torch, recorded steps", "torch, steps that are waited for"]


@contextmanager
def started(way: str, model: Path) -> Iterator[Engine]:
    """On a device, steps are complete when the completion thread has waited for them."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if way == "torch, steps that are waited for":
            monkeypatch.setattr(PendingStep, "is_complete", False)
        if way == "torch, recorded steps":
            if not CAN_RECORD:
                pytest.skip("there is no C compiler")
            pack_everything(monkeypatch)
        makers: dict[str, Callable[[], Engine]] = {"toy": toy, "toy with time": toy_with_time}
        made = makers[way]() if way in makers else torch_on_cpu(model)
        yield made
        made.executor.close()
        made.executor.close()  # twice is once


@pytest.fixture(params=WAYS, scope="module")
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[Engine]:
    """One for all tests: its rows and pages were those of others."""
    with started(request.param, model) as made:
        yield made


def prompts(*lengths: int) -> list[Int32Array]:
    random = np.random.default_rng(3)
    return [random.integers(10, 500, length).astype(np.int32) for length in lengths]


def bytes_of(engine: Engine, page: int) -> bytes:
    """What lies at the page's address."""
    page_bytes = engine.description.layout.page_bytes
    return ctypes.string_at(engine.description.memory.address + page * page_bytes, page_bytes)


@EITHER
def test_rows_that_grow_page_by_page_answer_as_rows_that_had_all_pages_from_the_start(
    engine: Engine, sampling: SamplingParams
) -> None:
    asked = prompts(1, 8, 9, 23)
    whole = engine.answers(asked, sampling)
    assert engine.answers(asked, sampling, growing=True) == whole
    assert engine.answers(asked, sampling, chunk_tokens=6, growing=True) == whole
    assert all(len(set(answer)) > 5 for answer in whole), "answers that would show a difference"


@EITHER
def test_an_answer_that_is_resumed_goes_on_as_it_would_have(engine: Engine, sampling: SamplingParams) -> None:
    """From prompt + tokens so far, in another row and on other pages."""
    asked = prompts(5, 20)
    undisturbed = engine.answers(asked, sampling)
    for so_far in (1, 2, 7, 13, 29):
        begun = [np.append(prompt, answer[:so_far]).astype(np.int32) for prompt, answer in zip(asked, undisturbed, strict=True)]
        resumed = engine.answers(begun[::-1], sampling, TOKENS - so_far, chunk_tokens=7, growing=True)
        assert resumed[::-1] == [answer[so_far:] for answer in undisturbed]


def test_drafts_change_no_token_and_no_log_probability(engine: Engine) -> None:
    """Requests of every kind beside each other, while rows come, go and move."""
    requests = asked_by(8, seed=9)
    told = answer_without_drafts(engine.run, engine.description, requests)
    check(engine.run, engine.description, requests, told, wrong=0.4)


@pytest.mark.parametrize(("sampling", "penalty"), [(GREEDY, 1.0), (SAMPLED, 1.4)], ids=["greedy", "sampled and penalised"])
def test_a_prompt_goes_on_behind_pages_that_another_row_has_computed(
    engine: Engine, sampling: SamplingParams, penalty: float
) -> None:
    """That row decodes meanwhile, and the other one is where a longer request was before."""
    sampling = replace(sampling, repetition_penalty=penalty, frequency_penalty=penalty - 1)
    size = engine.description.layout.page_size
    asked, tail, longer = prompts(3 * size + 3, size, 5 * size)
    (undisturbed,) = engine.answers([asked], sampling, tokens=6)
    begun = np.concatenate([asked[: 2 * size], tail])
    pages = np.random.default_rng(5).permutation(24).astype(np.int32)
    own, before = np.concatenate([pages[:2], pages[8:12]]), pages[12:20]
    first = StepPlan(
        1,
        (
            RowStart(0, pages[:8], sampling, token_ids=begun),
            RowStart(1, before, sampling, token_ids=longer),
        ),
        (Chunk(0, 0, begun, last=True), Chunk(1, 0, longer, last=True)),
    )
    engine.run(first)
    rows = np.array([0], dtype=np.int32)
    there, half = 2 * size, 2 * size + 5
    second = StepPlan(
        2, (RowStart(1, own, sampling, length=there, token_ids=asked),), (Chunk(1, there, asked[there:half], last=False),), rows
    )
    engine.run(second)
    answer = [int(engine.run(StepPlan(3, (), (Chunk(1, half, asked[half:], last=True),), rows)).tokens[0])]
    both = np.array([0, 1], dtype=np.int32)
    answer += [int(engine.run(StepPlan(step, decode_rows=both)).tokens[1]) for step in range(4, 9)]
    assert answer == undisturbed


def test_the_seed_matters_to_sampled_answers_alone(engine: Engine) -> None:
    (prompt,) = prompts(20)
    greedy, sampled, other, other_greedy = (
        engine.answers([prompt], SamplingParams(max_new_tokens=99, temperature=temperature, seed=seed))
        for temperature, seed in ((0.0, 1), (1.0, 1), (1.0, 2), (0.0, 2))
    )
    assert greedy == other_greedy
    assert len({tuple(answer) for (answer,) in (greedy, sampled, other)}) == 3


def test_plans_run_in_the_order_of_their_launch_without_waiting_between_them(engine: Engine) -> None:
    """Seven steps in flight, in which the rows grow now and then; the last is polled first."""
    asked = prompts(6, 7)
    expected = engine.answers(asked, GREEDY, tokens=7)
    page_size, rows = engine.description.layout.page_size, np.arange(2, dtype=np.int32)
    plans = [
        StepPlan(
            0,
            starts=tuple(RowStart(row, np.arange(row * 2, row * 2 + 2, dtype=np.int32), GREEDY) for row in range(2)),
            chunks=tuple(Chunk(row, 0, prompt, last=True) for row, prompt in enumerate(asked)),
        )
    ]
    held = [2, 2]
    for step in range(6):
        short = [row for row, prompt in enumerate(asked) if len(prompt) + step == held[row] * page_size]
        grown = np.array(short, dtype=np.int32)
        plans.append(StepPlan(1 + step, decode_rows=rows, grown_rows=grown, grown_pages=100 - 10 * grown + step))
        for row in short:
            held[row] += 1
    handles = [engine.executor.launch(plan) for plan in plans]
    engine.finished(handles[-1])
    results = [engine.finished(handle) for handle in handles]
    assert [result.plan for result in results] == plans
    assert np.stack([result.tokens for result in results], axis=1).tolist() == expected


@pytest.mark.parametrize("way", WAYS)
def test_a_row_never_writes_beyond_the_pages_that_it_holds(way: str, model: Path) -> None:
    """An executor that fails is at its end."""
    with started(way, model) as engine:
        page_size = engine.description.layout.page_size
        (prompt,) = prompts(page_size)
        start = RowStart(0, np.array([3], dtype=np.int32), GREEDY)
        row = np.zeros(1, dtype=np.int32)
        engine.run(StepPlan(1, starts=(start,), chunks=(Chunk(0, 0, prompt, last=True),)))
        engine.run(StepPlan(2, decode_rows=row, grown_rows=row, grown_pages=np.array([7], dtype=np.int32)))
        for step in range(page_size - 1):
            engine.run(StepPlan(3 + step, decode_rows=row))
        with pytest.raises((AssertionError, ExecutorFailed), match="beyond its pages"):
            engine.run(StepPlan(99, decode_rows=row))


def test_the_digests_of_pages_are_the_crc_32_of_their_bytes_in_memory(engine: Engine) -> None:
    engine.answers(prompts(9, 70), GREEDY)
    total = engine.description.total_pages
    every = np.random.default_rng(1).permutation(total).astype(np.int32)
    expected = b"".join(binascii.crc32(bytes_of(engine, page)).to_bytes(4, "little") for page in every.tolist())
    assert engine.executor.digest_pages(every) == expected
    assert len({expected[at : at + 4] for at in range(0, 4 * total, 4)}) > 15, "pages that would show a difference"
    assert engine.executor.digest_pages(every[:0]) == b""


@pytest.mark.parametrize(
    ("layers", "groups", "expected"),
    [(8, 4, [2, 4, 6, 8]), (8, 2, [4, 8]), (8, 1, [8]), (8, 0, []), (3, 4, [1, 2, 3]), (10, 4, [2, 5, 7, 10])],
)
def test_progress_is_reported_after_each_group(layers: int, groups: int, expected: list[int]) -> None:
    told: list[int] = []
    progress = LayerProgress(torch.device("cpu"), layers, groups, told.append)
    for layer in range(1, layers + 1):
        progress.written(layer)
    assert told == expected


PROGRAM = """
import json, os, resource, threading, time
os.environ["OMP_NUM_THREADS"] = "2"
import torch
from engine.model_runner import keep_step_memory
from engine.torch_executor import end_own_pool

def threads():
    return len(os.listdir("/proc/self/task"))

def step():
    held = [b"x" * count for count in (2**26, 2**22, 2**20)]
    return sum(map(len, held))

def steps():
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

torch.set_num_threads(2)
end_own_pool()  # without one
counts = [threads()]
faults = []
keep_step_memory()
thread = threading.Thread(target=steps)
thread.start()
thread.join()
while threads() > counts[0]:
    time.sleep(0.001)  # it leaves /proc a moment later
for _ in range(2):
    whole = torch.ones(512, 512)
    assert (whole @ whole)[0, 0] == 512
    counts.append(threads())
    end_own_pool()
    counts.append(threads())
print(json.dumps([counts, faults[0]]))
"""


@pytest.fixture(scope="module")
def told() -> tuple[list[int], int]:
    """How many threads a process has before and after it computes, and the page faults of its second step."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    counts, faults = json.loads(done.stdout)
    return counts, faults


@pytest.mark.skipif(sys.platform != "linux", reason="it counts threads in /proc")
def test_the_threads_end_and_come_back_when_they_are_needed(told: tuple[list[int], int]) -> None:
    (before, *counts), _ = told
    assert counts == [before + 1, before] * 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is a setting of glibc")
def test_the_second_step_of_a_size_finds_the_memory_of_the_first(told: tuple[list[int], int]) -> None:
    _, faults = told
    assert faults < 2**26 // resource.getpagesize() // 4
