"""`python -m benchmarks.overlap`: how much of the KV transfer overlaps with computing, and how much later the first token comes.

Owns the fleets, the order of measurements, the figures, the goals and the tables. All fleets run at once and are idle but for one
request, which goes to each of them in turn, so that other work of the machine affects all of them alike. Prints its progress on
stderr.
"""

import asyncio
import contextlib
import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

import msgspec

from bench.client import COUNTED_STREAM, HttpClient, TimedAnswer, completion_of_ids
from bench.report import BenchOutcome, Goal, Spread, say, this_hardware
from benchmarks.command import Invocation, start
from benchmarks.engine import shape_folder
from common.config import DEMO_MODEL, EngineConfig, InstanceConfig, LogConfig, ModelConfig, RouterConfig, TransportName
from common.host import core_count, divide_cores
from common.model_path import resolve_model_path
from common.options import option, parse_numbers, require, require_at_least, to_flags
from common.processes.local_fleet import FleetFailed, connected, local_fleet
from common.text.tokenizer_manager import TokenizerManager
from engine.backends import with_device_defaults
from launch import child

FleetKind = Literal["layer-wise", "page-wise", "colocated"]
"""layer-wise: one prefill and one decode instance. page-wise: the same, but the last chunk is pushed when it is computed.
colocated: one decode instance, which does both."""
FLEETS: tuple[FleetKind, ...] = get_args(FleetKind)
PREFILLS: dict[FleetKind, int] = {"layer-wise": 1, "page-wise": 1, "colocated": 0}
RANDOM = "random"
MLP_FACTOR = 3
HEARTBEAT_S = 0.2
"""Counters come with heartbeats."""
ANSWER_TOKENS = 2
"""The second token is the first that a decode instance computes."""
ANSWER_S, COUNTED_S = 600.0, 60.0
SERVED_NAME = "model"
LOOK_EVERY_S = 0.02
MOST_EXPOSED = {1: 50, 8: 10}
"""Per cent of a prompt's transfer that may be exposed, by the prompt's chunks."""
SLOWER_BY, LATER_S = 0.03, 0.002
"""By how much a first token may come later than from a colocated instance: a share of its time, and a constant."""
FIRST_TOKEN = ("tokens", "fleet", "first token, ms", "beyond colocated's, ms", "in colocated's", "then to the second, ms")
TRANSFER = ("tokens", "fleet", "MB pushed", "all pushes, ms", "exposed, ms", "exposed share", "of page-wise's exposed")
SPREAD = "median / p90 of the requests, or of their pairs from one round"
STEADY = "Differences within a round are affected least."
NOT_FLAGS = ("executor", "step_cost")
"""Fields of the engine that have no effect here: it computes."""


@dataclass(frozen=True, kw_only=True)
class OverlapBench:
    """What is measured, and how often."""

    model: str = option(
        f"{RANDOM},demo",
        f"checkpoints, one after the other: {RANDOM} (random weights of the shape below), demo, a folder, or a Hugging Face name",
    )
    chunks: str = option(
        "1,2,8", "lengths of the prompts, in chunks; each prompt is one page shorter, which leaves room for the answer"
    )
    repeat: int = option(9, "how many rounds; in each, every fleet gets every prompt once, in random order")
    transport: TransportName = option("nixl", "what moves KV pages")
    layers: int = option(8, "random weights: layers")
    hidden: int = option(512, "random weights: size of the hidden state; the MLP is three times as wide")
    kv_heads: int = option(8, "random weights: heads, each with a KV head of its own")
    head_dim: int = option(64, "random weights: size of a head")
    json: str = option("", "write the figures of every request to this file")

    def __post_init__(self) -> None:
        require_at_least(self, repeat=1, layers=1, hidden=1, kv_heads=1, head_dim=1)
        require(self.head_dim % 2 == 0, "head-dim", "even", self.head_dim)
        each_once = "" not in self.models and len(set(self.models)) == len(self.models)
        require(each_once, "model", "names of checkpoints, each once, with commas between them", self.model)
        require(min(self.lengths) >= 1, "chunks", "at least 1 each", self.chunks)

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.model.split(","))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The prompts' lengths in chunks, the shortest first."""
        return tuple(sorted(set(parse_numbers(self.chunks, "chunks", int))))


QUICK: dict[str, Any] = {"model": RANDOM, "repeat": 1, "layers": 2, "hidden": 64, "kv_heads": 2, "head_dim": 32}
QUICK_ENGINE: dict[str, Any] = {"chunk_tokens": 64, "grammar": "off"}


