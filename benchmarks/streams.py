"""`python -m benchmarks.streams`: answers that are written while prompts arrive, of 1 + 1 and of colocated serving.

Starts each layout in its turn, lets answers be written, and sends prompts all the while. Owns the layouts, their order, the
figures and the table. `bench/client.py` is the client. Prints its progress on stderr.
"""

import asyncio
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec
import numpy as np

from bench.client import COUNTED_STREAM, HttpClient, TimedAnswer, completion_of_ids
from bench.report import BenchOutcome, Spread, ratios, say, spread_of, this_hardware
from benchmarks.command import Invocation, start
from common.config import DEMO_MODEL
from common.options import option, parse_numbers, require, require_above_0, require_at_least
from common.processes.local_fleet import FleetFailed, local_fleet
from common.text.tokenizer_manager import TokenizerManager
from launch import child

PAIR = "1 prefill + 1 decode"
PATH, SERVED_NAME = "/v1/completions", "model"
STREAM_TOKENS = 3000
"""An answer that is longer than any run."""
ANSWER_TOKENS = 2
"""Tokens of the answer to a prompt: the second one is the first that a decode instance computes, so the KV moves."""
TIMEOUT_S = 600.0
LOOK_S = 0.05
HEAD = ("layout", "inter-token p50, ms", "p95, ms", "p99, ms", "stream tokens/s", "prompt tokens/s", "first token p50, s")
STEADY = "Ratios within a round are affected least."
HOW = (
    "Median of the rounds, with the least and the most in brackets. Prompt tokens/s are those of whole prompts, from the first "
    "that arrived to the last that was computed."
)
RATIOS = f"{PAIR} / each layout, round by round: below 1 is better for times, above 1 for rates:"


@dataclass(frozen=True, kw_only=True)
class StreamsBench:
    """What runs, and for how long."""

    model: str = option(
        DEMO_MODEL, "the checkpoint that is served; `python -m benchmarks.cpu_peers` makes one in the shape of Qwen3-0.6B"
    )
    chunks: str = option("32,128,512", "colocated serving is measured with each of these --chunk-tokens")
    prefill_chunk: int = option(512, "--chunk-tokens of the prefill instance beside a decode instance")
    threads: int = option(
        0, "CPU threads of a colocated instance, and of the two others together, half each; 0: as launch local divides the cores"
    )
    streams: int = option(8, "answers that are written all the time")
    stream_tokens: int = option(128, "tokens of their prompts")
    prompts: int = option(1, "prompts that are open at a time: when one has its first tokens, the next one arrives")
    prompt_tokens: int = option(512, "tokens of each, all different")
    seconds: float = option(20.0, "how long each layout is measured in each round, once all streams run")
    rounds: int = option(3, "how often each layout has its turn: A B C, A B C and so on")
    json: str = option("", "write the figures of every run to this file")

    def __post_init__(self) -> None:
        require(self.threads != 1 and self.threads >= 0, "threads", "at least 2, or 0", self.threads)
        require_at_least(self, prefill_chunk=1, streams=1, stream_tokens=1, prompts=1, prompt_tokens=1, rounds=1)
        require_above_0(self, "seconds")
        require(min(self.chunk_sizes) >= 1, "chunks", "at least 1 each", self.chunks)

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return tuple(sorted(set(parse_numbers(self.chunks, "chunks", int))))

    def layouts(self) -> dict[str, tuple[str, ...]]:
        """Flags of `launch local` by the layout's name, the pair first."""
        common = (f"--model={self.model}", f"--served-name={SERVED_NAME}", "--log-level=warning", "--prefix-cache=off")
        half, whole = ((f"--threads={self.threads // 2}",), (f"--threads={self.threads}",)) if self.threads else ((), ())
        found = {PAIR: (*common, "--prefill=1", f"--chunk-tokens={self.prefill_chunk}", *half)}
        for chunk in self.chunk_sizes:
            found[f"colocated, chunks of {chunk}"] = (*common, "--prefill=0", f"--chunk-tokens={chunk}", *whole)
        return found

    def turns(self) -> Iterator[tuple[int, str]]:
        """Round and layout: what changes slowly about the machine meets every layout."""
        yield from product(range(1, self.rounds + 1), self.layouts())


