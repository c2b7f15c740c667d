"""`launch bench serve`: when requests are due and sent, the figures of answers whose times are known, and a run from its flags
to its files against a server double with known delays.

Also what all reports share, from numbers that are worked out by hand.
"""

import asyncio
import csv
import json
import math
import selectors
import statistics
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bench.client import TimedAnswer
from bench.options import LoadOptions, ResultOptions
from bench.report import BenchOutcome, ReportStyle, Spread, this_hardware
from bench.serve import RunningLoad, due_times, figures_of
from bench.workloads import LoadSession, LoadTurn
from launch.main import main
from tests.bench.double import Delays, Double

MANY = 20_000


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)])
def test_gaps_have_the_mean_of_the_rate_and_the_variation_of_their_shape(burstiness: float, variation: float) -> None:
    times = due_times(LoadOptions(request_rate=5.0, burstiness=burstiness), MANY, seed=7)
    gaps = np.diff(times, prepend=0.0)
    assert (gaps >= 0).all() and times[-1] == pytest.approx(MANY / 5.0), "the last one is due when the rate says"
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.03, abs=1e-9), "a gamma's is 1 / sqrt(shape)"


def test_gaps_without_burstiness_are_those_of_a_poisson_process() -> None:
    gaps = np.diff(due_times(LoadOptions(request_rate=2.0), MANY, seed=1), prepend=0.0)
    for s in (0.1, 0.5, 1.0, 2.0):
        assert (gaps > s).mean() == pytest.approx(math.exp(-2.0 * s), abs=0.01)


def test_a_seed_makes_the_same_times_and_another_seed_makes_others() -> None:
    load = LoadOptions(request_rate=3.0)
    assert (due_times(load, 50, 1) == due_times(load, 50, 1)).all()
    assert (due_times(load, 50, 1) != due_times(load, 50, 2)).any()


@pytest.mark.parametrize(("strategy", "halfway"), [("linear", 50.5), ("exponential", 10.0)])
def test_a_ramp_goes_from_one_rate_to_the_other(strategy: str, halfway: float) -> None:
    load = LoadOptions(ramp_up_strategy=strategy, ramp_up_start_rps=1, ramp_up_end_rps=100, burstiness=math.inf)  # type: ignore[arg-type]
    rates = 1 / np.diff(due_times(load, 1001, seed=0), prepend=0.0)
    assert rates[[0, 500, 1000]] == pytest.approx([1.0, halfway, 100.0])


def test_without_a_rate_everything_is_due_at_once() -> None:
    assert (due_times(LoadOptions(), 3, seed=0) == 0).all()


RESULTS = ResultOptions(percentile_metrics="ttft,itl,e2el", metric_percentiles="50,99")
ONE = LoadSession((LoadTurn("?", 1),))
EARLY_S = 1e-6
"""A load in simulated time is sent this much early, where a load in real time makes up for coarse timers."""