class OverlapSample(msgspec.Struct, frozen=True, kw_only=True):
    """One request, while its fleet has no other. Without a prefill instance the last three are 0."""

    fleet: FleetKind
    chunks: int
    round: int
    first_token_s: float
    """The time from the client's request to its first token."""
    next_token_s: float
    """The time from there to the second token."""
    push_s: float
    """How long its pushes took, added up."""
    exposed_s: float
    """The time from its first token to its handoff, on the prefill instance."""
    pushed_bytes: int

    @property
    def exposed_share(self) -> float:
        """The exposed part of the transfer of a request that was handed off."""
        return self.exposed_s / self.push_s


class OverlapModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in all fleets."""

    model: str
    prompt_tokens: dict[int, int]
    """The length of a prompt of so many chunks."""
    samples: list[OverlapSample]

    def of(self, fleet: FleetKind, chunks: int) -> list[OverlapSample]:
        """In the order of the rounds."""
        found = (sample for sample in self.samples if (sample.fleet, sample.chunks) == (fleet, chunks))
        return sorted(found, key=lambda sample: sample.round)

    def pairs(self, fleet: FleetKind, other: FleetKind, chunks: int) -> list[tuple[OverlapSample, OverlapSample]]:
        """Samples of one round, which have seen nearly the same noise."""
        return list(zip(self.of(fleet, chunks), self.of(other, chunks), strict=True))


class OverlapOutcome(BenchOutcome, frozen=True, kw_only=True):
    """All that is known at the end."""

    transport: str
    threads: int
    """The threads of each instance."""
    models: list[OverlapModel]


def run(invocation: Invocation) -> int:
    """Measure, and publish the report. Returns the exit status: 1 when a fleet failed, else 0, goals met or not."""
    child.prepare(1)
    bench, engine = invocation.config(OverlapBench, QUICK), invocation.config(EngineConfig, QUICK_ENGINE)
    hardware, engine = this_hardware(), with_device_defaults(engine)
    engine = replace(engine, threads=engine.threads or divide_cores(core_count(), 2))
    try:
        models = [_measure(model, bench, engine) for model in bench.models]
    except FleetFailed as error:
        print(error, file=sys.stderr)
        return 1
    outcome = OverlapOutcome(
        command=invocation.command,
        hardware=hardware,
        goals=judge(models),
        transport=bench.transport,
        threads=engine.threads,
        models=models,
    )
    settings = f"{engine.threads} thread{'' if engine.threads == 1 else 's'} for each instance, {bench.transport}"
    body = []
    for model in models:
        body += invocation.style.section(f"{model.model}: time to first token, {SPREAD}", first_tokens(model))
        body += invocation.style.section(f"{model.model}: the transfer of a prompt, {SPREAD}", transfers(model))
    invocation.publish(outcome, settings, STEADY, body, bench.json)
    return 0


def _measure(model: str, bench: OverlapBench, engine: EngineConfig) -> OverlapModel:
    lengths = {chunks: prompt_tokens(chunks, engine) for chunks in bench.lengths}
    samples: list[OverlapSample] = []
    with contextlib.ExitStack() as stack:
        folder = model
        if model == RANDOM:
            folder = stack.enter_context(_random_model(bench, context_tokens=(bench.lengths[-1] + 1) * engine.chunk_tokens))
            engine = replace(engine, load_format="dummy")
        vocab_size = TokenizerManager(folder).vocab_size
        fleets = {}
        for kind in FLEETS:
            local = stack.enter_context(local_fleet(*fleet_flags(kind, folder, bench, engine), on_output=sys.stderr.write))
            fleets[kind] = CountedFleet(local.url, PREFILLS[kind] + 1)
        say(f"{model}: the first requests")
        for fleet in fleets.values():
            serve(fleet, _prompt(lengths[bench.lengths[-1]], vocab_size, 0))  # so that memory and links have been used
        for number in range(1, bench.repeat + 1):
            for chunks, tokens in lengths.items():
                say(f"{model}, round {number} of {bench.repeat}: {tokens} tokens")
                prompt = _prompt(tokens, vocab_size, number)
                order = random.Random(f"{number} {chunks}").sample(FLEETS, len(FLEETS))
                samples += [_sample(kind, fleets[kind], prompt, chunks, number) for kind in order]
    return OverlapModel(model=model, prompt_tokens=lengths, samples=samples)


def prompt_tokens(chunks: int, engine: EngineConfig) -> int:
    """A prompt of so many chunks, less one page: so prompt and answer fit a context that is a whole number of chunks.

    Raises ConfigError when nothing is left.
    """
    require(engine.chunk_tokens > engine.page_size, "chunk-tokens", "more than --page-size", engine.chunk_tokens)
    return chunks * engine.chunk_tokens - engine.page_size


def fleet_flags(kind: FleetKind, model: str, bench: OverlapBench, engine: EngineConfig) -> list[str]:
    """The flags of `launch local`. The fleets differ only in what is compared; each instance has the same number of threads."""
    return [
        f"--prefill={PREFILLS[kind]}",
        *to_flags(
            RouterConfig(heartbeat_s=HEARTBEAT_S),
            InstanceConfig(transport=bench.transport),
            ModelConfig(model=model, served_name=SERVED_NAME),
            replace(engine, layer_groups=0) if kind == "page-wise" else engine,
            LogConfig(log_level="warning"),
        ),
    ]


@contextlib.contextmanager
def _random_model(bench: OverlapBench, context_tokens: int) -> Iterator[str]:
    """The folder of a Qwen3 model of the bench's shape with the demo model's tokenizer, for weights that are made up; gone at the
    end."""
    sizes = {
        "vocab_size": TokenizerManager(DEMO_MODEL).vocab_size,
        "hidden_size": bench.hidden,
        "intermediate_size": MLP_FACTOR * bench.hidden,
        "num_hidden_layers": bench.layers,
        "num_attention_heads": bench.kv_heads,
        "num_key_value_heads": bench.kv_heads,
        "head_dim": bench.head_dim,
        "max_position_embeddings": context_tokens,
    }
    with shape_folder("tiny", **sizes) as model:
        for file in resolve_model_path(DEMO_MODEL, weights=False).glob("*token*"):
            shutil.copy(file, Path(model.model) / file.name)
        yield model.model


def _prompt(tokens: int, vocab_size: int, number: int) -> list[int]:
    """A different prompt in each round, so that nothing of it is cached."""
    return random.Random(f"{number} {tokens}").choices(range(vocab_size), k=tokens)


def serve(fleet: "CountedFleet", prompt: list[int]) -> tuple[TimedAnswer, "FleetCounters"]:
    """Raises FleetFailed."""
    return fleet.serve(completion_of_ids(SERVED_NAME, prompt, ANSWER_TOKENS, **COUNTED_STREAM), ANSWER_TOKENS)


def _sample(kind: FleetKind, fleet: "CountedFleet", prompt: list[int], chunks: int, number: int) -> OverlapSample:
    answer, counted = serve(fleet, prompt)
    return OverlapSample(
        fleet=kind,
        chunks=chunks,
        round=number,
        first_token_s=answer.ttft_s,
        next_token_s=answer.token_s - answer.first_s,
        push_s=counted.push_seconds,
        exposed_s=counted.exposed_seconds,
        pushed_bytes=counted.bytes_pushed,
    )


class FleetCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of all instances of a fleet, added up."""

    requests_ended: int = 0
    bytes_pushed: int = 0
    push_seconds: float = 0.0
    exposed_seconds: float = 0.0


