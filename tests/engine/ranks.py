"""Several ranks in one process: a thread for each, because a group is an object and needs no process of its own.

Owns the threads and the group between them. Knows runners, not what they compute.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import get_ident
from typing import TypeVar

import torch
from torch import Tensor

from common.config import EngineConfig, ModelConfig
from common.ids import Int32Array
from engine.kv_budget import Agree
from engine.model_runner import ModelRunner
from engine.parallel import Group, TorchGroup, open_store, reach_store
from tests.engine.exact import Answer, heard_answers, recorded_logits

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
    heard = defaultdict[int, list[Tensor]](list)  # the logits of each rank, by its thread

    def run(group: Group) -> list[Answer]:
        return heard_answers(runner_of(path, group, agree, **changes), prompts, tokens, chunk_tokens, heard[get_ident()])

    with recorded_logits(lambda: heard[get_ident()]):
        return on_ranks(ranks, run)


def _silent(text: str) -> None:
    """Progress that nobody reads."""
