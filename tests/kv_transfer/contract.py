"""The contract of a transport: what every backend must do with runs of bytes, whatever lies between its agents.

Owns the cases and their reference, which is a copy with numpy. Knows no backend: `test_transports.py` runs it against each.
"""

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from common.errors import TransferError
from common.ids import Int64Array
from common.pages.layout import KVLayout
from kv_transfer.planner import PageSlice, plan_runs
from kv_transfer.transport import RunsDone, RunsFailed
from tests.kv_transfer.agents import Agent, Backend, done, outcomes
from tests.kv_transfer.local_agent import WAIT_S, random_bytes
from tests.kv_transfer.pools import Bytes

MIB = 2**20
POOL_BYTES = 20 * MIB + 12346
"""The size of the two pools that most cases share: some slices of a push, and a rest."""
LATE_S = 0.3
"""What is written so long after its push has ended would be found."""
SOURCE_SEED = 1
POISON = 0xDB


@dataclass(slots=True, eq=False)
class Pair:
    """A source that is connected to a target, both with pools of the same size, and what the target should hold."""

    source: Agent
    target: Agent
    tickets: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    source_bytes: Bytes = field(init=False)
    expected: Bytes = field(init=False)

    def __post_init__(self) -> None:
        self.source.fill(SOURCE_SEED)
        self.source_bytes = random_bytes(SOURCE_SEED, self.source.pool_bytes)
        self.refresh()
        self.source.connect(self.target.pool)

    def refresh(self) -> None:
        """Other bytes in the whole target, so that nothing of a former push passes for this one's."""
        value = next(self.tickets) % 256
        self.target.wipe(value)
        self.expected = np.full(self.target.pool_bytes, value, dtype=np.uint8)

    def push(self, runs: Int64Array) -> int:
        ticket = next(self.tickets)
        self.source.push(ticket, self.target.pool.agent, runs)
        return ticket

    def push_and_expect(self, runs: Int64Array) -> int:
        """Push, and expect the bytes at the target."""
        for source_offset, target_offset, run_bytes in runs.tolist():
            moved = self.source_bytes[source_offset : source_offset + run_bytes]
            self.expected[target_offset : target_offset + run_bytes] = moved
        return self.push(runs)

    def check_push(self, runs: Int64Array) -> None:
        """Push into a target that holds other bytes. The runs arrive, and nothing else changes."""
        self.refresh()
        ticket = self.push_and_expect(runs)
        assert self.ended(ticket) == [done(ticket)]
        self.check_target()

    def poison(self, start: int, end: int) -> None:
        """The pages are someone else's now: other bytes, which must stay."""
        self.target.wipe(POISON, start, end)
        self.expected[start:end] = POISON

    def ended(self, *tickets: int) -> list[RunsDone | RunsFailed]:
        ended = outcomes(self.source, tickets)
        return [ended[ticket] for ticket in tickets]

    def check_target(self) -> None:
        """Every byte of the target's pool is as expected, also those that no run names."""
        wrong = np.flatnonzero(self.target.memory() != self.expected)
        assert not len(wrong), f"{len(wrong)} bytes are wrong, between {wrong[0]} and {wrong[-1]}"


def pair_of(backend: Backend) -> Pair:
    """Two new agents."""
    source, target = backend.start(POOL_BYTES, POOL_BYTES)
    return Pair(source, target)


def pages(number: int, page_bytes: int, seed: int) -> Int64Array:
    """Runs of one page each, scattered over both pools."""
    random = np.random.default_rng(seed)
    all_pages = POOL_BYTES // page_bytes
    source, target = random.permutation(all_pages)[:number], random.permutation(all_pages)[:number]
    return np.stack([source * page_bytes, target * page_bytes, np.full(number, page_bytes)], axis=1)


def rows(*runs: tuple[int, int, int]) -> Int64Array:
    return np.array(runs, dtype=np.int64).reshape(-1, 3)