class CountedFleet:
    """A running fleet that is sent one request at a time, with what it counted for each. Every method raises FleetFailed."""

    def __init__(self, url: str, instances: int) -> None:
        self._url = url
        self._instances = instances

    def serve(self, body: bytes, answer_tokens: int) -> tuple[TimedAnswer, FleetCounters]:
        """Send one request for a completion and wait until every instance has counted it. Returns the answer, and what was
        counted."""
        before = self._totals()
        answer = asyncio.run(self._ask(body, answer_tokens))
        if answer.error:
            raise FleetFailed(f"a request failed: {answer.message}")
        if answer.counted != answer_tokens:
            raise FleetFailed(f"an answer has {answer.counted} tokens instead of {answer_tokens}")
        deadline = time.monotonic() + COUNTED_S
        while (now := self._totals())["requests_ended"] - before["requests_ended"] < self._instances:
            if time.monotonic() > deadline:
                raise FleetFailed(f"an answered request is not over on each instance after {COUNTED_S:g} s: {now}")
            time.sleep(LOOK_EVERY_S)
        return answer, FleetCounters(**{name: now[name] - before[name] for name in now})

    async def _ask(self, body: bytes, answer_tokens: int) -> TimedAnswer:
        client, answer = HttpClient(self._url, "/v1/completions", {}, ANSWER_S, keeps_text=True), TimedAnswer(0.0, answer_tokens)
        answer.begin(time.perf_counter())
        await client.ask(answer, body)
        client.close()
        return answer

    def _totals(self) -> dict[str, Any]:
        with connected(self._url) as connection:
            connection.request("GET", "/cluster")
            instances = json.loads(connection.getresponse().read())["instances"]
        if len(instances) < self._instances:
            raise FleetFailed("an instance has left")
        return {name: sum(each["counters"][name] for each in instances) for name in FleetCounters.__struct_fields__}


