"""Poison finds late writes: what the contract checks with it would be seen if a backend did it."""

from collections.abc import Iterator

import numpy as np
import pytest

from common.ids import Ticket
from kv_transfer.memory import MemoryNetwork, MemoryTransport
from kv_transfer.transport import RunsDone, RunsFailed
from tests.kv_transfer.contract import POISON, rows
from tests.kv_transfer.faults import FaultyTransport
from tests.kv_transfer.local_agent import LocalAgent

PAGE_BYTES = 4096
PAGES = 8
PUSH = Ticket(1)


class Scene:
    """A faulty source with one push to a target, whose pages are poisoned when they are someone else's."""

    def __init__(self) -> None:
        network = MemoryNetwork()
        self.transport = FaultyTransport(MemoryTransport(network))
        source = LocalAgent(self.transport, PAGES * PAGE_BYTES)
        target = LocalAgent(MemoryTransport(network), PAGES * PAGE_BYTES)
        source.fill(1)
        source.connect(target.pool)
        source.push(PUSH, target.pool.agent, rows((0, 2 * PAGE_BYTES, PAGE_BYTES)))
        self.pushed, self.page = source.bytes[:PAGE_BYTES], target.bytes[2 * PAGE_BYTES : 3 * PAGE_BYTES]

    def release_what_has_ended(self) -> bool:
        """Poison the page if its push has ended. True when it has."""
        for event in self.transport.poll():
            if isinstance(event, RunsDone) or (isinstance(event, RunsFailed) and event.quiescent):
                self.page[:] = POISON
                return True
        return False

    @property
    def is_poisoned(self) -> bool:
        return bool((self.page == POISON).all())


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.transport.close()


def test_a_page_whose_push_is_delayed_is_not_released_before_it_has_landed(scene: Scene) -> None:
    assert not scene.release_what_has_ended()
    scene.transport.land(PUSH)
    np.testing.assert_array_equal(scene.page, scene.pushed)
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