QUICK: dict[str, Any] = {"streams": 2, "stream_tokens": 16, "prompt_tokens": 64, "chunks": "32", "seconds": 1.0, "rounds": 1}


class StreamsRun(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a layout in one round."""

    layout: str
    round: int
    gaps_ms: tuple[float, float, float]
    """p50, p95 and p99 of the times between tokens of all streams."""
    stream_tokens_per_s: float
    prompt_tokens_per_s: float
    first_token_s: float
    prompts: int


class StreamsOutcome(BenchOutcome, frozen=True, kw_only=True):
    """All that is known at the end."""

    layouts: dict[str, str]
    """The flags of each layout, the pair first."""
    seconds: float
    streams: int
    prompt_tokens: int
    runs: list[StreamsRun]


FIGURES: tuple[tuple[Callable[[StreamsRun], float], str], ...] = (
    (lambda run: run.gaps_ms[0], ".0f"),
    (lambda run: run.gaps_ms[1], ".0f"),
    (lambda run: run.gaps_ms[2], ".0f"),
    (lambda run: run.stream_tokens_per_s, ".1f"),
    (lambda run: run.prompt_tokens_per_s, ".0f"),
    (lambda run: run.first_token_s, ".2f"),
)


def run(invocation: Invocation) -> int:
    """Measure, and publish the report. Returns the exit status: 1 when a layout failed."""
    child.prepare(1)
    bench = invocation.config(StreamsBench, QUICK)
    hardware, layouts = this_hardware(), bench.layouts()
    vocab_size = TokenizerManager(bench.model).vocab_size
    runs: list[StreamsRun] = []
    failed = False
    for number, name in bench.turns():
        say(f"round {number} of {bench.rounds}, {name}")
        try:
            with local_fleet(*layouts[name]) as fleet:
                runs.append(asyncio.run(measure(bench, name, number, fleet.url, vocab_size)))
        except FleetFailed as error:
            say(f"{name} failed: {error}")
            failed = True
    outcome = StreamsOutcome(
        command=invocation.command,
        hardware=hardware,
        goals=[],
        layouts={name: shlex.join(flags) for name, flags in layouts.items()},
        seconds=bench.seconds,
        streams=bench.streams,
        prompt_tokens=bench.prompt_tokens,
        runs=runs,
    )
    settings = f"{bench.streams} streams, prompts of {bench.prompt_tokens} tokens, {bench.seconds:g} s for each run"
    table, flags = invocation.style.table, [("layout", "launch local"), *outcome.layouts.items()]
    body = [table(flags), HOW, table(figures(outcome)), RATIOS, table(beside_the_pair(outcome))]
    invocation.publish(outcome, settings, STEADY, body, bench.json)
    return int(failed)


async def measure(bench: StreamsBench, layout: str, number: int, url: str, vocab_size: int) -> StreamsRun:
    """Streams and prompts for one fleet. Raises FleetFailed when an answer fails or a stream ends."""
    client = HttpClient(url, PATH, {}, TIMEOUT_S)
    chance = random.Random(number)  # all layouts of a round get the same prompts
    streams: list[TimedAnswer] = []
    prompts: list[TimedAnswer] = []

    async def ask(tokens: int, answer_tokens: int, answers: list[TimedAnswer]) -> None:
        answer = TimedAnswer(time.perf_counter(), answer_tokens, tokens)
        answers.append(answer)
        body = completion_of_ids(
            SERVED_NAME, chance.choices(range(vocab_size // 8, vocab_size), k=tokens), answer_tokens, **COUNTED_STREAM
        )
        answer.begin(time.perf_counter())
        await client.ask(answer, body)
        if answer.error:
            raise FleetFailed(f"an answer failed: {answer.error}: {answer.message}")

    async def stream() -> None:
        await ask(bench.stream_tokens, STREAM_TOKENS, streams)
        raise FleetFailed("a stream ended: its answer was whole")

    async def one_prompt_after_the_other() -> None:
        while True:
            await ask(bench.prompt_tokens, ANSWER_TOKENS, prompts)

    try:
        await ask(bench.prompt_tokens, ANSWER_TOKENS, [])
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream()) for _ in range(bench.streams)]
            while len(streams) < bench.streams or any(answer.counted < 2 for answer in streams):
                await asyncio.sleep(LOOK_S)
            began_s = time.perf_counter()
            tasks += [group.create_task(one_prompt_after_the_other()) for _ in range(bench.prompts)]
            await asyncio.sleep(bench.seconds)
            for task in tasks:
                task.cancel()
        return run_of(layout, number, streams, prompts, began_s, began_s + bench.seconds)
    except ExceptionGroup as failed:
        raise FleetFailed(str(failed.exceptions[0])) from failed
    finally:
        client.close()


def run_of(
    layout: str, number: int, streams: Sequence[TimedAnswer], prompts: Sequence[TimedAnswer], began_s: float, ended_s: float
) -> StreamsRun:
    """Tokens that came from began_s to ended_s, and prompts whose first token came in this time; the first one was sent at its
    beginning. A time between tokens belongs where it ends."""
    gaps = np.concatenate([*(_gaps(answer, began_s, ended_s) for answer in streams), np.zeros(0)])
    done = [answer for answer in prompts if answer.counted and answer.first_s <= ended_s]
    whole_s = max((answer.first_s for answer in done), default=ended_s) - began_s
    p50, p95, p99 = (1e3 * np.percentile(gaps, (50, 95, 99))).tolist() if len(gaps) else (0.0, 0.0, 0.0)
    return StreamsRun(
        layout=layout,
        round=number,
        gaps_ms=(p50, p95, p99),
        stream_tokens_per_s=len(gaps) / (ended_s - began_s),
        prompt_tokens_per_s=sum(answer.prompt_tokens for answer in done) / whole_s,
        first_token_s=statistics.median(answer.ttft_s for answer in done) if done else 0.0,
        prompts=len(done),
    )


def _gaps(answer: TimedAnswer, began_s: float, ended_s: float) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    gaps = np.frombuffer(answer.gaps_s, np.float64) if answer.gaps_s else np.zeros(0)
    at_s = answer.first_s + np.cumsum(gaps)
    return gaps[(at_s > began_s) & (at_s <= ended_s)]


def figures(outcome: StreamsOutcome) -> list[tuple[str, ...]]:
    """A row for each layout: its medians."""
    spreads = ((name, (spread_of(_by_round(outcome, name, of).values()) for of, _ in FIGURES)) for name in outcome.layouts)
    return [HEAD, *((name, *(_cell(each, form) for each, (_, form) in zip(row, FIGURES, strict=True))) for name, row in spreads)]


def beside_the_pair(outcome: StreamsOutcome) -> list[tuple[str, ...]]:
    """A row for each layout but the pair."""
    rows: list[tuple[str, ...]] = [HEAD]
    for name in outcome.layouts:
        if name != PAIR:
            found = (ratios(_by_round(outcome, PAIR, of), _by_round(outcome, name, of)) for of, _ in FIGURES)
            rows.append((name, *(_cell(each, ".2f") for each in found)))
    return rows


def _by_round(outcome: StreamsOutcome, layout: str, figure: Callable[[StreamsRun], float]) -> dict[int, float]:
    return {run.round: figure(run) for run in outcome.runs if run.layout == layout}


def _cell(spread: Spread | None, form: str) -> str:
    return "–" if spread is None else spread.text(form)


def main(arguments: Sequence[str] | None = None) -> int:
    explanation = "Measure answers that are written while prompts arrive, of 1 + 1 and of colocated serving."
    return start("streams", explanation, run, StreamsBench, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
