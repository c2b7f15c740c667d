"""Poison finds late writes: what the contract checks with it would be seen if a backend did it."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from kv_transfer.transport import RunsDone, RunsFailed
from tests.kv_transfer.contract import POISON, rows
from tests.kv_transfer.local_agent import LocalAgent
from tests.kv_transfer.memory import MemoryNetwork, MemoryTransport

PAGE_BYTES = 4096
PAGES = 8


class Scene:
    """A source with one push on its way to a target, whose pages are poisoned when they are someone else's."""

    def __init__(self) -> None:
        network = MemoryNetwork(hold=True)
        self.transport = MemoryTransport(network)
        source = LocalAgent(self.transport, PAGES * PAGE_BYTES)
        target = LocalAgent(MemoryTransport(network), PAGES * PAGE_BYTES)
        source.fill(1)
        source.connect(target.pool)
        source.push(1, target.pool.agent, rows((0, 2 * PAGE_BYTES, PAGE_BYTES)))
        self.pushed, self.page = source.bytes[:PAGE_BYTES], target.bytes[2 * PAGE_BYTES : 3 * PAGE_BYTES]
        (self.write,) = self.transport.held

    def land_late(self) -> None:
        """The bytes arrive although the push was reported as failed."""
        replace(self.write, landed=Future()).land()

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
    scene.transport.release()
    np.testing.assert_array_equal(scene.page, scene.pushed)
    assert scene.release_what_has_ended()
    assert scene.is_poisoned


def test_a_page_whose_push_failed_without_proof_is_not_released(scene: Scene) -> None:
    scene.transport.fail("injected", quiescent=False)
    assert not scene.release_what_has_ended()
    scene.land_late()
    assert not scene.release_what_has_ended(), "a ticket ends once"
    assert not scene.is_poisoned


def test_a_write_after_a_false_proof_is_found_in_the_poison(scene: Scene) -> None:
    scene.transport.fail("injected", quiescent=True)
    assert scene.release_what_has_ended()
    assert scene.is_poisoned
    scene.land_late()
    scene.transport.poll()
    assert not scene.is_poisoned
