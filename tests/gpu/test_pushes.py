"""KV pushed between the memories of cards by separate processes: the transports' contract, pages, and what is refused.

Two processes on one card are enough for NIXL. NCCL takes one process per card, so what needs it to work needs two cards.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import TransferError
from common.messages.transfers import PushDone
from common.pages.layout import KVLayout, PageOrder
from common.processes.child import ChildEnded
from kv_transfer.links import busiest, bytes_sent
from kv_transfer.planner import PageSlice, plan_runs
from kv_transfer.transport import RunsDone, RunsFailed
from tests.kv_transfer.agent_process import Plan
from tests.kv_transfer.agents import Kind, ProcessBackend, done, nixl_kind, outcomes
from tests.kv_transfer.contract import MIB, SOURCE_SEED, Pair, TransportContract, pair_of, rows
from tests.kv_transfer.local_agent import WAIT_S, random_bytes
from tests.kv_transfer.members import Member

CARD = "cuda:0"
_NIXL = nixl_kind(tcp_only=False, silence_s=10)
NIXL = Kind("nixl", _NIXL.silence_s, _NIXL.environment, devices=(CARD,))
NCCL = Kind("torch", 10, devices=("cuda:0", "cuda:1"))
NCCL_ON_ONE_CARD = Kind("torch", 10, devices=(CARD,))


@pytest.fixture(scope="module", params=["nixl", "nccl"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessBackend]:
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL takes one process per card, and there is one card")
    made = ProcessBackend(tmp_path_factory.mktemp("agents"), NIXL if request.param == "nixl" else NCCL)
    yield made
    made.finish()


@pytest.fixture(scope="module")
def pair(backend: ProcessBackend) -> Pair:
    return pair_of(backend)


class TestTransportsOnCards(TransportContract):
    """The contract, with every pool on a card."""


def only_nixl(backend: ProcessBackend) -> None:
    if backend.kind.transport != "nixl":
        pytest.skip("a matter of NIXL")


@pytest.mark.parametrize("order", ["layer", "head"])
def test_scattered_pages_arrive_layer_group_by_layer_group(pair: Pair, order: PageOrder) -> None:
    """In either order of a page, and nothing of the later layers before their push."""
    layout = PageSlice(KVLayout(layers=4, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16", order=order))
    random = np.random.default_rng(5)
    pages = pair.source.pool_bytes // layout.layout.page_bytes
    source, target = (random.permutation(pages)[:100].astype(np.int32) for _ in range(2))
    pair.refresh()
    for layers in (range(3), range(3, 4)):
        ticket = pair.push_and_expect(plan_runs(source, target, layout, layout, layers))
        assert pair.ended(ticket) == [done(ticket)]
        pair.check_target()


def test_no_network_device_carries_what_moves_between_cards_of_one_host(pair: Pair, backend: ProcessBackend) -> None:
    """Without cuda_ipc UCX would send it over TCP, and say nothing."""
    only_nixl(backend)
    before = bytes_sent()
    for _ in range(4):
        pair.check_push(rows((0, 0, 16 * MIB)))
    assert busiest(before, bytes_sent(), 64 * MIB) is None


def test_a_receiver_that_is_killed_ends_every_push_and_its_successor_is_served(backend: ProcessBackend) -> None:
    """A mapping keeps the memory of a dead process, so pushes to it may be done, or fail."""
    source, target = backend.start(64 * MIB, 64 * MIB)
    source.fill(SOURCE_SEED)
    source.connect(target.pool)
    everything = rows((0, 0, 64 * MIB))
    source.push(1, target.pool.agent, everything)
    assert outcomes(source, [1]) == {1: done(1)}
    tickets = range(2, 34)
    source.push_many(tickets, target.pool.agent, everything)
    source.posted()
    target.kill()
    for _ in tickets[1:]:
        source.posted()
    ended = outcomes(source, tickets)
    assert all(isinstance(end, RunsDone) or end.quiescent for end in ended.values())
    source.close(target.pool.agent)
    _, successor = backend.start(MIB, 64 * MIB)
    source.connect(successor.pool)
    source.push(99, successor.pool.agent, everything)
    assert outcomes(source, [99]) == {99: done(99)}
    assert (successor.memory() == random_bytes(SOURCE_SEED, 64 * MIB)).all()


def test_a_receiver_that_died_unseen_is_noticed_in_time(backend: ProcessBackend) -> None:
    source, target = backend.start(MIB, MIB)
    source.connect(target.pool)
    target.kill()
    until, ticket = time.monotonic() + WAIT_S, 0
    while True:
        ticket += 1
        source.push(ticket, target.pool.agent, rows((0, 0, MIB)))
        if isinstance(outcomes(source, [ticket])[ticket], RunsFailed):
            break
        assert time.monotonic() < until, "pushes to a dead process are done, again and again"


def test_a_transfer_thread_pushes_pages_of_a_card(tmp_path: Path) -> None:
    """As in an instance: the thread that calls NIXL is not the one that made the pool."""
    plans = (
        Plan(transport="nixl", is_threaded=True, device=CARD, silence_s=10, total_pages=64, page_bytes=64 * 1024, seed=seed)
        for seed in (1, 2)
    )
    source, target = (Member(f"member-{at}", 1, plan, NIXL, tmp_path) for at, plan in enumerate(plans))
    try:
        for member in (source, target):
            member.started()
        source.connect([target])
        source.await_link(target, "ready")
        here, there = [5, 6, 7, 60], [3, 0, 63, 1]
        ended = source.await_push(source.push(target, here, there))
        assert isinstance(ended, PushDone), ended
        assert target.digest(there) == source.digest(here)
        for member in (source, target):
            member.end()
    finally:
        for member in (source, target):
            member.kill()


def test_two_processes_on_one_card_are_told_that_nccl_cannot_link_them(tmp_path: Path) -> None:
    backend = ProcessBackend(tmp_path, NCCL_ON_ONE_CARD)
    try:
        source, target = backend.start(MIB, MIB)
        with pytest.raises(TransferError, match=r"on the same GPU, .* use --transport nixl"):
            source.connect(target.pool)
    finally:
        backend.finish()


def test_memory_of_expandable_segments_is_refused_by_the_setting(tmp_path: Path) -> None:
    environment = {**NIXL.environment, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    backend = ProcessBackend(tmp_path, Kind("nixl", 10, environment=environment, devices=(CARD,)))
    with pytest.raises(ChildEnded, match="without expandable_segments"):
        backend.start(64 * MIB)


def test_the_benchmark_measures_pushes_beside_a_copy_on_the_card(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "launch.main", "bench", "engine", "--quick", "--only=pushes", "--device=cuda"]
    run = subprocess.run([*command, "--json", str(figures)], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    pushes = [figure for figure in json.loads(figures.read_text())["figures"] if figure["type"] == "HostPush"]
    assert {push["way"] for push in pushes} == {"device copy", "nixl thread"}
