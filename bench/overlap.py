"""`launch bench overlap`: how much of the KV transfer overlaps with computing, and how much later the first token comes.

Owns the fleets and the order of measurements: all fleets run at once and are idle but for one request, which goes to each of them
in turn, so that other work of the machine affects all of them alike. Prints only its progress, on stderr.
"""

import contextlib
import random
import sys
from dataclasses import replace

from bench import overlap_report
from bench.fleets import Fleet
from bench.overlap_figures import Measured, OverlapOutcome, Sample, judge
from bench.overlap_plan import FLEETS, RANDOM, FleetKind, OverlapBench, prompt_tokens
from bench.random_model import random_model
from bench.report import publish, say, this_hardware
from common.config import EngineConfig, InstanceConfig, LogConfig, ModelConfig, RouterConfig
from common.cores import core_count, divide_cores
from common.flags import to_flags
from common.processes.local_fleet import FleetFailed, local_fleet
from common.text.tokenizer_manager import TokenizerManager

PREFILLS: dict[FleetKind, int] = {"layer-wise": 1, "page-wise": 1, "colocated": 0}
HEARTBEAT_S = 0.2
"""Counters come with heartbeats."""


def run(bench: OverlapBench, engine: EngineConfig, command: str, markdown: bool) -> int:
    """Measure, print the report and write the file. Returns the exit status: 1 when a fleet failed, else 0, goals met or not."""
    hardware = this_hardware()
    engine = replace(engine, threads=engine.threads or divide_cores(core_count(), 2))
    try:
        models = [_measure(model, bench, engine) for model in bench.models]
    except FleetFailed as error:
        print(error, file=sys.stderr)
        return 1
    goals, transport, threads = judge(models), bench.transport, engine.threads
    outcome = OverlapOutcome(command=command, hardware=hardware, goals=goals, transport=transport, threads=threads, models=models)
    publish(outcome, overlap_report.markdown(outcome) if markdown else overlap_report.text(outcome), bench.json)
    return 0


def _measure(model: str, bench: OverlapBench, engine: EngineConfig) -> Measured:
    lengths = {chunks: prompt_tokens(chunks, engine) for chunks in bench.lengths}
    samples: list[Sample] = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_checkpoint(model, bench, engine))
        vocab = TokenizerManager(folder).vocab_size
        fleets = {}
        for kind in FLEETS:
            local = stack.enter_context(local_fleet(*fleet_flags(kind, folder, bench, engine), on_output=sys.stderr.write))
            fleets[kind] = Fleet(local.url, PREFILLS[kind] + 1)
        say(f"{model}: the first requests")
        for fleet in fleets.values():
            fleet.serve(_prompt(lengths[bench.lengths[-1]], vocab, 0))  # so that memory and links have been used
        for number in range(1, bench.repeat + 1):
            for chunks, tokens in lengths.items():
                say(f"{model}, round {number} of {bench.repeat}: {tokens} tokens")
                prompt = _prompt(tokens, vocab, number)
                order = random.Random(f"{number} {chunks}").sample(FLEETS, len(FLEETS))
                samples += [_sample(kind, fleets[kind], prompt, chunks, number) for kind in order]
    return Measured(model=model, prompt_tokens=lengths, samples=samples)


def fleet_flags(kind: FleetKind, model: str, bench: OverlapBench, engine: EngineConfig) -> list[str]:
    """The flags of `launch local`. The fleets differ only in what is compared; each instance has the same number of threads."""
    return [
        f"--prefill={PREFILLS[kind]}",
        *to_flags(
            RouterConfig(heartbeat_s=HEARTBEAT_S),
            InstanceConfig(transport=bench.transport),
            ModelConfig(model=model),
            replace(engine, layer_groups=0) if kind == "page-wise" else engine,
            LogConfig(log_level="warning"),
        ),
    ]


def _checkpoint(model: str, bench: OverlapBench, engine: EngineConfig) -> contextlib.AbstractContextManager[str]:
    if model != RANDOM:
        return contextlib.nullcontext(model)
    return random_model(bench, context_tokens=(bench.lengths[-1] + 1) * engine.chunk_tokens)


def _prompt(tokens: int, vocab: int, number: int) -> list[int]:
    """A different prompt in each round, so that nothing of it is cached."""
    return random.Random(f"{number} {tokens}").choices(range(vocab), k=tokens)


def _sample(kind: FleetKind, fleet: Fleet, prompt: list[int], chunks: int, number: int) -> Sample:
    arrivals, counted = fleet.serve(prompt)
    return Sample(
        fleet=kind,
        chunks=chunks,
        round=number,
        first_token_s=arrivals.first_s,
        next_token_s=arrivals.last_s - arrivals.first_s,
        push_s=counted.push_seconds,
        exposed_s=counted.exposed_seconds,
        pushed_bytes=counted.bytes_pushed,
    )
