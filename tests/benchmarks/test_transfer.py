"""`python -m benchmarks.transfer`: its grid, its figures and goals from numbers worked out by hand, and real processes.

A quick run, what it leaves, and what it does about ways that fail.
"""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks import transfer_agent
from benchmarks.command import Invocation, start
from benchmarks.namespaces import Spot, two_namespaces
from benchmarks.transfer import (
    MEMMOVE,
    NIXL,
    SOCKET,
    AgentPair,
    PushSample,
    TransferBench,
    TransferPlace,
    TransferRow,
    judge,
    measure_host,
    report,
    run,
)
from benchmarks.transfer_agent import (
    AGENTS,
    AgentPlan,
    DevicePool,
    PushShape,
    TransferWay,
    layout_of,
    make_pool,
    pages_of,
)
from common.errors import TransferError

KIB, MIB = 2**10, 2**20
UNIT, POOL = 4096, 64 * 4096


def test_the_grid_is_every_page_size_and_count_once_in_both_arrangements() -> None:
    bench = TransferBench(page_bytes="16KiB,64KiB", pages="1,8", memory="1MiB")
    assert list(bench.points()) == [
        PushShape(16 * KIB, 1, "contiguous"),
        PushShape(16 * KIB, 8, "contiguous"),
        PushShape(16 * KIB, 8, "scattered"),
        PushShape(64 * KIB, 1, "contiguous"),
        PushShape(64 * KIB, 8, "contiguous"),
        PushShape(64 * KIB, 8, "scattered"),
    ]


def test_pages_are_capped_by_what_the_memory_holds_and_no_point_comes_twice() -> None:
    bench = TransferBench(page_bytes="256KiB", pages="1,32,1024", memory="4MiB")
    assert [(point.pages, point.arrangement) for point in bench.points()] == [
        (1, "contiguous"),
        (16, "contiguous"),
        (16, "scattered"),
    ]


def test_a_pool_is_a_whole_number_of_the_largest_pages() -> None:
    assert TransferBench(page_bytes="64KiB,1MiB", memory="2600KiB").pool_bytes == 2 * MIB


@pytest.mark.parametrize(
    "point", [PushShape(4 * KIB, 5, "scattered"), PushShape(4 * KIB, 5, "contiguous"), PushShape(4 * KIB, 16, "scattered")]
)
def test_a_push_takes_whole_pages_each_once_and_the_next_takes_others(point: PushShape) -> None:
    unit_bytes, pool_bytes = 1 * KIB, 64 * KIB
    pushes = pages_of(point, unit_bytes, pool_bytes, seed=3)
    for pages in (side for push in pushes for side in push):
        starts = pages.reshape(point.pages, 4)
        assert (starts[:, 0] % 4 == 0).all(), "a page begins where a page begins"
        assert (np.diff(starts, axis=1) == 1).all(), "a page is one block"
        assert len(set(starts[:, 0].tolist())) == point.pages and pages.max() < pool_bytes // unit_bytes
        assert point.arrangement == "scattered" or (np.diff(pages) == 1).all()
    assert not np.array_equal(pushes[0][0], pushes[1][0])


def test_both_processes_choose_the_same_pages_and_another_round_takes_others() -> None:
    point = PushShape(KIB, 8, "scattered")
    first, again, other = (pages_of(point, KIB, 64 * KIB, seed)[0][1].tolist() for seed in (1, 1, 2))
    assert first == again != other


ONE, MANY = PushShape(64 * KIB, 1, "contiguous"), PushShape(64 * KIB, 8, "scattered")
FAR = PushShape(256 * KIB, 8, "scattered")


def sample(gb_per_s: float, median_s: float = 40e-6, cpu_s_per_gb: float = 0.3) -> PushSample:
    return PushSample(pushes=3, gb_per_s=gb_per_s, median_s=median_s, p99_s=2 * median_s, cpu_s_per_gb=cpu_s_per_gb)


def row(way: TransferWay, point: PushShape, *samples: PushSample) -> TransferRow:
    return TransferRow(way=way, point=point, samples=list(samples))


def place(*rows: TransferRow, idle: float | None = None) -> TransferPlace:
    return TransferPlace(name="host", rows=list(rows), idle_cores={} if idle is None else {NIXL.label: idle})


