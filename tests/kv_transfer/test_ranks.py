"""KV moves between instances of any numbers of ranks: proven by the toys, whose next token depends on every byte of all ranks.

Each rank has its pool, its transfer loop and its part of every page.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from common.executor import Chunk, RowStart, StepPlan
from common.ids import Incarnation, InstanceId, Int32Array, Ticket
from common.instance.ports import Transfers
from common.messages import InstanceInfo, ModelIdentity, RankInfo
from common.messages.transfers import Allow, Connect, LinkChanged, Push, PushDone, TransferEvent
from common.sampling_params import SamplingParams
from kv_transfer.backends import make_transport
from kv_transfer.target_ranks import RankedTransfers, TargetRanks
from kv_transfer.transfer_loop import TransferLoop
from kv_transfer.transport import Transport
from tests.builders import key
from tests.engine.toy import ToyExecutor, ToyRanks
from tests.kv_transfer.memory import MemoryNetwork, MemoryTransport

PAGES = 24
WAIT_S = 30.0
SAMPLING = SamplingParams(max_new_tokens=4)


class RankedInstance:
    """transfers: what its scheduler would see."""

    def __init__(self, name: str, ranks: int, kv_heads: int, make_transport: Callable[[], Transport], backend: str) -> None:
        group = ToyRanks(ranks, wake=lambda: None)
        self.toys = [ToyExecutor(PAGES, 2, kv_heads=kv_heads, ranks=group) for _ in range(ranks)]
        self.loops = [
            TransferLoop(
                make_transport(),
                backend,
                toy.description.memory,
                toy.description.layout,
                PAGES,
                time.monotonic,
                first_head=toy.heads.start,
            )
            for toy in self.toys
        ]
        parts = [TargetRanks(loop, rank, ranks, kv_heads) for rank, loop in enumerate(self.loops)]
        self.transfers: Transfers = parts[0] if ranks == 1 else RankedTransfers(parts)
        self.steps = 0
        model: ModelIdentity = self.toys[0].description.model
        self.info = InstanceInfo(
            id=InstanceId(name),
            incarnation=Incarnation(f"{name}-1"),
            role="prefill",
            inbox="tcp://127.0.0.1:1",
            ranks=tuple(RankInfo(rank=rank, pid=1, host="here", device="cpu") for rank in range(ranks)),
            model=model,
            pools=tuple(loop.descriptor for loop in self.loops),
            max_running=2,
        )

    def sample(self, plan: StepPlan) -> int:
        """The token of a step of one row, which is the same on all ranks."""
        steps = [toy.launch(plan) for toy in self.toys]
        results = [step.poll() for step in steps]
        (token,) = {int(result.tokens[0]) for result in results if result is not None and len(result.tokens)} or {-1}
        assert None not in results
        return token

    def compute(self, prompt: Int32Array, pages: Int32Array, begin: int, end: int) -> int:
        """Compute the prompt from one token to another; the token that follows, if it is the prompt's end."""
        self.steps += 1
        starts = (RowStart(0, pages, SAMPLING),) if begin == 0 else ()
        chunk = Chunk(0, begin, prompt[begin:end], last=end == len(prompt))
        return self.sample(StepPlan(self.steps, starts=starts, chunks=(chunk,)))

    def decode(self, pages: Int32Array, tokens: int, last: int) -> int:
        """The token after one that follows a prompt whose KV is in these pages."""
        self.steps += 1
        start = RowStart(0, pages, SAMPLING, length=tokens, last_token=last)
        return self.sample(StepPlan(self.steps, starts=(start,), decode_rows=np.zeros(1, dtype=np.int32)))

    def close(self) -> None:
        self.transfers.close()


def turn_until(instances: Sequence[RankedInstance], events: list[TransferEvent], number: int) -> None:
    """Turn all loops until the first instance's transfers have reported so many events."""
    ends_s = time.monotonic() + WAIT_S
    while len(events) < number:
        assert time.monotonic() < ends_s, f"only {events}"
        for instance in instances:
            for loop in instance.loops:
                loop.step()
        events += instances[0].transfers.poll()


PROMPT = np.arange(100, 119, dtype=np.int32)  # 19 tokens: 4 full pages of 4 and one with 3
THERE = np.array([9, 2, 17, 5, 11], dtype=np.int32)
HERE = np.array([3, 4, 20, 0, 7], dtype=np.int32)
DEGREES = [(1, 2, 4), (2, 1, 4), (2, 4, 4), (4, 2, 4), (4, 4, 4), (1, 4, 2), (2, 4, 2), (4, 2, 2), (4, 4, 2), (4, 1, 1)]
"""(ranks that write, ranks that are written to, KV heads). The last have more ranks than heads."""


