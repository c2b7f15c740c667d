"""What two ranks say to each other: slices that land as a whole and are answered, silence, and a pool that is closed."""

import fcntl
import os
import stat
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from common.addresses import LOOPBACK
from common.ids import Int64Array
from kv_transfer.torch_transport import SLICE_BYTES, SLICE_RUNS, Landing, RankPair, is_closed_by_peer, reason_of
from tests.kv_transfer.local_agent import WAIT_S

POOL_BYTES = 2**20
SILENCE_S = 1.0


class Two:
    """A sender and a receiver, each with a pool and a thread."""

    def __init__(self) -> None:
        self.source = torch.from_numpy(np.random.default_rng(1).integers(0, 255, POOL_BYTES, dtype=np.uint8))
        self.target = torch.zeros(POOL_BYTES, dtype=torch.uint8)
        self.landing = Landing(self.target)
        self._threads = ThreadPoolExecutor(2)
        store = HashStore()
        joining = [self._threads.submit(RankPair, store, "pair", rank, LOOPBACK, "cpu", 5.0, SILENCE_S) for rank in (0, 1)]
        self.receiver, self.sender = (each.result() for each in joining)

    def send(self, *runs: tuple[int, int, int]) -> "Future[None]":
        return self._threads.submit(self.sender.send_slice, self.source, rows(*runs))

    def take(self) -> "Future[bool]":
        return self._threads.submit(self.receiver.take_slice, self.landing)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self._threads.shutdown()


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.close()


def rows(*runs: tuple[int, int, int]) -> Int64Array:
    return np.array(runs, dtype=np.int64).reshape(-1, 3)


def test_a_slice_may_have_as_many_runs_as_a_header_holds(two: Two) -> None:
    starts = range(0, SLICE_RUNS * 64, 64)
    sent, taken = two.send(*((at, at, 64) for at in starts)), two.take()
    sent.result()
    assert taken.result()
    assert torch.equal(two.target[: SLICE_RUNS * 64], two.source[: SLICE_RUNS * 64])


def test_a_slice_of_nothing_is_answered(two: Two) -> None:
    sent, taken = two.send(), two.take()
    sent.result()
    assert taken.result()
    assert not two.target.any()


@pytest.mark.parametrize("run", [(0, POOL_BYTES - 9, 10), (0, -1, 10), (0, 2**62, 2**20)])
def test_a_run_that_would_land_outside_is_refused_by_the_receiver(two: Two, run: tuple[int, int, int]) -> None:
    sent, taken = two.send((0, 0, 100), run), two.take()
    with pytest.raises(ValueError, match="outside of the pool"):
        taken.result()
    two.receiver.close()
    with pytest.raises(RuntimeError) as broken:
        sent.result()
    assert is_closed_by_peer(broken.value)
    assert not two.target.any()


def test_nothing_lands_in_a_pool_that_is_closed_and_the_sender_learns_of_it(two: Two) -> None:
    two.landing.close()
    sent, taken = two.send((0, 0, 100)), two.take()
    assert not taken.result()
    two.receiver.close()
    with pytest.raises(RuntimeError) as broken:
        sent.result()
    assert is_closed_by_peer(broken.value)
    assert not two.target.any()


def test_a_receiver_that_says_nothing_is_given_up_and_nothing_is_proven(two: Two) -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError) as silent:
        two.send((0, 0, 100)).result()
    assert time.monotonic() - began >= 0.9 * SILENCE_S
    assert not is_closed_by_peer(silent.value)
    assert reason_of(silent.value).startswith("Timed out waiting ")


def unread_bytes() -> int:
    """How many bytes wait in the sockets of this process."""
    unread = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own file is gone again
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                unread += struct.unpack("i", fcntl.ioctl(int(name), termios.FIONREAD, bytes(4)))[0]
    return unread


def test_a_receiver_that_goes_while_a_slice_is_half_sent_is_known_to_be_gone(two: Two) -> None:
    """The bytes that the receiver does not read fill the socket, so the rest of the slice cannot be sent."""
    before, until = unread_bytes(), time.monotonic() + WAIT_S
    control = two.receiver._control
    control.receive(two.receiver._header)
    control.receive(two.receiver._staging)
    del control._under_way[1]  # so Gloo lets its bytes come and reads none of them
    sent = two.send(*[(0, 0, POOL_BYTES)] * (SLICE_BYTES // POOL_BYTES))
    control.finish(until)
    while unread_bytes() < before + 2**15:
        assert time.monotonic() < until
        time.sleep(1e-3)
    two.receiver.close()
    with pytest.raises(RuntimeError) as gone:
        sent.result()
    assert is_closed_by_peer(gone.value)


class Nccl:
    """In place of NCCL, whose messages to a receiver that died do not end."""

    def send(self, tensor: torch.Tensor) -> None:
        pass

    def finish(self, until: float) -> None:
        raise RuntimeError("Timed out waiting for NCCL")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("is_gone", [True, False])
def test_when_nccl_hangs_the_other_connection_tells_whether_the_receiver_is_gone(two: Two, is_gone: bool) -> None:
    two.sender._data = Nccl()  # type: ignore[assignment]
    sent = two.send((0, 0, 100))
    two.receiver._control.receive(two.receiver._header)
    two.receiver._control.finish(time.monotonic() + SILENCE_S)
    if is_gone:
        two.receiver.close()
    with pytest.raises(RuntimeError) as failed:
        sent.result()
    assert is_closed_by_peer(failed.value) == is_gone


def test_a_sender_that_is_gone_ends_the_wait_of_the_receiver_at_once(two: Two) -> None:
    taken = two.take()
    two.sender.close()
    with pytest.raises(RuntimeError) as gone:
        taken.result()
    assert not reason_of(gone.value).startswith("Timed out waiting "), "it did not wait for the silence to be over"
    assert is_closed_by_peer(gone.value)


@pytest.mark.parametrize("rows", [[(0, 2**20 + 1)], [(-1, 1)], [(0, -1)], [(0, SLICE_BYTES), (0, 1)]])
def test_rows_that_cannot_land_are_refused(rows: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="outside of the pool"):
        Landing(torch.zeros(2**20, dtype=torch.uint8)).check(np.array(rows, dtype=np.int64))


def test_closing_a_landing_waits_for_what_is_landing() -> None:
    """A page is whole, or untouched."""
    pool = torch.zeros(SLICE_BYTES, dtype=torch.uint8)
    landing = Landing(pool)
    staged, everything = torch.ones(SLICE_BYTES, dtype=torch.uint8), np.array([(0, SLICE_BYTES)], dtype=np.int64)
    scatter: Callable[[], bool] = lambda: landing.scatter(staged, everything)  # noqa: E731
    thread = threading.Thread(target=scatter)
    thread.start()
    landing.close()
    seen = pool.sum().item()
    thread.join()
    assert pool.sum().item() == seen
    assert seen in (0, SLICE_BYTES)
    assert not scatter()