def apart(number: int, run_bytes: int) -> Int64Array:
    """Runs with gaps between them, in the reverse order at the target."""
    starts = np.arange(number, dtype=np.int64) * (run_bytes + 77)
    return np.stack([starts + 5, starts[::-1] + 11, np.full(number, run_bytes)], axis=1)


LAST = POOL_BYTES - 4097
RUNS = {
    "thousands of scattered pages": pages(4000, 4096, seed=0),
    "pages that divide no slice": pages(45, 28 * 16 * 1024, seed=3),
    "a kilobyte": apart(16, 1024),
    "64 kilobytes": apart(16, 64 * 1024),
    "a megabyte": apart(16, MIB),
    "several slices": rows((MIB - 5, 77, 19 * MIB)),
    "odd sizes at odd places": rows((1, 2, 1), (3, 1001, 4097), (7, 9001, 65539), (12345, LAST, 4097), (LAST, 0, 1)),
}


def at_once(*actions: Callable[[], object]) -> None:
    """Do all of them at the same time."""
    with ThreadPoolExecutor(len(actions)) as threads:
        for doing in [threads.submit(action) for action in actions]:
            doing.result()


def blocks_of(pool: Bytes, layout: KVLayout) -> Bytes:
    """The first pages of a pool as [pages, layer, key or value, head, bytes of a block], in the order "layer": a view."""
    pages = len(pool) // layout.page_bytes
    shape = (pages, layout.layers, 2, layout.kv_heads, layout.page_size * layout.slot_bytes)
    return pool[: pages * layout.page_bytes].reshape(shape)


