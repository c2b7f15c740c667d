"""Transfers between two hosts, as near as one host comes to it: what a slow link does to a push, and one that is cut.

The hosts are network namespaces, which only root may make; elsewhere these tests are skipped. NIXL may use TCP only: it would
write straight into the other process, whatever namespace that is in.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from common.errors import TransferError
from common.messages.transfers import PushDone, PushFailed
from kv_transfer.links import RETRY_S
from tests.kv_transfer.agents import Kind, mooncake_kind, nixl_kind
from tests.kv_transfer.hosts import Cable, Held, TwoHosts, await_true, is_within, processes_in
from tests.kv_transfer.local_agent import random_bytes
from tests.kv_transfer.members import Ended
from tests.kv_transfer.pools import Bytes
from tests.kv_transfer.test_transports import needs
from tests.rig.namespaces import two_namespaces

PAGE_BYTES = 64 * 1024
PAGES = 640
SLOW_MBIT = 50
SLOW_BYTES_PER_S = SLOW_MBIT * 1e6 / 8
POISON = 0xDB
STRUCK, OTHERS = range(320), range(320, PAGES)
"""Target pages whose pushes are cut, and of those that are pushed when all is over."""
MARGIN_S = 60.0
"""Ends the wait for a cut link to be noticed after its silence, and for a healed link to come back."""
CLOSED_S = 60.0
"""Ends the wait for the other end of a dead connection to close. UCX asks after 10 s of silence."""
KINDS = {
    "nixl": nixl_kind(tcp_only=True, silence_s=2),
    "torch": Kind("torch", silence_s=2),
    "mooncake": mooncake_kind(silence_s=5),
}
IS_QUIESCENT = {"nixl": True, "torch": False, "mooncake": False}
"""Whether a cut link proves that what was under way has ended."""


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    try:
        with two_namespaces() as (near, far):
            yield Cable(near, far)
            assert not processes_in(near) + processes_in(far), "a process is left"
    except TransferError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    needs(request.param)
    return KINDS[request.param]


@pytest.fixture(scope="module")
def hosts(cable: Cable, kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    made = TwoHosts(cable, kind, PAGES, PAGE_BYTES, tmp_path_factory.mktemp("members"))
    try:
        made.start()
        yield made
        made.source.end()
        made.target.end()
    finally:
        made.kill()


@dataclass(slots=True, eq=False)
class Pages:
    """Pages to push, scattered over both pools, and what the target holds when they have arrived."""

    source: list[int]
    target: list[int]
    expected: Bytes


def scattered(hosts: TwoHosts, number: int, among: range = range(PAGES)) -> Pages:
    """Target pages are among these. The target is as at the beginning."""
    random = np.random.default_rng(number)
    source, target = random.permutation(PAGES)[:number], random.permutation(among)[:number]
    expected = hosts.target.memory()
    expected[target] = random_bytes(1, PAGES * PAGE_BYTES).reshape(PAGES, PAGE_BYTES)[source]
    return Pages(source.tolist(), target.tolist(), expected)


def push(hosts: TwoHosts, pages: Pages) -> Ended:
    return hosts.source.await_push(hosts.source.push(hosts.target, pages.source, pages.target))


def test_scattered_pages_arrive_and_nothing_else_changes(hosts: TwoHosts) -> None:
    hosts.connect()
    pages = scattered(hosts, 450)
    assert isinstance(push(hosts, pages), PushDone)
    np.testing.assert_array_equal(hosts.target.memory(), pages.expected)


def test_a_link_that_is_slow_is_not_lost(hosts: TwoHosts, kind: Kind) -> None:
    hosts.connect()
    pages = scattered(hosts, round(1.2 * kind.silence_s * SLOW_BYTES_PER_S / PAGE_BYTES))
    hosts.cable.slow(SLOW_MBIT)
    ended = push(hosts, pages)
    assert isinstance(ended, PushDone)
    assert ended.seconds > kind.silence_s, "it was under way for longer than a lost peer is waited for"
    assert hosts.source.link_to(hosts.target) == "ready"
    np.testing.assert_array_equal(hosts.target.memory(), pages.expected)


# --- the link is cut in mid push ---------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Cuts:
    """What became of two pushes in the middle of which the link was cut. The first time the transfer loop made the link again by
    itself, the second time it was told to.

    ends: of the pushes, and how many seconds after the cut. back_s: how long after the first loss the link was ready again.
    before, after: what was open without a link. again: the end of a push when all was over, and expected: what that one should
    make of the target's pool, which is left.
    """

    ends: list[tuple[Ended, float]]
    back_s: float
    before: Held
    after: Held
    again: Ended
    expected: Bytes
    left: Bytes


@pytest.fixture(scope="module")
def cuts(hosts: TwoHosts) -> Cuts:
    before = held_after_a_link(hosts)
    hosts.connect()
    ends = [cut_in_mid_push(hosts)]
    lost_s = time.monotonic()
    hosts.cable.heal()
    hosts.source.await_link(hosts.target, "ready")
    back_s = time.monotonic() - lost_s
    ends.append(cut_in_mid_push(hosts))
    hosts.disconnect()
    hosts.cable.heal()
    await_true(lambda: is_within(hosts.held(), before), CLOSED_S)
    after = hosts.held()
    hosts.connect()
    others = scattered(hosts, 256, among=OTHERS)
    again = push(hosts, others)
    return Cuts(ends, back_s, before, after, again, others.expected, hosts.target.memory())


def held_after_a_link(hosts: TwoHosts) -> Held:
    """What is open when a link was made, used and closed: some of it, libraries keep for ever."""
    hosts.connect()
    assert isinstance(push(hosts, scattered(hosts, 1)), PushDone)
    hosts.disconnect()
    return hosts.held_at_rest()


def cut_in_mid_push(hosts: TwoHosts) -> tuple[Ended, float]:
    """How the push ended, and how long after the cut. Then its pages were someone else's."""
    pages = scattered(hosts, len(STRUCK), among=STRUCK)
    first = pages.target[:1]
    was = hosts.target.digest(first)
    hosts.cable.slow(SLOW_MBIT)
    ticket = hosts.source.push(hosts.target, pages.source, pages.target)
    assert await_true(lambda: hosts.target.digest(first) != was), "nothing has arrived"
    hosts.cable.cut()
    began_s = time.monotonic()
    ended = hosts.source.await_push(ticket)
    took_s = time.monotonic() - began_s
    hosts.source.await_link(hosts.target, "lost")
    hosts.target.settle()
    hosts.target.wipe(pages.target, POISON)
    return ended, took_s


def test_a_push_whose_link_is_cut_fails_in_time(cuts: Cuts, kind: Kind) -> None:
    for ended, took_s in cuts.ends:
        assert isinstance(ended, PushFailed)
        assert ended.quiescent == IS_QUIESCENT[kind.transport]
        assert took_s < kind.silence_s + MARGIN_S


def test_nothing_lands_in_pages_that_are_someone_elses_when_the_link_is_back(cuts: Cuts, kind: Kind) -> None:
    if not IS_QUIESCENT[kind.transport]:
        pytest.skip("its failure says that something may still land")
    assert (cuts.left[STRUCK.start : STRUCK.stop] == POISON).all()


def test_the_transfer_loop_finds_its_way_back_by_itself(cuts: Cuts) -> None:
    assert cuts.back_s < RETRY_S + MARGIN_S


def test_when_the_link_is_back_a_new_connection_works(cuts: Cuts) -> None:
    assert isinstance(cuts.again, PushDone)
    np.testing.assert_array_equal(cuts.left[OTHERS.start :], cuts.expected[OTHERS.start :])


def test_neither_files_nor_threads_are_left_behind(cuts: Cuts) -> None:
    assert is_within(cuts.after, cuts.before), f"{cuts.after} are more than {cuts.before}"
