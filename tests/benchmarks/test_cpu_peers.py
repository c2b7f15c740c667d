"""`python -m benchmarks.cpu_peers`: its order, its figures and goals against numbers worked out by hand, and its drivers."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.client import TimedAnswer
from bench.offline import OfflineSequence
from bench.report import Hardware
from benchmarks.cpu_engines import (
    ENGINES,
    Peer,
    PeerFailed,
    PeerRoom,
    ask_driver,
    await_tokens,
    check,
    peer_process,
    tandem_flags,
)
from benchmarks.cpu_peers import HEAD, QUICK, CpuPeersBench, CpuPeersOutcome, PeerFailure, PeerTurn, judge, lead, table
from common.options import with_defaults
from launch.main import build_parser

HARDWARE = Hardware(cpu="a CPU", cores=2, memory_bytes=2**34, kernel="6", python="3", libraries={}, load=0.0, date="today")
DRIVER = """
import json, os

orders, reports = os.fdopen(int(os.environ["TANDEM_ORDER_FD"])), os.fdopen(int(os.environ["TANDEM_REPORT_FD"]), "w")
print("a library may print what it wants")
print('{"requests": []}', file=reports, flush=True)
for line in orders:
    lengths = json.loads(line)["answer_tokens"]
    for step in range(max(lengths)):
        arrived = [at for at, length in enumerate(lengths) if step < length]
        print(json.dumps({"requests": arrived}), file=reports, flush=True)
    print('{"requests": []}', file=reports, flush=True)