class TransportContract:
    """Takes the fixtures `pair`, two connected agents, and `backend`, which makes more."""

    @pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
    def test_runs_arrive_and_nothing_else_changes(self, pair: Pair, runs: Int64Array) -> None:
        pair.check_push(runs)

    @pytest.mark.parametrize("target_heads", [range(2, 3), range(1, 4), range(8)], ids=["fewer", "some of each", "more"])
    def test_pages_of_unequal_tensor_parallelism_arrive_head_by_head(self, pair: Pair, target_heads: range) -> None:
        """The source rank holds heads 2 and 3. What both hold arrives, in whole pages, also where the last one is not full."""
        pair.refresh()
        source_heads = range(2, 4)
        ours, theirs = (
            KVLayout(layers=3, kv_heads=len(heads), head_dim=32, page_size=16, dtype="float32")
            for heads in (source_heads, target_heads)
        )
        source_pages, target_pages = np.array([7, 3, 8], dtype=np.int32), np.array([1, 9, 4], dtype=np.int32)
        sides = PageSlice(ours, source_heads.start), PageSlice(theirs, target_heads.start)
        ticket = pair.push(plan_runs(source_pages, target_pages, *sides))
        held, wanted = blocks_of(pair.source_bytes, ours), blocks_of(pair.expected, theirs)
        for source_page, target_page in zip(source_pages, target_pages, strict=True):
            for head in set(source_heads) & set(target_heads):
                moved = held[source_page, :, :, head - source_heads.start]
                wanted[target_page, :, :, head - target_heads.start] = moved
        assert pair.ended(ticket) == [done(ticket)]
        pair.check_target()

    def test_many_pushes_in_flight_all_end(self, pair: Pair) -> None:
        pair.refresh()
        everything = pages(1024, 16 * 1024, seed=3)
        tickets = [pair.push_and_expect(part) for part in np.split(everything, 64)]
        assert pair.ended(*tickets) == [done(ticket) for ticket in tickets]
        pair.check_target()

    @pytest.mark.parametrize(
        "run",
        [(0, POOL_BYTES - 99, 100), (0, POOL_BYTES + 4096, 100), (POOL_BYTES - 99, 0, 100), (0, -4096, 100), (-4096, 0, 100)],
        ids=["past the end", "behind the end", "past the source's end", "before the start", "before the source's start"],
    )
    def test_a_run_outside_of_a_pool_fails_and_writes_nothing(self, pair: Pair, run: tuple[int, int, int]) -> None:
        pair.refresh()
        outside = pair.push(rows(run))
        (ended,) = pair.ended(outside)
        assert isinstance(ended, RunsFailed) and ended.quiescent
        inside = pair.push_and_expect(rows((0, 0, 100)))
        assert pair.ended(inside) == [done(inside)], "the link is as good as before"
        pair.check_target()

    def test_a_push_of_which_one_run_is_outside_of_the_pool_fails(self, pair: Pair) -> None:
        runs = np.concatenate([pages(64, 64 * 1024, seed=4), rows((0, POOL_BYTES, 1))])
        ticket = pair.push(runs)
        (ended,) = pair.ended(ticket)
        assert isinstance(ended, RunsFailed)

    def test_a_push_to_an_agent_without_a_link_fails(self, pair: Pair) -> None:
        pair.source.push(10**6, "nobody", rows((0, 0, 1)))
        ended = outcomes(pair.source, [10**6])[10**6]
        assert isinstance(ended, RunsFailed) and ended.quiescent and ended.reason == "no link to nobody"

    def test_connecting_again_changes_nothing(self, pair: Pair) -> None:
        pair.source.connect(pair.target.pool)
        pair.check_push(rows((0, 0, 4096)))

    def test_a_descriptor_under_a_wrong_name_is_refused_and_hurts_no_link(self, pair: Pair) -> None:
        with pytest.raises(TransferError):
            pair.source.connect(msgspec.structs.replace(pair.target.pool, agent="impostor"))
        pair.check_push(rows((0, 0, 4096)))

    def test_a_link_that_is_closed_in_mid_push_ends_every_ticket_and_can_be_made_again(self, pair: Pair) -> None:
        tickets = [pair.push(rows((0, 0, 20 * MIB))) for _ in range(8)]
        pair.source.close(pair.target.pool.agent)
        late = pair.push(rows((0, 0, 100)))
        *ended, refused = pair.ended(*tickets, late)
        assert all(isinstance(end, RunsDone) or end.quiescent for end in ended), "each of them was followed to its end"
        assert isinstance(refused, RunsFailed) and refused.quiescent
        pair.source.connect(pair.target.pool)
        pair.check_push(pages(100, 4096, seed=5))

    def test_nothing_is_written_into_a_page_after_its_push_has_ended(self, pair: Pair) -> None:
        pair.refresh()
        pair.source.connect(pair.target.pool)
        part = 2 * MIB
        ranges = {pair.push(rows((at, at, part))): (at, at + part) for at in range(0, 10 * part, part)}
        pair.source.close(pair.target.pool.agent)
        until = time.monotonic() + WAIT_S
        left = dict(ranges)
        while left:
            assert time.monotonic() < until, f"tickets {sorted(left)} did not end"
            for event in pair.source.events(1.0):
                if isinstance(event, RunsDone) or (isinstance(event, RunsFailed) and event.quiescent):
                    pair.poison(*left.pop(event.ticket))
        time.sleep(LATE_S)
        pair.check_target()
        pair.source.connect(pair.target.pool)  # for who comes next

    def test_two_agents_connect_to_each_other_at_once_and_push_both_ways(self, backend: Backend) -> None:
        one, other = backend.start(MIB, MIB)
        one.fill(1)
        other.fill(2)
        at_once(lambda: one.connect(other.pool), lambda: other.connect(one.pool))
        half = MIB // 2
        run = rows((0, half, half))
        at_once(lambda: one.push(1, other.pool.agent, run), lambda: other.push(2, one.pool.agent, run))
        assert outcomes(one, [1]) | outcomes(other, [2]) == {1: done(1), 2: done(2)}
        for mine, theirs, seed in ((one, 2, 1), (other, 1, 2)):
            expected = np.concatenate([random_bytes(seed, MIB)[:half], random_bytes(theirs, MIB)[:half]])
            np.testing.assert_array_equal(mine.memory(), expected)
        for agent in (one, other):
            agent.end()
