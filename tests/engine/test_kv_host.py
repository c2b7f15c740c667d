"""What `--kv-memory auto` takes of a host's memory: equal parts, which fit together beside the weights."""

import re

import pytest

from common.config import EngineConfig
from common.host import HostMemory
from common.pages.layout import KVLayout
from engine.kv_budget import auto_host_kv_bytes, kv_part, part_of

GIB = 2**30
BOUNDLESS = 2**60


def idle(total_gib: float, taken_gib: float = 0.0) -> HostMemory:
    """A host where nothing runs but a small system, and instances that hold so much."""
    return HostMemory(int(total_gib * GIB), int((total_gib * 0.97 - taken_gib) * GIB))


@pytest.mark.parametrize("total_gib", [8, 16, 23.5, 64, 512])
@pytest.mark.parametrize("sharers", [1, 2, 3])
@pytest.mark.parametrize("weights_gib", [0.5, 1.4])
def test_the_parts_of_a_host_fit_together_and_take_most_of_it(total_gib: float, sharers: int, weights_gib: float) -> None:
    host = idle(total_gib, sharers * weights_gib)
    pages, why = kv_part(host, int(weights_gib * GIB), sharers, BOUNDLESS)
    used = sharers * (pages + weights_gib * GIB)
    assert used <= host.total_bytes * 7 / 8
    assert used >= host.total_bytes * (7 / 8 - sharers / 16) - GIB or "the least" in why


def test_equal_hosts_get_equal_pools_whatever_little_else_they_hold() -> None:
    """The figures of one kind of host, a little apart: what the kernel shows, what is free, and what weights take."""
    total = int(23.5 * GIB)
    pools = {
        kv_part(HostMemory(total, free), int(2.4 * GIB) + more, 2, BOUNDLESS)[0]
        for free in (17 * GIB, 20 * GIB, 22 * GIB)
        for more in (0, 2**20, 20 * 2**20)
    }
    assert len(pools) == 1


@pytest.mark.parametrize(
    ("host", "taken_gib", "useful", "reason"),
    [
        (idle(16), 2.4, BOUNDLESS, r"part of 7.00 GiB \(16.00 GiB less 2.00 GiB for the system, shared by 2\), less 3.00 GiB"),
        (HostMemory(16 * GIB, 4 * GIB), 2.4, BOUNDLESS, r"only 4.00 GiB of 16.00 GiB are free"),
        (idle(16), 2.4, GIB, r"all that its rows at full length can use"),
        (idle(16), 12.0, BOUNDLESS, r"the least, because weights and steps take 12.50 GiB of a part of 7.00 GiB"),
    ],
)
def test_the_reason_is_told(host: HostMemory, taken_gib: float, useful: int, reason: str) -> None:
    assert re.search(reason, kv_part(host, int(taken_gib * GIB), 2, useful)[1])


def test_memory_that_others_hold_is_not_taken() -> None:
    host = HostMemory(16 * GIB, 4 * GIB)
    pages, _ = kv_part(host, int(2.4 * GIB), 2, BOUNDLESS)
    assert 0 < 2 * pages < host.free_bytes


def test_auto_takes_no_more_than_the_rows_can_use_and_says_why() -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_size=16, dtype="float32")
    lines: list[str] = []
    pages = auto_host_kv_bytes(EngineConfig(max_running=4), 1, layout, 100, lines.append)
    assert pages == 2 * 4 * 7 * layout.page_bytes
    assert len(lines) == 1 and "--kv-memory auto" in lines[0]


@pytest.mark.parametrize(("total_gib", "sharers", "weights_gib"), [(16, 4, 0.3), (16, 2, 0.3), (32, 4, 2.6), (64, 8, 2.6)])
@pytest.mark.parametrize(("busy_gib", "by_hand"), [(0.5, False), (8, False), (0.5, True)])
def test_one_that_starts_again_beside_others_that_use_their_pages_gets_what_it_had(
    total_gib: int, sharers: int, weights_gib: float, busy_gib: float, by_hand: bool
) -> None:
    """busy_gib: held by other programs. By hand, each decides for itself, and is told no part."""
    part = 0 if by_hand else part_of(HostMemory(total_gib * GIB, int((total_gib - busy_gib) * GIB)), sharers, sharers)

    def pages(others_gib: float) -> int:
        free_gib = total_gib - busy_gib - weights_gib - others_gib
        host = HostMemory(total_gib * GIB, int(free_gib * GIB))
        return kv_part(host, int(weights_gib * GIB), sharers, BOUNDLESS, part)[0]

    first = pages((sharers - 1) * weights_gib)
    in_use_gib = sharers * (first / GIB + weights_gib)
    assert in_use_gib <= total_gib - busy_gib
    assert pages(in_use_gib * (sharers - 1) / sharers) == first


def test_a_second_fleet_of_a_host_gets_the_parts_that_the_first_one_left() -> None:
    whole = part_of(idle(16), 4, 2)
    assert part_of(idle(16, 2 * whole / GIB), 4, 2) == whole
    assert part_of(HostMemory(16 * GIB, 5 * GIB), 4, 4) == GIB
