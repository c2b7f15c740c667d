"""`python -m benchmarks.streams`: what is compared, and what is counted."""

from array import array

from bench.client import TimedAnswer
from bench.report import markdown_table, this_hardware
from benchmarks.streams import PAIR, StreamsBench, StreamsOutcome, StreamsRun, beside_the_pair, figures, run_of


def stream(first_s: float, *gaps_s: float) -> TimedAnswer:
    return TimedAnswer(0.0, 100, 8, first_s=first_s, counted=1 + len(gaps_s), gaps_s=array("d", gaps_s))


def prompt(sent_s: float, first_s: float) -> TimedAnswer:
    return TimedAnswer(sent_s, 2, 512, began_s=sent_s, first_s=first_s, counted=1 if first_s else 0)


def test_only_tokens_and_prompts_of_the_measured_time_count() -> None:
    """From 10 s to 20 s. The first stream's tokens come at 9, 11, 14 and 21 s, the second one's at 10, 15 and 20 s."""
    streams = [stream(9.0, 2.0, 3.0, 7.0), stream(10.0, 5.0, 5.0)]
    prompts = [prompt(10.0, 14.0), prompt(14.5, 18.0), prompt(18.5, 22.0), prompt(19.0, 0.0)]
    run = run_of(PAIR, 1, streams, prompts, 10.0, 20.0)
    assert run.gaps_ms[0] == 4000.0, "the median of 2, 3, 5 and 5 s"
    assert run.stream_tokens_per_s == 0.4
    assert (run.prompts, run.prompt_tokens_per_s) == (2, 2 * 512 / 8)
    assert run.first_token_s == 3.75


def test_a_layout_that_stands_still_has_no_figures_and_breaks_no_report() -> None:
    still = run_of("colocated, chunks of 32", 1, [stream(9.0)], [prompt(10.0, 0.0)], 10.0, 20.0)
    assert (still.stream_tokens_per_s, still.prompts, still.prompt_tokens_per_s) == (0.0, 0, 0.0)
    pair = StreamsRun(
        layout=PAIR, round=1, gaps_ms=(100.0, 150.0, 200.0), stream_tokens_per_s=80.0, prompt_tokens_per_s=120.0,
        first_token_s=4.0, prompts=5,
    )  # fmt: skip
    other = StreamsRun(
        layout="colocated, chunks of 512", round=1, gaps_ms=(400.0, 600.0, 800.0), stream_tokens_per_s=40.0,
        prompt_tokens_per_s=100.0, first_token_s=5.0, prompts=4,
    )  # fmt: skip
    outcome = StreamsOutcome(
        command="python -m benchmarks.streams", hardware=this_hardware(), goals=[], seconds=10.0, streams=8, prompt_tokens=512,
        layouts={PAIR: "", "colocated, chunks of 32": "", "colocated, chunks of 512": ""}, runs=[pair, still, other],
    )  # fmt: skip
    text = "\n".join(map(markdown_table, (figures(outcome), beside_the_pair(outcome))))
    assert "| 1 prefill + 1 decode | 100 | 150 | 200 | 80.0 | 120 | 4.00 |" in text
    assert "| colocated, chunks of 512 | 0.25 | 0.25 | 0.25 | 2.00 | 1.20 | 0.80 |" in text
    assert "| colocated, chunks of 32 | – |" in text


def test_each_round_has_every_layout_and_the_cores_are_the_same_for_all() -> None:
    bench = StreamsBench(model="M", chunks="128,32", threads=4, rounds=2)
    assert [name for _, name in bench.turns()] == 2 * [PAIR, "colocated, chunks of 32", "colocated, chunks of 128"]
    flags = bench.layouts()
    assert {"--prefill=1", "--threads=2", "--chunk-tokens=512"} <= set(flags[PAIR])
    assert {"--prefill=0", "--threads=4", "--chunk-tokens=32"} <= set(flags["colocated, chunks of 32"])
    assert not any("--threads" in flag for each in StreamsBench().layouts().values() for flag in each)
