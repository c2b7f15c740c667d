"""`python -m benchmarks.cpu_peers`: its order, its figures and goals against numbers worked out by hand, and its driver."""

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench.offline import OfflineSequence
from benchmarks.cpu_peers import (
    ENGINES,
    HEAD,
    QUICK,
    CpuPeersBench,
    DrivenLoad,
    PeerFailed,
    PeerRoom,
    PeerTurn,
    driven,
    figures_of_driver,
    judge,
    lead,
    peer_process,
    table,
    tandem_flags,
    whole,
)
from common.options import with_defaults
from launch.main import build_parser

DRIVER = """
import os

orders, reports = os.fdopen(int(os.environ["TANDEM_ORDER_FD"])), os.fdopen(int(os.environ["TANDEM_REPORT_FD"]), "w")
print("a library may print what it wants")
for began_s in (1.0, 2.0):
    print('{"began_s": %f, "tokens_s": [[3.0, 4.0], [5.0]]}' % began_s, file=reports, flush=True)
orders.read()
"""


def requests_of(*lengths: tuple[int, int]) -> list[OfflineSequence]:
    return [OfflineSequence(np.arange(prompt, dtype=np.int32), answer) for prompt, answer in lengths]


def turn(engine: str, round_number: int, rate: float) -> PeerTurn:
    figures = {"output_throughput": rate, "p50_ttft_ms": 1500.0, "p50_itl_ms": 20.0, "p95_itl_ms": 40.0}
    return PeerTurn(engine=engine, round=round_number, figures=figures, memory_gb=2.0)


def test_a_quick_run_needs_no_peer_and_peers_take_part_where_they_are_installed() -> None:
    assert not any(ENGINES[name].peer for name in with_defaults(CpuPeersBench(), QUICK).names)
    own = ("tandem", "tandem-1p1d", "tandem-int8", "tandem-int8-1p1d")
    assert CpuPeersBench().names == own
    assert CpuPeersBench(vllm="python").names == (*own, "vllm")
    assert CpuPeersBench(engines="openvino, tandem,openvino", openvino="python").names == ("openvino", "tandem")


ROOM = PeerRoom(CpuPeersBench(shape="0.6b", threads=2), requests_of((100, 10), (300, 20)), Path("folder"))


@pytest.mark.parametrize("is_separate", [False, True])
def test_every_layout_is_a_command_line_that_launch_local_understands(is_separate: bool) -> None:
    flags = build_parser().parse_args(["local", *tandem_flags(ROOM, Path("model"), ("--dtype", "float32"), is_separate)])
    assert (flags.threads, flags.prefill) == ((0, 1) if is_separate else (2, 0))
    assert not is_separate or flags.workload == "200,15"


def test_every_engine_has_kv_memory_for_all_requests_at_once() -> None:
    """110 tokens are 4 pages of 32, 320 are 10; with a spare page each, 16 pages. Qwen3-0.6B keeps 28 x 2 x 8 x 128 numbers of a
    token, of 4 bytes each."""
    assert max(ROOM.lengths) == 11 * 32
    assert (ROOM.kv_bytes, ROOM.kv_gib) == (16 * 32 * 28 * 2 * 8 * 128 * 4, 1)


def test_engines_are_warmed_up_by_one_long_and_many_short_requests_and_get_all_of_them_with_their_lengths(tmp_path: Path) -> None:
    room = PeerRoom(CpuPeersBench(), requests_of((5, 3), (2, 7)), tmp_path)
    room.write_loads()
    short, long = ([json.loads(line) for line in path.read_text().splitlines()] for path in room.loads)
    assert [each["prompt"] for each in short] == [[4, 3, 2, 1, 0], [1, 0]]
    assert long == [{"prompt": [0, 1, 2, 3, 4], "output_tokens": 3}, {"prompt": [0, 1], "output_tokens": 7}]


def test_the_figures_of_a_driver_are_those_of_its_tokens_and_an_answer_that_is_too_short_fails() -> None:
    """Two requests: three tokens after 1, 2 and 3 s, and two tokens after 2 and 6 s. The load took 6 s."""
    load = DrivenLoad(began_s=10.0, tokens_s=[[11.0, 12.0, 13.0], [12.0, 16.0]])
    found = figures_of_driver(requests_of((5, 3), (5, 2)), load)
    assert (found["duration"], found["p50_ttft_ms"], found["p50_itl_ms"]) == (6.0, 1500.0, 1000.0)
    assert [found["output_throughput"], found["p95_itl_ms"]] == pytest.approx([5 / 6, 3700.0])
    with pytest.raises(PeerFailed, match="too short: 1"):
        figures_of_driver(requests_of((5, 4), (5, 2)), load)
    with pytest.raises(PeerFailed, match="timeout"):
        whole({"failed": 1, "errors_by_kind": {"timeout": 1}, "shorter_than_asked": 0})


def test_a_lead_is_taken_round_by_round_and_at_equal_precision() -> None:
    turns = [turn("tandem", 0, 20.0), turn("openvino", 0, 10.0), turn("tandem", 1, 40.0), turn("openvino", 1, 10.0)]
    turns += [turn("tandem-int8", 0, 90.0), turn("openvino-int8", 0, 30.0)]
    found, int8 = lead(turns, "openvino"), lead(turns, "openvino-int8")
    assert found is not None and (found.least, found.median, found.most) == (2.0, 3.0, 4.0)
    assert int8 is not None and int8.median == 3.0
    assert lead([turn("tandem", 0, 20.0), turn("openvino", 1, 10.0)], "openvino") is None


def test_the_goals_ask_more_beside_openvino() -> None:
    turns = [turn("tandem", 0, 21.0), turn("openvino", 0, 20.0), turn("vllm", 0, 20.0)]
    goals = list(judge(["tandem", "openvino", "vllm", "openvino-int8"], turns))
    assert [goal.met for goal in goals] == [False, True]  # int8 of Tandem took no part: no goal
    assert [goal.met for goal in judge(["tandem", "openvino"], [])] == [None]


def test_the_table_has_a_row_for_each_engine_also_for_one_that_failed() -> None:
    turns = [turn("tandem", 0, 20.0), turn("tandem", 1, 30.0), turn("openvino", 0, 10.0)]
    head, tandem, openvino, vllm = table(["tandem", "openvino", "vllm"], turns)
    assert head == HEAD and {len(line) for line in (tandem, openvino, vllm)} == {len(HEAD)}
    assert tandem[2:] == ("25.0 (20.0 … 30.0)", "1.5", "20", "40", "2.0", "")
    assert (openvino[2], openvino[-1], vllm[2]) == ("10.0", "2.00x", "failed")


def test_a_driver_reports_one_load_after_the_other() -> None:
    with peer_process(sys.executable, "-E", "-c", DRIVER) as driver:
        assert [driven(driver, 30.0).began_s for _ in range(2)] == [1.0, 2.0]
        with pytest.raises(PeerFailed, match=r"not done within 0\.2 s"):
            driven(driver, 0.2)
    assert driver.status is not None
    assert msgspec.json.decode(b'{"began_s": 1, "tokens_s": []}', type=DrivenLoad).tokens_s == []


def test_a_driver_that_ends_fails_the_engine_with_its_last_words() -> None:
    ending = (sys.executable, "-E", "-c", "raise SystemExit('no memory')")
    with peer_process(*ending) as driver, pytest.raises(PeerFailed, match="no memory"):
        driven(driver, 30.0)
