"""KV moves between instances of any numbers of ranks: proven by the toys, whose next token depends on every byte of all ranks."""

import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from common.ids import Int32Array, Ticket
from common.instance.ports import Allow, Connect, LinkChanged, Push, PushDone, TransferEvent
from engine.toy import ToyExecutor
from kv_transfer.backends import make_transport
from kv_transfer.memory import MemoryNetwork, MemoryTransport
from kv_transfer.transport import Transport
from tests.builders import key
from tests.kv_transfer.ranked import RankedInstance, turn_until

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