def verdicts(host: TransferPlace, network: TransferPlace) -> list[bool | None]:
    """The verdicts on NIXL: memory's share, latency, CPU, idle, network."""
    return [goal.met for goal in judge(host, network)]


def share(host: TransferPlace) -> str:
    """NIXL's share of the speed of the memory."""
    return next(judge(host, place())).figure


def test_a_sample_counts_bytes_over_the_whole_time_and_latency_push_by_push() -> None:
    pushes = [0.001] * 98 + [0.008, 0.010]
    made = PushSample.of(PushShape(1000, 10, "scattered"), pushes, cpu_s=0.002)
    assert made.pushes == 100
    assert made.gb_per_s == pytest.approx(100 * 10_000 / 1e9 / 0.116)
    assert (made.median_s, made.p99_s) == (0.001, 0.010)
    assert made.cpu_s_per_gb == pytest.approx(2.0)


def test_goals_that_are_met_are_judged_so() -> None:
    host = place(row(MEMMOVE, MANY, sample(8.0)), row(NIXL, MANY, sample(6.1)), row(NIXL, ONE, sample(1.0)), idle=0.001)
    network = place(row(SOCKET, FAR, sample(1.0)), row(NIXL, FAR, sample(1.2)))
    assert verdicts(host, network) == [True, True, True, True, True]


def test_each_goal_can_be_missed() -> None:
    host = place(
        row(MEMMOVE, MANY, sample(8.0)),
        row(NIXL, MANY, sample(5.9, cpu_s_per_gb=0.41)),
        row(NIXL, ONE, sample(1.0, median_s=51e-6)),
        idle=0.006,
    )
    network = place(row(SOCKET, FAR, sample(1.0)), row(NIXL, FAR, sample(0.9)))
    assert verdicts(host, network) == [False, False, False, False, False]


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    nothing = place()
    assert verdicts(nothing, nothing) == [None] * 5
    assert {goal.figure for goal in judge(nothing, nothing)} == {"not measured"}


def test_speeds_are_compared_round_by_round() -> None:
    """A round in which the machine was slow for both says nothing about their ratio; the medians alone would say 50 %."""
    host = place(
        row(MEMMOVE, MANY, sample(8.0), sample(8.0), sample(4.0)),
        row(NIXL, MANY, sample(6.4), sample(4.0), sample(3.2)),
    )
    assert share(host) == "80 %"


def test_the_worst_page_size_decides_and_the_fullest_push_of_each_counts() -> None:
    small, large = PushShape(64 * KIB, 2, "scattered"), PushShape(128 * KIB, 8, "scattered")
    host = place(
        *(row(MEMMOVE, point, sample(8.0)) for point in (small, MANY, large)),
        row(NIXL, small, sample(0.1)),
        row(NIXL, MANY, sample(7.2)),
        row(NIXL, large, sample(6.8)),
    )
    assert share(host) == "85 %"


def invocation(*flags: str) -> Invocation:
    made: list[Invocation] = []
    start("transfer", "", lambda given: made.append(given) or 0, TransferBench, arguments=flags)  # type: ignore[func-returns-value]
    return made[0]


def test_a_report_has_the_ways_side_by_side_with_their_spread_and_what_was_skipped() -> None:
    measured = place(row(NIXL, MANY, sample(3.0), sample(5.0), sample(4.0)), row(SOCKET, MANY, sample(1.0)), idle=0.0123)
    measured = msgspec.structs.replace(measured, skipped={"cma": "its kernel forbids it"})
    text = "\n".join(report(measured, invocation("--markdown")))
    for line in (
        "### Host: GB/s, median (least … most of the rounds)",
        "| page | pages |  | nixl thread | tcp socket |",
        "| 64 KiB | 8 | scattered | 4.00 (3.00 … 5.00) | 1.00 |",
        "| 64 KiB | 8 | scattered | 40 / 80 | 40 / 80 |",
        "| 64 KiB | 8 | scattered | 0.30 | 0.30 |",
        "- an idle pair uses of one core: nixl thread 1.23%",
        "- cma was skipped: its kernel forbids it",
    ):
        assert line in text
    assert "Host: CPU-s/GB, both processes:\n" in "\n".join(report(measured, invocation()))