def judge(models: Sequence[OverlapModel]) -> list[Goal]:
    """The median of the requests decides, of the pairs of one round where two fleets are compared."""
    return [goal for model in models for goal in (*_exposed_goals(model), *_first_token_goals(model))]


def _exposed_goals(model: OverlapModel) -> Iterator[Goal]:
    for chunks, limit in MOST_EXPOSED.items():
        shares = [100 * sample.exposed_share for sample in model.of("layer-wise", chunks)]
        yield Goal(
            rule=f"{model.model}: at most {limit} % of the transfer of a prompt of {_chunks(chunks)} is exposed",
            met=median(shares) <= limit if shares else None,
            figure=f"{median(shares):.1f} %" if shares else "not measured",
        )


def _first_token_goals(model: OverlapModel) -> Iterator[Goal]:
    for chunks in model.prompt_tokens:
        pairs = model.pairs("layer-wise", "colocated", chunks)
        times = [(ours.first_token_s, theirs.first_token_s) for ours, theirs in pairs]
        yield Goal(
            rule=f"{model.model}: the first token of a prompt of {_chunks(chunks)} within {100 * SLOWER_BY:g} % + "
            f"{1e3 * LATER_S:g} ms of a colocated instance's",
            met=median(ours - (1 + SLOWER_BY) * theirs - LATER_S for ours, theirs in times) <= 0,
            figure=f"{1e3 * median(ours - theirs for ours, theirs in times):+.1f} ms, "
            f"{100 * median(ours / theirs - 1 for ours, theirs in times):+.1f} %",
        )


def _chunks(count: int) -> str:
    return "one chunk" if count == 1 else f"{count} chunks"


def first_tokens(model: OverlapModel) -> list[tuple[str, ...]]:
    """A row for each length and fleet: when the first tokens came."""
    rows: list[tuple[str, ...]] = [FIRST_TOKEN]
    for chunks, tokens in model.prompt_tokens.items():
        for fleet in FLEETS:
            samples, pairs = model.of(fleet, chunks), model.pairs(fleet, "colocated", chunks)
            first, following = (sample.first_token_s for sample in samples), (sample.next_token_s for sample in samples)
            differences = _milliseconds(ours.first_token_s - theirs.first_token_s for ours, theirs in pairs)
            ratios = _numbers((ours.first_token_s / theirs.first_token_s for ours, theirs in pairs), "{:.3f}")
            compared = ("", "") if fleet == "colocated" else (differences, ratios)
            rows.append((str(tokens), fleet, _milliseconds(first), *compared, _milliseconds(following)))
    return rows


def transfers(model: OverlapModel) -> list[tuple[str, ...]]:
    """A row for each length and each fleet with a prefill instance: how long pushes took, and what of them was exposed."""
    rows: list[tuple[str, ...]] = [TRANSFER]
    columns: tuple[Callable[[OverlapSample], float], ...] = (lambda each: each.push_s, lambda each: each.exposed_s)
    for chunks, tokens in model.prompt_tokens.items():
        for fleet in (kind for kind in FLEETS if PREFILLS[kind]):
            samples, pairs = model.of(fleet, chunks), model.pairs(fleet, "page-wise", chunks)
            compared = _percent(ours.exposed_s / theirs.exposed_s for ours, theirs in pairs) if fleet == "layer-wise" else ""
            times = (_milliseconds(map(column, samples)) for column in columns)
            share = _percent(sample.exposed_share for sample in samples)
            rows.append((str(tokens), fleet, f"{samples[0].pushed_bytes / 1e6:.1f}", *times, share, compared))
    return rows


def _milliseconds(seconds: Iterable[float]) -> str:
    return _numbers((1e3 * value for value in seconds), "{:.1f}")


def _percent(shares: Iterable[float]) -> str:
    return _numbers((100 * share for share in shares), "{:.0f} %")


def _numbers(values: Iterable[float], form: str) -> str:
    spread = Spread.of(values)
    return f"{form.format(spread.median)} / {form.format(spread.p90)}"


def main(arguments: Sequence[str] | None = None) -> int:
    explanation = "Measure how much of the KV transfer overlaps with computing, and when the first token arrives."
    return start("overlap", explanation, run, OverlapBench, EngineConfig, without=NOT_FLAGS, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
