"""Several ranks in one process: a thread for each, because a group is an object and needs no process of its own.

Owns the threads and the group between them. Knows runners, not what they compute.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar
from unittest import mock

import torch
from torch import Tensor

from common.config import EngineConfig, ModelConfig
from common.executor import StepPlan, StepResult
from common.ids import Int32Array
from engine.kv_budget import Agree
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.parallel import Group, TorchGroup, open_store, reach_store
from tests.engine.driver import Driver
from tests.engine.exact import GREEDY, Answer

CPU, HOST = torch.device("cpu"), "127.0.0.1"
CONNECT_S = 60.0
T = TypeVar("T")


def on_ranks(ranks: int, run: Callable[[TorchGroup], T]) -> list[T]:
    """What `run` returned on each rank. A rank that fails leaves, which ends the others."""
    store = open_store(HOST)

    def be(rank: int) -> T:
        ours = store if rank == 0 else reach_store(HOST, store.port, CONNECT_S)
        with closing(TorchGroup(ours, rank, ranks, CPU, HOST, CONNECT_S)) as group:
            return run(group)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(be, range(ranks)))


def least_of(ranks: int) -> Agree:
    """As the leader does it: each rank offers, and all get the least. For the threads of one group."""
    offers: list[int] = []
    barrier = threading.Barrier(ranks)

    def agree(pages: int) -> int:
        offers.append(pages)
        barrier.wait(CONNECT_S)
        least = min(offers)
        if barrier.wait(CONNECT_S) == 0:
            offers.clear()
        barrier.wait(CONNECT_S)
        return least

    return agree


def runner_of(path: Path, group: Group, agree: Agree, **changes: object) -> ModelRunner:
    """One rank's runner on the CPU, with room for a few contexts of these small models."""
    fields: dict[str, object] = {"device": "cpu", "page_size": 16, "kv_memory": "4MiB", "max_running": 8}
    return ModelRunner(ModelConfig(model=str(path)), EngineConfig(**(fields | changes)), _silent, group, agree)  # type: ignore[arg-type]


def answers_of_ranks(
    path: Path, ranks: int, prompts: Sequence[Int32Array], tokens: int, chunk_tokens: int, **changes: object
) -> list[list[Answer]]:
    """The greedy answers of each rank, with the logits that it had. All prompts at once, as `exact.answers`."""
    agree = least_of(ranks)

    def run(group: Group) -> list[Answer]:
        made = runner_of(path, group, agree, **changes)
        given = [Answer(prompt) for prompt in prompts]

        def step(plan: StepPlan) -> StepResult:
            calls = logits_of[threading.get_ident()]
            calls.clear()
            result = made.run(plan)
            for row, logits in zip(plan.sampled_rows.tolist(), calls[-1] if calls else (), strict=True):
                given[row].logits.append(logits.clone())
            return result

        driver = Driver(step, made.description)
        for answer, sampled in zip(given, driver.answers(prompts, tokens, GREEDY, chunk_tokens), strict=True):
            answer.tokens.extend(sampled)
        return given

    with _logits_by_thread() as logits_of:
        return on_ranks(ranks, run)


@contextmanager
def _logits_by_thread() -> Iterator[dict[int, list[Tensor]]]:
    """What `Decoder.logits` returns while this lasts, call by call, for each thread."""
    original = Decoder.logits
    calls: dict[int, list[Tensor]] = defaultdict(list)

    def recording(self: Decoder, hidden: Tensor) -> Tensor:
        calls[threading.get_ident()].append(original(self, hidden))
        return calls[threading.get_ident()][-1]

    with mock.patch.object(Decoder, "logits", recording):
        yield calls


def _silent(text: str) -> None:
    """Progress that nobody reads."""