@pytest.mark.parametrize("kind", ["socket", "memmove", "copy"])
def test_a_push_lands_where_it_should_and_nowhere_else(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "copy":
        monkeypatch.setattr(transfer_agent, "make_pool", lambda *_: DevicePool(POOL, "cpu"))
    way = TransferWay(kind)  # type: ignore[arg-type]
    plan = AgentPlan(way=way, host="127.0.0.1", unit_bytes=UNIT, pool_bytes=POOL)
    source = AGENTS[way.kind](plan)
    target = source if way.is_local else AGENTS[way.kind](plan)
    source.connect(target.descriptor)
    source.pool.bytes[:] = 7
    source.prepare(np.array([3, 9, 10], np.int32), np.array([60, 0, 1], np.int32))()
    landed, sent = (np.asarray(pool.bytes).reshape(-1, UNIT) for pool in (target.landing, source.pool))
    assert sent.any() and np.array_equal(landed[[60, 0, 1]], sent[[3, 9, 10]])
    assert not np.delete(landed, [60, 0, 1], axis=0).any()
    source.close()
    target.close()


def test_a_card_that_is_not_there_is_named() -> None:
    with pytest.raises(TransferError, match="no pool of 65536 bytes on cuda:99: "):
        make_pool("cuda:99", 65536)


def test_pools_on_a_card_are_not_measured_between_namespaces(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--namespaces", "--device=cuda"]
    assert start("transfer", "", run, TransferBench, arguments=flags) == 2
    assert "--namespaces measures pools on the CPU only, and --device is cuda" in capsys.readouterr().err


def test_a_layout_has_pages_of_any_even_size() -> None:
    assert [layout_of(page_bytes).page_bytes for page_bytes in (512, 16384, 2**21)] == [512, 16384, 2**21]


def test_a_quick_run_measures_prints_and_writes_what_was_asked_for(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.transfer", "--quick", "--transport", "cma", "--markdown"]
    done = subprocess.run([*command, "--json", str(figures)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("```sh\npython -m benchmarks.transfer --quick --markdown --transport=cma")
    assert "namespaces was skipped: --namespaces was not given" in done.stdout
    host = json.loads(figures.read_text())["host"]
    if "cma" not in host["skipped"]:
        assert "| page | pages |  | memmove | tcp socket | cma thread |" in done.stdout
    rows = [(row["way"]["kind"], row["point"]["pages"], row["samples"][0]) for row in host["rows"]]
    assert {kind for kind, _, _ in rows} >= {"memmove", "socket"}
    for _, pages, sample in rows:
        assert sample["pushes"] >= (200 if pages == 1 else 3) and sample["gb_per_s"] > 0 and sample["cpu_s_per_gb"] > 0
        assert sample["p99_s"] >= sample["median_s"] > 0
    assert host["idle_cores"].keys() >= {"memmove", "tcp socket"}


SMALL = TransferBench(transport="cma", page_bytes="4KiB", pages="4", memory="64KiB", seconds=0.001, repeat=2, idle_s=0.01)


def test_a_way_that_fails_is_skipped_with_its_reason_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = AgentPair.measure

    def failing(self: AgentPair, point: PushShape, seed: int, seconds: float) -> PushSample:
        if self.way.kind == "socket" and seed == 2:
            raise TransferError("the wire was cut")
        return measure(self, point, seed, seconds)

    monkeypatch.setattr(AgentPair, "measure", failing)
    host = measure_host(SMALL)
    assert host.skipped["tcp socket"] == "the wire was cut"
    assert all(len(row.samples) == 2 for row in host.rows) and TransferWay("socket") not in {row.way for row in host.rows}
    assert {row.way.kind for row in host.rows} >= {"memmove"}


def test_an_agent_that_cannot_start_says_why() -> None:
    spot = Spot(("sh", "-c", "exit 3", "sh"), "127.0.0.1")
    with (
        AgentPair(SMALL, TransferWay("memmove"), (spot, spot), {}) as made,
        pytest.raises(TransferError, match="an agent ended: exit status 3"),
    ):
        made.connect()


def test_an_address_that_cannot_be_listened_on_is_refused_with_its_reason() -> None:
    spot = Spot((), "192.0.2.1")  # of a network that exists in documentation only
    with AgentPair(SMALL, TransferWay("socket"), (spot, spot), {}) as made, pytest.raises(TransferError, match=r"192\.0\.2\.1"):
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