class JumpingSelector(selectors.SelectSelector):
    """Time is what the loop would have waited for: it jumps to the next timer."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is left to wait for"
        self.now_s += max(0.0, timeout)
        return super().select(0)


class SimulatedServer:
    """A server in simulated time that serves one request after another. stall_s: it does nothing in this time."""

    def __init__(self, service_s: float, stall_s: tuple[float, float] = (0.0, 0.0)) -> None:
        self._time = JumpingSelector()
        self._service_s, self._stall_s, self._free_s = service_s, stall_s, 0.0
        self.sent: list[tuple[float, int, list[str]]] = []
        self.fails: set[tuple[int, int]] = set()

    async def send(self, session: LoadSession, texts: list[str], answer: TimedAnswer) -> None:
        now_s = self._time.now_s
        self.sent.append((round(now_s, 3), answer.session, [*texts]))
        done_s = max(now_s, self._free_s) + self._service_s
        if self._stall_s[0] < done_s < self._stall_s[1]:
            done_s = self._stall_s[1] + self._service_s
        self._free_s = done_s
        await asyncio.sleep(done_s - now_s)
        answer.add(self._time.now_s, 1)
        answer.pieces.append(f"answer {answer.turn}")
        answer.end(self._time.now_s, "5xx" if (answer.session, answer.turn) in self.fails else "")

    def drive(self, sessions: list[LoadSession], due_s: list[float], *, most_open: int = 0, is_open: bool = True) -> RunningLoad:
        with asyncio.Runner(loop_factory=self._loop) as runner:
            return runner.run(self._drive(sessions, due_s, most_open, is_open))

    async def _drive(self, sessions: list[LoadSession], due_s: list[float], most_open: int, is_open: bool) -> RunningLoad:
        load = RunningLoad(
            sessions,
            due_s,
            self.send,
            most_open=most_open,
            counts_from_due=is_open,
            clock=asyncio.get_running_loop().time,
            early_s=EARLY_S,
        )
        await load.run()
        assert not load.open and load.ended == len(sessions) and load.elapsed_s == self._time.now_s
        return load

    def _loop(self) -> asyncio.SelectorEventLoop:
        loop = asyncio.SelectorEventLoop(self._time)
        loop.time = lambda: self._time.now_s  # type: ignore[method-assign]
        return loop


def test_an_open_load_is_sent_when_it_is_due_whatever_is_open() -> None:
    server = SimulatedServer(service_s=100.0)
    server.drive([ONE] * 4, [0.0, 1.0, 1.0, 2.5])
    assert [(at_s, number) for at_s, number, _ in server.sent] == [(0.0, 0), (1.0, 1), (1.0, 2), (2.5, 3)]


@pytest.mark.parametrize("most_open", [0, 1], ids=["open", "with a limit on open requests"])
def test_a_server_that_stalls_for_two_seconds_shows_in_p99(most_open: int) -> None:
    # 100 requests a second for 10 s, 1 ms each; nothing is answered from 4 s to 6 s. The 200 that are due in these 2 s wait, and
    # with them those that are due while they are served: more than 1 % of all.
    server = SimulatedServer(0.001, stall_s=(4.0, 6.0))
    load = server.drive([ONE] * 1000, [0.01 * i for i in range(1000)], most_open=most_open)
    figures = figures_of(load.answers, load.elapsed_s, RESULTS)
    assert figures["p50_ttft_ms"] == pytest.approx(1.0)
    queue_s, free_s = [], 0.0
    for i in range(1000):  # the waiting of each request by Lindley's recursion
        done_s = max(0.01 * i, free_s) + 0.001
        free_s = 6.001 if 4.0 < done_s < 6.0 else done_s
        queue_s.append(free_s - 0.01 * i)
    assert figures["p99_ttft_ms"] == pytest.approx(1000 * np.percentile(queue_s, 99), abs=2000 * EARLY_S)
    assert figures["p99_ttft_ms"] > 1900


def test_a_closed_load_has_as_many_open_as_it_may_and_its_times_count_from_the_sending() -> None:
    server = SimulatedServer(service_s=1.0)
    load = server.drive([ONE] * 4, [0.0] * 4, most_open=2, is_open=False)
    assert [at_s for at_s, _, _ in server.sent] == [0.0, 0.0, 1.0, 2.0]
    ttfts_s = [round(answer.ttft_s, 3) for answer in load.answers]
    assert ttfts_s == [1.0, 2.0, 2.0, 2.0], "the server serves one at a time"


def test_a_turn_is_sent_when_the_one_before_has_ended_with_the_answers_so_far_and_keeps_its_place() -> None:
    server = SimulatedServer(service_s=1.0)
    server.drive([LoadSession((LoadTurn("a", 1), LoadTurn("b", 1))), ONE], [0.0, 0.0], most_open=1)
    assert server.sent == [(0.0, 0, []), (1.0, 0, ["answer 0"]), (2.0, 1, [])]


def test_a_turn_that_fails_ends_its_conversation() -> None:
    server = SimulatedServer(service_s=1.0)
    server.fails = {(0, 0)}
    load = server.drive([LoadSession((LoadTurn("a", 1), LoadTurn("b", 1))), ONE], [0.0, 5.0])
    assert [(answer.session, answer.error) for answer in load.answers] == [(0, "5xx"), (1, "")]


def answer(sent_s: float, ttft_s: float, gaps_s: list[float], error: str = "") -> TimedAnswer:
    made = TimedAnswer(sent_s, requested_tokens=3, prompt_tokens=10)
    made.begin(sent_s, counts_from_due=True)
    made.add(sent_s + ttft_s, 1)
    made.gaps_s, made.counted = array("d", gaps_s), 1 + len(gaps_s)
    made.last_s = sent_s + ttft_s + sum(gaps_s)
    made.end(made.last_s, error)
    return made


def figures(answers: list[TimedAnswer], **limits_ms: float) -> dict[str, Any]:
    limits = tuple(f"{name}:{limit}" for name, limit in limits_ms.items())
    return figures_of(answers, 4.0, ResultOptions(metric_percentiles="25,99.9", goodput=limits))


ANSWERS = [
    answer(0.0, 0.1, [0.01, 0.03]),
    answer(0.5, 0.2, [0.02, 0.0]),
    answer(1.0, 0.6, []),
    answer(2.0, 0.3, [0.5], error="broken"),
]


def test_counts_and_rates_are_of_whole_answers() -> None:
    found = figures(ANSWERS)
    assert (found["completed"], found["failed"], found["errors_by_kind"]) == (3, 1, {"broken": 1})
    assert (found["total_input_tokens"], found["total_output_tokens"], found["shorter_than_asked"]) == (30, 7, 1)
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (0.75, 1.75, 9.25)
    assert found["request_goodput"] is None


def test_times_are_those_of_the_standard_library() -> None:
    found = figures(ANSWERS)
    expected = {"ttft": [100, 200, 600], "tpot": [20, 10], "itl": [10, 30, 20, 0], "e2el": [140, 220, 600]}
    for name, values in expected.items():
        assert found[f"mean_{name}_ms"] == pytest.approx(statistics.mean(values))
        assert found[f"median_{name}_ms"] == pytest.approx(statistics.median(values))
        assert found[f"std_{name}_ms"] == pytest.approx(statistics.pstdev(values))
        quarters = statistics.quantiles(values, n=4, method="inclusive")
        assert found[f"p25_{name}_ms"] == pytest.approx(quarters[0])
        assert found[f"p99.9_{name}_ms"] == pytest.approx(statistics.quantiles(values, n=1000, method="inclusive")[-1])


@pytest.mark.parametrize(
    ("limits_ms", "good"),
    [({"ttft": 200}, 2), ({"ttft": 200, "itl": 25}, 1), ({"tpot": 11}, 2), ({"e2el": 601}, 3), ({"e2el": 139}, 0)],
)
def test_goodput_counts_the_answers_that_keep_all_limits(limits_ms: dict[str, float], good: int) -> None:
    found = figures(ANSWERS, **limits_ms)
    assert (found["good_completed"], found["request_goodput"]) == (good, good / 4.0)


def test_peaks_are_the_fullest_second_and_the_most_that_were_open() -> None:
    found = figures([answer(0.0, 0.9, [0.05, 0.1]), answer(0.5, 1.0, [0.1]), answer(1.05, 0.2, [])])
    assert found["max_output_tokens_per_s"] == 4, "in the second second: one, two and one"
    assert found["max_concurrent_requests"] == 2, "the first ends where the third begins"


def test_a_run_in_which_nothing_was_answered_has_figures_too() -> None:
    found = figures(ANSWERS[3:], ttft=1)
    assert (found["completed"], found["p25_itl_ms"], found["max_output_tokens_per_s"], found["request_goodput"]) == (0, 0, 0, 0)


def test_turns_are_told_apart() -> None:
    conversation = [answer(0.0, 0.1, []), answer(1.0, 0.3, []), answer(2.0, 0.2, [])]
    conversation[2].turn, conversation[2].prompt_tokens, conversation[2].cached_tokens = 1, 40, 32
    first, second = figures(conversation)["turns"]
    assert first == {
        "completed": 2,
        "p50_ttft_ms": pytest.approx(200),
        "p99_ttft_ms": pytest.approx(298),
        "input_tokens": 20,
        "cached_tokens": 0,
    }
    assert second == {
        "completed": 1,
        "p50_ttft_ms": pytest.approx(200),
        "p99_ttft_ms": pytest.approx(200),
        "input_tokens": 40,
        "cached_tokens": 32,
    }


VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests"),
    *(f"{which}_{name}_ms" for which in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
    *("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors", "latencies", "queue_times"),
}
"""What `vllm bench serve --save-result --save-detailed` writes for these metrics (vllm/benchmarks/serve.py)."""
DELAYS = Delays(ttft_s=0.05, itl_s=0.02, event_tokens=2)


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a double that serves in a thread of its own."""
    double, over = Double(DELAYS), threading.Event()
    thread = threading.Thread(target=double.serve, args=(over,))
    thread.start()
    yield double.port
    over.set()
    thread.join()


