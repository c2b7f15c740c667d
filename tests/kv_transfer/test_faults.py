"""Poison finds late writes: what the contract checks with it would be seen if a backend did it."""

from collections.abc import Iterator

import numpy as np
import pytest

from common.ids import Ticket
from common.pages.layout import MemoryRegion
from kv_transfer.memory import MemoryNetwork, MemoryTransport
from kv_transfer.transport import RunsDone, RunsFailed
from tests.kv_transfer.agent_process import pool_descriptor, random_bytes
from tests.kv_transfer.contract import POISON
from tests.kv_transfer.faults import FaultyTransport

PAGE_BYTES = 4096
PAGES = 8
PUSH = Ticket(1)
RUNS = np.array([(0, 2 * PAGE_BYTES, PAGE_BYTES)], dtype=np.int64)


class Scene:
    """A faulty source with one push to a target, whose pages are poisoned when they are someone else's."""

    def __init__(self) -> None:
        network = MemoryNetwork()
        self.source, self.target = random_bytes(1, PAGES * PAGE_BYTES), np.zeros(PAGES * PAGE_BYTES, dtype=np.uint8)
        self.transport = FaultyTransport(MemoryTransport(network))
        receiver = MemoryTransport(network)
        self.transport.register(self._region(self.source))
        agent, wire = receiver.register(self._region(self.target))
        self.transport.connect(pool_descriptor(agent, int(self.target.ctypes.data), len(self.target), wire, "memory"))
        self.transport.push(PUSH, agent, RUNS)

    def release_what_has_ended(self) -> bool:
        """Poison the page if its push has ended. True when it has."""
        for event in self.transport.poll():
            if isinstance(event, RunsDone) or (isinstance(event, RunsFailed) and event.quiescent):
                self.page[:] = POISON
                return True
        return False

    @property
    def page(self) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        return self.target[2 * PAGE_BYTES : 3 * PAGE_BYTES]

    @property
    def is_poisoned(self) -> bool:
        return bool((self.page == POISON).all())

    def _region(self, pool: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> MemoryRegion:
        return MemoryRegion(address=int(pool.ctypes.data), region_bytes=len(pool), device="cpu")


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.transport.close()


def test_a_page_whose_push_is_delayed_is_not_released_before_it_has_landed(scene: Scene) -> None:
    assert not scene.release_what_has_ended()
    scene.transport.land(PUSH)
    np.testing.assert_array_equal(scene.page, scene.source[:PAGE_BYTES])
    assert scene.release_what_has_ended()
    assert scene.is_poisoned


def test_a_page_whose_push_failed_without_proof_is_not_released(scene: Scene) -> None:
    scene.transport.fail(PUSH, quiescent=False)
    assert not scene.release_what_has_ended()
    scene.transport.land(PUSH)
    assert not scene.release_what_has_ended(), "a ticket ends once"
    assert not scene.is_poisoned


def test_a_write_after_a_false_proof_is_found_in_the_poison(scene: Scene) -> None:
    scene.transport.fail(PUSH, quiescent=True)
    assert scene.release_what_has_ended()
    assert scene.is_poisoned
    scene.transport.land(PUSH)
    scene.transport.poll()
    assert not scene.is_poisoned