"""


def requests_of(*lengths: tuple[int, int]) -> list[OfflineSequence]:
    return [OfflineSequence(np.arange(prompt, dtype=np.int32), answer) for prompt, answer in lengths]


def turn(engine: str, round_number: int, rate: float) -> PeerTurn:
    return PeerTurn(
        engine=engine,
        round=round_number,
        seconds=1.0,
        output_tokens_per_s=rate,
        ttft_p50_ms=1500.0,
        itl_p50_ms=20.0,
        itl_p95_ms=40.0,
        memory_gb=2.0,
        start_s=5.0,
    )


def test_a_quick_run_needs_no_peer() -> None:
    assert not any(ENGINES[name].peer for name in with_defaults(CpuPeersBench(), QUICK).names)


def test_peers_take_part_where_they_are_installed() -> None:
    own = ("tandem", "tandem-1p1d", "tandem-int8", "tandem-int8-1p1d")
    assert CpuPeersBench().names == own
    assert CpuPeersBench(vllm="python").names == (*own, "vllm")
    assert CpuPeersBench(engines="openvino, tandem,openvino", openvino="python").names == ("openvino", "tandem")


ROOM = PeerRoom.for_requests(
    requests_of((100, 10), (300, 20)), "0.6b", cache=Path("cache"), openvino="", vllm="", threads=2, limit_s=1.0
)


@pytest.mark.parametrize("is_separate", [False, True])
def test_every_layout_is_a_command_line_that_launch_local_understands(is_separate: bool) -> None:
    flags = build_parser().parse_args(["local", *tandem_flags(ROOM, Path("model"), ("--dtype", "float32"), is_separate)])
    assert (flags.threads, flags.prefill) == ((0, 1) if is_separate else (2, 0))
    assert not is_separate or flags.workload == "200,15"


def test_every_engine_has_kv_memory_for_all_requests_at_once() -> None:
    """110 tokens are 4 pages of 32, 320 are 10; with a spare page each, 16 pages. Qwen3-0.6B keeps 28 x 2 x 8 x 128 numbers of a
    token, of 4 bytes each."""
    assert (ROOM.rows, ROOM.context_tokens) == (2, 11 * 32)
    assert ROOM.kv_bytes == 16 * 32 * 28 * 2 * 8 * 128 * 4
    assert ROOM.kv_gib == 1


def test_the_figures_of_a_turn_are_those_of_its_tokens() -> None:
    """Two requests: three tokens after 1, 2 and 3 s, and two tokens after 2 and 6 s. The load took 6 s."""
    answers = [TimedAnswer(0.0, tokens) for tokens in (3, 2)]
    for answer, times in zip(answers, ((1.0, 2.0, 3.0), (2.0, 6.0)), strict=True):
        answer.begin(0.0)
        for at_s in times:
            answer.add(at_s, 1)
        answer.end(6.0)
    found = PeerTurn.of("tandem", 0, answers, 2.0, 5.0)
    assert (found.seconds, found.ttft_p50_ms, found.itl_p50_ms) == (6.0, 1500.0, 1000.0)
    assert [found.output_tokens_per_s, found.itl_p95_ms] == pytest.approx([5 / 6, 3700.0])


def test_a_lead_is_taken_round_by_round_and_at_equal_precision() -> None:
    turns = [turn("tandem", 0, 20.0), turn("openvino", 0, 10.0), turn("tandem", 1, 40.0), turn("openvino", 1, 10.0)]
    turns += [turn("tandem-int8", 0, 90.0), turn("openvino-int8", 0, 30.0)]
    found = lead(turns, "openvino")
    assert found is not None and (found.least, found.median, found.most) == (2.0, 3.0, 4.0)
    int8 = lead(turns, "openvino-int8")
    assert int8 is not None and int8.median == 3.0
    assert lead([turn("tandem", 0, 20.0), turn("openvino", 1, 10.0)], "openvino") is None


def test_the_goals_ask_more_beside_openvino() -> None:
    turns = [turn("tandem", 0, 21.0), turn("openvino", 0, 20.0), turn("vllm", 0, 20.0)]
    goals = list(judge(["tandem", "openvino", "vllm", "openvino-int8"], turns))
    assert [goal.met for goal in goals] == [False, True]  # int8 of Tandem took no part: no goal
    assert [goal.met for goal in judge(["tandem", "openvino-bf16", "tandem-bf16"], turns)] == [None]


def test_the_table_has_a_row_for_each_engine_also_for_one_that_failed() -> None:
    outcome = CpuPeersOutcome(
        command="python -m benchmarks.cpu_peers",
        hardware=HARDWARE,
        goals=[],
        shape="30m",
        requests=2,
        prompt_tokens=400,
        answer_tokens=30,
        threads=2,
        rounds=2,
        engines=["tandem", "openvino", "vllm"],
        versions={"openvino-genai": "1"},
        turns=[turn("tandem", 0, 20.0), turn("tandem", 1, 30.0), turn("openvino", 0, 10.0)],
        failures=[PeerFailure(engine="vllm", round=0, reason="no wheel")],
    )
    head, tandem, openvino, vllm = table(outcome)
    assert head == HEAD and {len(line) for line in (tandem, openvino, vllm)} == {len(HEAD)}
    assert tandem[2:] == ("25.0 (20.0 … 30.0)", "1.5", "20", "40", "2.0", "")
    assert (openvino[2], openvino[-1], vllm[2]) == ("10.0", "2.00x", "failed")


@contextlib.contextmanager
def driven(program: str = DRIVER) -> Iterator[Peer]:
    with peer_process(sys.executable, "-E", "-c", program) as driver:
        await_tokens(driver, 30.0)
        yield driver


def test_a_driver_answers_one_load_after_the_other_and_its_tokens_are_counted() -> None:
    with driven() as driver:
        for lengths in (((5, 3), (4, 1)), ((2, 2),)):
            answers = ask_driver(driver, 30.0, requests_of(*lengths))
            assert [answer.counted for answer in answers] == [tokens for _, tokens in lengths]
            assert all(answer.sent_s < answer.first_s <= answer.token_s for answer in answers)


def test_a_driver_that_ends_fails_the_engine_with_its_last_words() -> None:
    with pytest.raises(PeerFailed, match="no memory"), driven("raise SystemExit('no memory')"):
        pass


def test_a_driver_that_takes_too_long_is_ended() -> None:
    slow = DRIVER.replace("    for step", "    import time; time.sleep(60)\n    for step")
    with driven(slow) as driver, pytest.raises(PeerFailed, match=r"not done within 0\.2 s"):
        ask_driver(driver, 0.2, requests_of((5, 3)))
    assert driver.status is not None


@pytest.mark.parametrize(
    ("tokens", "error", "reason"),
    [(2, "", "an answer has 2 tokens, and 3 were asked for"), (3, "timeout", "a request failed: timeout: too late")],
)
def test_an_answer_that_is_too_short_or_failed_fails_the_engine(tokens: int, error: str, reason: str) -> None:
    answer = TimedAnswer(0.0, 3)
    answer.add(1.0, tokens)
    answer.end(2.0, error, "too late")
    with pytest.raises(PeerFailed, match=reason):
        check([answer])