def test_a_run_reports_the_servers_delays_and_writes_vllms_keys(
    port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, figures, table = (tmp_path / name for name in ("prompts.jsonl", "figures.json", "requests.csv"))
    prompts.write_text('{"prompt": "one"}\n{"prompt": [1, 2], "output_tokens": 3}\n')
    flags = ["--dataset-name", "custom", "--dataset-path", str(prompts), "--custom-output-len", "5", "--num-prompts", "4"]
    files = ["--json", str(figures), "--save-detailed", "--csv", str(table), "--goodput", "ttft:0", "itl:60000"]
    assert main(["bench", "serve", "--port", str(port), *flags, *files, "--header", "X-Secret=hidden"]) == 0
    written = json.loads(figures.read_text())
    assert set(written) >= VLLM_KEYS
    assert written["output_lens"] == [5, 3, 5, 3] and written["request_rate"] == "inf" and written["errors"] == [""] * 4
    assert [len(gaps) for gaps in written["itls"]] == [4, 2, 4, 2]
    assert all(gaps[0] == 0 for gaps in written["itls"]), "two tokens came in the first event"
    assert all(ttft >= DELAYS.ttft_s - 0.002 for ttft in written["ttfts"])
    assert written["good_completed"] == 0, "no first token comes at once"
    assert written["generated_texts"][1] == " word word" and "hidden" not in figures.read_text()
    assert [line["output_tokens"] for line in csv.DictReader(table.read_text().splitlines())] == ["5", "3", "5", "3"]
    assert "4 whole, 0 failed" in capsys.readouterr().out


def test_a_spread_has_the_median_and_what_nine_of_ten_do_not_exceed() -> None:
    assert Spread.of([5, 1, 2, 3, 4, 6, 7, 8, 10, 9]) == Spread(least=1, median=5.5, p90=9, most=10)
    assert Spread.of([3.0]) == Spread(least=3.0, median=3.0, p90=3.0, most=3.0)
    assert Spread.of(range(1, 21)) == Spread(least=1, median=10.5, p90=18, most=20)


@pytest.mark.parametrize(("load", "cautious"), [(0.2, False), (7.0, True)])
def test_a_report_from_a_busy_machine_says_what_that_does_to_it(load: float, cautious: bool) -> None:
    on = msgspec.structs.replace(this_hardware(), load=load)
    outcome = BenchOutcome(command="measure", hardware=on, goals=[])
    for style in (ReportStyle(is_markdown=False), ReportStyle(is_markdown=True)):
        assert ("The machine had other work" in style.report(outcome, "settings", "Ratios are steady.", [])) == cautious
