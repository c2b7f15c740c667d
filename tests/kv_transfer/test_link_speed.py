"""Links are measured when they come up: over the in-process transport, on a clock that is turned by hand."""

import msgspec
import numpy as np
import pytest

from common.messages import LinkInfo
from common.messages.transfers import Connect, LinkChanged, PushFailed, TransferEvent
from kv_transfer import links
from kv_transfer.links import (
    FIRST_BYTES,
    LOOPBACK_DEVICE,
    MOST_BYTES,
    MOST_RUNS,
    PROBES,
    RDMA,
    RETRY_S,
    STALL_S,
    TCP,
    TURN_S,
    LinkProbe,
    Wire,
    memory_bytes_per_s,
    slowness,
)
from tests.builders import LAYOUT
from tests.kv_transfer.two import PAGES, PEER, Two, linked, refused

MEASURING = linked("connecting", "memmove: measuring")
PROBE_S = 0.25


@pytest.fixture(autouse=True)
def quiet_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wire carries anything, and memory is fast."""
    monkeypatch.setattr(links, "bytes_sent", dict)
    monkeypatch.setattr(links, "memory_bytes_per_s", lambda: 1e10)


@pytest.fixture
def two() -> Two:
    """Connecting, with what is written on its way until the test lets it go."""
    made = Two(measures=True)
    made.network.hold = True
    assert made.told(Connect((made.target.info(),))) == [MEASURING]
    return made


def let_go(two: Two, seconds: float = PROBE_S) -> list[TransferEvent]:
    """One write of the measurement takes so long."""
    two.clock.now += seconds
    two.source.transport.release()
    return two.source.events()


def measured(two: Two, seconds: float = PROBE_S) -> LinkInfo:
    for _ in range(PROBES - 1):
        assert let_go(two, seconds) == []
    (changed,) = let_go(two, seconds)
    assert isinstance(changed, LinkChanged)
    return changed.link


def test_a_link_is_ready_when_it_is_measured_and_not_before(two: Two) -> None:
    two.allow()
    assert two.pushed(1) == [refused(1, "there is no link to d")]
    link = measured(two)
    assert (link.state, link.detail, link.host_bytes_per_s) == ("ready", "memmove: memory", 1e10)
    assert link.bytes_per_s == MOST_RUNS * LAYOUT.page_bytes / PROBE_S, "small pages are not written without end"
    assert link.warning == "slow: 0.00 GB/s by memory, where this host can do 10.0"
    assert two.source.loop.idle and not two.source.loop.active


def test_only_the_spare_page_is_written(two: Two) -> None:
    source, target = two.source.memory.copy(), two.target.memory.copy()
    measured(two)
    np.testing.assert_array_equal(two.source.memory, source)
    np.testing.assert_array_equal(two.target.memory[:PAGES], target[:PAGES])
    np.testing.assert_array_equal(two.target.memory[PAGES], source[PAGES])


def test_writes_that_take_no_time_become_longer_and_the_fastest_counts() -> None:
    pool = Two(measures=True).source.loop.descriptor
    large = msgspec.structs.replace(pool, layout=msgspec.structs.replace(LAYOUT, head_dim=2**14))
    probe = LinkProbe(large, large)
    written = []
    for seconds in (5.0, 1e-3, 1e-3, 4e-3, 1.0):
        probe_bytes = int(probe.next_runs()[:, 2].sum())
        written.append(probe_bytes)
        probe.took(probe_bytes, seconds)
    assert written == [FIRST_BYTES, FIRST_BYTES, 4 * FIRST_BYTES, MOST_BYTES, MOST_BYTES]
    assert probe.done and probe.bytes_per_s == MOST_BYTES / 4e-3, "the first one, which brought the link up, does not count"


def test_pools_without_a_spare_page_are_linked_unmeasured() -> None:
    two = Two()
    two.connect()
    other = Two(measures=True)
    pool = msgspec.structs.replace(other.target.loop.descriptor, spare_pages=0)
    assert other.told(Connect((msgspec.structs.replace(other.target.info(), pools=(pool,)),))) == [linked("ready", "memmove")]


def test_a_peer_that_dies_while_it_is_measured_is_lost_and_tried_again(two: Two) -> None:
    assert let_go(two) == []
    two.source.transport.fail("cable", quiescent=False)
    assert two.source.events() == [linked("lost", "it could not be measured: cable")]
    assert two.source.loop.idle
    assert two.after(RETRY_S) == [MEASURING]
    assert measured(two).state == "ready"


def test_a_measurement_without_progress_is_given_up(two: Two) -> None:
    (changed,) = two.after(STALL_S + 1.0)
    assert isinstance(changed, LinkChanged) and changed.link.state == "lost"
    assert not any(isinstance(event, PushFailed) for event in two.source.events()), "nobody pushed anything"


def test_a_peer_that_leaves_while_it_is_measured_is_forgotten(two: Two) -> None:
    two.source.loop.submit(Connect((), (PEER,)))
    for _ in range(PROBES):
        assert let_go(two) == []
    assert two.source.loop.idle


def test_a_measurement_needs_no_lease_and_outlives_one(two: Two) -> None:
    two.allow(lease_s=0.1)
    assert measured(two, seconds=1.0).state == "ready"


def test_links_are_measured_in_turn_and_none_waits_long_for_another(two: Two) -> None:
    other = two.side(seed=3)
    infos = (two.target.info(), msgspec.structs.replace(other.info(), id="e"))
    (changed,) = two.told(Connect(infos))
    assert isinstance(changed, LinkChanged) and (changed.link.peer, changed.link.state) == ("e", "connecting")
    before = other.memory.copy()
    assert let_go(two, TURN_S / 4) == []
    np.testing.assert_array_equal(other.memory, before)
    assert two.after(TURN_S) == [], "the first is not done, and the second has begun"
    assert let_go(two, TURN_S / 4) == []
    np.testing.assert_array_equal(other.memory[PAGES], two.source.memory[PAGES])


# --- what it means ---------------------------------------------------------------------------------------------------------


def test_a_link_is_slow_if_it_is_far_below_the_speed_of_the_host() -> None:
    assert slowness(1e9, 10e9, "TCP over lo") == "slow: 1.00 GB/s by TCP over lo, where this host can do 10.0"
    assert slowness(4e9, 10e9, "memory") == ""
    assert slowness(None, 10e9, "memory") == slowness(1.0, None, "memory") == ""


def test_the_speed_of_the_host_depends_on_where_the_peer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "fastest_bytes_per_s", lambda: 5e10)
    pool = Two(measures=True).source.loop.descriptor
    gpu = msgspec.structs.replace(pool, device="cuda:0")
    on_host, on_devices = LinkProbe(pool, pool), LinkProbe(gpu, gpu)
    assert on_host.host_bytes_per_s(None) == on_host.host_bytes_per_s(Wire(TCP, LOOPBACK_DEVICE)) == 1e10
    assert on_host.host_bytes_per_s(Wire(TCP, "eth0")) == on_devices.host_bytes_per_s(Wire(RDMA, "mlx5_0:1")) == 5e10
    assert on_devices.host_bytes_per_s(Wire(TCP, LOOPBACK_DEVICE)) == 1e10, "GPUs of one host that use sockets are found out"
    assert (on_host.carrier(None), on_devices.carrier(None)) == ("memory", "GPU memory, NVLink or PCIe")
    assert on_host.carrier(Wire(TCP, "eth0")) == "TCP over eth0"


def test_the_memory_of_the_host_is_measured_at_the_start_and_not_when_the_first_link_is(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter((1e10, 2e10, 3e10))
    monkeypatch.setattr(links, "memory_bytes_per_s", lambda: next(measured))
    Two()
    assert next(measured) == 1e10, "who measures no link measures no memory"
    Two(measures=True)
    assert next(measured, None) is None, "each of the two has"


def test_memory_is_copied_at_some_speed() -> None:
    assert 1e8 < memory_bytes_per_s() < 1e13