class Pair:
    """A writer and a reader; the reader decodes the token after `first`. told: what the writer's transfers have reported."""

    def __init__(self, sources: int, targets: int, kv_heads: int, make: Callable[[], Transport], backend: str) -> None:
        self.source = RankedInstance("p", sources, kv_heads, make, backend)
        self.target = RankedInstance("d", targets, kv_heads, make, backend)
        self.told: list[TransferEvent] = []
        self.first = 0
        alone = RankedInstance("alone", 1, kv_heads, lambda: MemoryTransport(MemoryNetwork()), "memory")
        first = alone.compute(PROMPT, THERE, 0, len(PROMPT))
        self.expected = first, alone.decode(THERE, len(PROMPT), first)

    def connect(self) -> None:
        info = self.target.info
        self.source.transfers.submit(Connect((info,)))
        turn_until((self.source, self.target), self.told, 1)
        (event,) = self.told
        assert isinstance(event, LinkChanged) and event.link.state == "ready", event
        self.source.transfers.submit(Allow(info.id, info.incarnation, 1e12))

    def push(self, source_pages: Int32Array, target_pages: Int32Array, layers: range | None = None) -> PushDone:
        info, before = self.target.info, len(self.told)
        push = Push(Ticket(before), info.id, info.incarnation, source_pages, target_pages, key(), layers)
        self.source.transfers.submit(push)
        turn_until((self.source, self.target), self.told, before + 1)
        done = self.told[-1]
        assert isinstance(done, PushDone) and done.ticket == before, done
        return done

    def hand_off(self) -> int:
        """The prompt is computed in two chunks; the pages of the first are pushed before the second. Returns the bytes pushed."""
        self.connect()
        self.source.compute(PROMPT, THERE, 0, 12)
        pushed = self.push(THERE[:3], HERE[:3]).pushed_bytes
        self.first = self.source.compute(PROMPT, THERE, 12, len(PROMPT))
        pushed += self.push(THERE[3:], HERE[3:], range(1)).pushed_bytes
        return pushed + self.push(THERE[3:], HERE[3:], range(1, 2)).pushed_bytes

    def decode(self) -> tuple[int, int]:
        """The two tokens after the prompt, one by the writer and one by the reader."""
        return self.first, self.target.decode(HERE, len(PROMPT), self.first)


@pytest.mark.parametrize(("sources", "targets", "kv_heads"), DEGREES)
def test_what_a_prompt_wrote_on_some_ranks_is_decoded_on_others(sources: int, targets: int, kv_heads: int) -> None:
    network = MemoryNetwork()
    pair = Pair(sources, targets, kv_heads, lambda: MemoryTransport(network), "memory")
    pushed = pair.hand_off()
    assert pair.decode() == pair.expected
    assert pushed == len(THERE) * pair.target.info.page_bytes, "every rank of the reader gets its part once"


@pytest.fixture(params=["cma", "nixl"])
def real_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    if sys.platform != "linux":
        pytest.skip("both are for Linux")
    pair = Pair(2, 4, 4, lambda: make_transport(request.param), request.param)
    yield pair
    pair.source.close()
    pair.target.close()


def test_real_transports_move_kv_between_unequal_ranks(real_pair: Pair) -> None:
    real_pair.hand_off()
    assert real_pair.decode() == real_pair.expected


Toys = list[ToyExecutor]


def other_heads(toys: Toys) -> None:
    toys[1].pages[HERE] = toys[1].pages[HERE][:, :, :, ::-1]


def other_rank(toys: Toys) -> None:
    kept: NDArray[np.uint8] = toys[0].pages[HERE].copy()
    toys[0].pages[HERE] = toys[1].pages[HERE]
    toys[1].pages[HERE] = kept


def missing_rank(toys: Toys) -> None:
    toys[1].pages[HERE] = 0


def missing_layer_of_a_rank(toys: Toys) -> None:
    toys[0].pages[HERE[3:], 1] = 0


@pytest.mark.parametrize("damage", [other_heads, other_rank, missing_rank, missing_layer_of_a_rank])
def test_what_is_misplaced_among_ranks_changes_the_answer(damage: Callable[[Toys], None]) -> None:
    network = MemoryNetwork()
    pair = Pair(1, 2, 4, lambda: MemoryTransport(network), "memory")
    pair.hand_off()
    damage(pair.target.toys)
    assert pair.decode()[1] != pair.expected[1]


def test_a_copy_of_a_head_that_differs_from_the_other_changes_the_answer() -> None:
    network = MemoryNetwork()
    pair = Pair(1, 4, 2, lambda: MemoryTransport(network), "memory")
    pair.hand_off()
    missing_rank(pair.target.toys)
    assert pair.decode()[1] != pair.expected[1]
