"""`launch bench transfer` between real processes: a quick run, what it leaves, and what it does about ways that fail."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.ends import layout_of, make_end
from bench.figures import Sample
from bench.lines import AgentPlan
from bench.namespaces import two_namespaces
from bench.pair import Pair, Spot
from bench.plan import ALONE, Point, TransferBench, Way
from bench.pools import DevicePool, HostPool, make_pool
from bench.transfer import ONE_HOST, measure_host, run
from common.errors import ConfigError, TransferError

UNIT, POOL = 4096, 64 * 4096


@pytest.mark.parametrize("kind", ["socket", "memmove", "copy"])
def test_a_push_lands_where_it_should_and_nowhere_else(kind: str) -> None:
    plan = AgentPlan(way=Way(kind), host="127.0.0.1", unit_bytes=UNIT, pool_bytes=POOL, huge_pages=False)  # type: ignore[arg-type]
    pools = [DevicePool(POOL, "cpu") if kind == "copy" else HostPool(POOL, huge_pages=False) for _ in range(2)]
    source_bytes, target_bytes = (pool.tensor.numpy() if isinstance(pool, DevicePool) else pool.bytes for pool in pools)
    source_bytes[:] = np.random.default_rng(1).integers(1, 256, POOL, dtype=np.uint8)
    source = make_end(plan, pools[0], lambda: pools[1])
    target = source if kind in ALONE else make_end(plan, pools[1], lambda: pools[1])
    source.connect(target.address)
    source.prepare(np.array([3, 9, 10], np.int32), np.array([60, 0, 1], np.int32))()
    landed, sent = (pool.reshape(-1, UNIT) for pool in (target_bytes, source_bytes))
    assert target.landing is pools[1]
    assert np.array_equal(landed[[60, 0, 1]], sent[[3, 9, 10]])
    assert not np.delete(landed, [60, 0, 1], axis=0).any()
    source.close()
    target.close()


def test_pools_of_either_kind_hold_the_same_numbers_and_have_the_same_checksums() -> None:
    host, device = HostPool(POOL, huge_pages=False), DevicePool(POOL, "cpu")
    pages = np.array([7, 0, 9], np.int32)
    empty = host.checksum(pages, UNIT)
    for pool in (host, device):
        assert pool.checksum(pages, UNIT) == empty
        pool.fill()
    assert host.checksum(pages, UNIT) == device.checksum(pages, UNIT) != empty
    assert (host.region.region_bytes, host.region.device) == (device.region.region_bytes, device.region.device) == (POOL, "cpu")


def test_a_card_that_is_not_there_is_named() -> None:
    with pytest.raises(TransferError, match="no pool of 65536 bytes on cuda:99: "):
        make_pool("cuda:99", 65536, huge_pages=False)


def test_pools_on_a_card_are_not_measured_between_namespaces() -> None:
    with pytest.raises(ConfigError, match="--namespaces measures pools on the CPU only, and --device is cuda"):
        run(TransferBench(device="cuda"), "", namespaces=True, markdown=False)


def test_a_layout_has_pages_of_any_even_size() -> None:
    assert [layout_of(page_bytes).page_bytes for page_bytes in (512, 16384, 2**21)] == [512, 16384, 2**21]


def test_a_quick_run_measures_prints_and_writes_what_was_asked_for(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "launch.main", "bench", "transfer", "--quick", "--transport", "cma", "--markdown"]
    done = subprocess.run([*command, "--json", str(figures)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("```sh\nlaunch bench transfer --quick --markdown --transport=cma")
    assert "namespaces was skipped: --namespaces was not given" in done.stdout
    host = json.loads(figures.read_text())["host"]
    if "cma" not in host["skipped"]:
        assert "| page | pages |  | memmove | tcp socket | cma | cma thread |" in done.stdout
    rows = [(row["way"]["kind"], row["point"]["pages"], row["samples"][0]) for row in host["rows"]]
    assert {kind for kind, _, _ in rows} >= {"memmove", "socket"}
    for _, pages, sample in rows:
        assert sample["pushes"] >= (200 if pages == 1 else 3) and sample["gb_per_s"] > 0 and sample["cpu_s_per_gb"] > 0
        assert sample["p99_s"] >= sample["median_s"] > 0
    assert host["idle_cores"].keys() >= {"memmove", "tcp socket"}


SMALL = TransferBench(transport="cma", page_bytes="4KiB", pages="4", memory="64KiB", seconds=0.001, repeat=2, idle_s=0.01)


def test_bytes_that_do_not_arrive_are_found_out() -> None:
    point = Point(4096, 3, "scattered")
    with Pair(SMALL, Way("socket"), ONE_HOST, {}) as one, Pair(SMALL, Way("socket"), ONE_HOST, {}) as other:
        one.connect()
        one.check(point, seed=0)
        other.connect()
        one._target = other._target  # which nothing is pushed to
        with pytest.raises(TransferError, match="other bytes"):
            one.check(point, seed=0)


def test_a_way_that_fails_is_skipped_with_its_reason_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Pair.measure

    def failing(self: Pair, point: Point, seed: int, seconds: float) -> Sample:
        if self.way.kind == "socket" and seed == 2:
            raise TransferError("the wire was cut")
        return measure(self, point, seed, seconds)

    monkeypatch.setattr(Pair, "measure", failing)
    host = measure_host(SMALL)
    assert host.skipped["tcp socket"] == "the wire was cut"
    assert all(len(row.samples) == 2 for row in host.rows) and Way("socket") not in {row.way for row in host.rows}
    assert {row.way.kind for row in host.rows} >= {"memmove"}


def test_an_agent_that_cannot_start_says_why() -> None:
    spot = Spot(("sh", "-c", "echo no such machine >&2; exit 3", "sh"), "127.0.0.1")
    with (
        Pair(SMALL, Way("memmove"), (spot, spot), {}) as made,
        pytest.raises(TransferError, match="exit status 3 / last lines of agent: / no such machine"),
    ):
        made.connect()


def test_an_address_that_cannot_be_listened_on_is_refused_with_its_reason() -> None:
    spot = Spot((), "192.0.2.1")  # of a network that exists in documentation only
    with Pair(SMALL, Way("socket"), (spot, spot), {}) as made, pytest.raises(TransferError, match=r"192\.0\.2\.1"):
        made.connect()


def test_namespaces_are_made_and_gone_again_or_refused_with_a_reason() -> None:
    try:
        with two_namespaces() as spots:
            inside = [*spots[0].prefix, "ip", "-o", "-4", "address"]
            seen = subprocess.run(inside, capture_output=True, text=True, timeout=60, check=True).stdout
            assert spots[0].host in seen
            name = spots[0].prefix[-1]
    except TransferError as error:
        assert "network namespaces cannot be made" in str(error)
    else:
        left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=60, check=True).stdout
        assert name not in left
