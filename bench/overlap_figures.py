"""What was measured of fleets: one sample for each request, pairs of samples from one round, and whether the goals are met.

Owns the figures and the goals. Measures and prints nothing.
"""

from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

from bench.overlap_plan import FleetKind
from bench.report import BenchOutcome, Goal

MANY_CHUNKS = 8
MOST_EXPOSED = {1: 50, MANY_CHUNKS: 10}
"""Per cent of a prompt's transfer that may be exposed, by the prompt's chunks."""
SLOWER_BY, LATER_S = 0.03, 0.002
"""By how much a first token may come later than from a colocated instance: a share of its time, and a constant."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request, while its fleet has no other.

    first_token_s: from the client's request to its first token. next_token_s: from there to the second one. push_s: how long its
    pushes took, added up. exposed_s: from its first token to its handoff, on the prefill instance. Without one all three are 0.
    """

    fleet: FleetKind
    chunks: int
    round: int
    first_token_s: float
    next_token_s: float
    push_s: float
    exposed_s: float
    pushed_bytes: int


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A model in all fleets. prompt_tokens: of a prompt of so many chunks."""

    model: str
    prompt_tokens: dict[int, int]
    samples: list[Sample]

    def of(self, fleet: FleetKind, chunks: int) -> list[Sample]:
        """In the order of the rounds."""
        found = (sample for sample in self.samples if (sample.fleet, sample.chunks) == (fleet, chunks))
        return sorted(found, key=lambda sample: sample.round)

    def pairs(self, fleet: FleetKind, other: FleetKind, chunks: int) -> list[tuple[Sample, Sample]]:
        """Samples of one round, which have seen nearly the same noise."""
        return list(zip(self.of(fleet, chunks), self.of(other, chunks), strict=True))


class OverlapOutcome(BenchOutcome, frozen=True, kw_only=True):
    """All that is known at the end of `launch bench overlap`. threads: of each instance."""

    transport: str
    threads: int
    models: list[Measured]


def exposed_share(sample: Sample) -> float:
    """Of the transfer of a request that was handed off."""
    return sample.exposed_s / sample.push_s


def judge(models: Sequence[Measured]) -> list[Goal]:
    """The median of the requests decides, of the pairs of one round where two fleets are compared."""
    return [goal for measured in models for goal in (*_exposed_goals(measured), *_first_token_goals(measured))]


def _exposed_goals(measured: Measured) -> Iterator[Goal]:
    for chunks, limit in MOST_EXPOSED.items():
        shares = [100 * exposed_share(sample) for sample in measured.of("layer-wise", chunks)]
        yield Goal(
            rule=f"{measured.model}: at most {limit} % of the transfer of a prompt of {_chunks(chunks)} is exposed",
            met=median(shares) <= limit if shares else None,
            figure=f"{median(shares):.1f} %" if shares else "not measured",
        )


def _first_token_goals(measured: Measured) -> Iterator[Goal]:
    for chunks in measured.prompt_tokens:
        pairs = measured.pairs("layer-wise", "colocated", chunks)
        times = [(ours.first_token_s, theirs.first_token_s) for ours, theirs in pairs]
        yield Goal(
            rule=f"{measured.model}: the first token of a prompt of {_chunks(chunks)} within {100 * SLOWER_BY:g} % + "
            f"{1e3 * LATER_S:g} ms of a colocated instance's",
            met=median(ours - (1 + SLOWER_BY) * theirs - LATER_S for ours, theirs in times) <= 0,
            figure=f"{1e3 * median(ours - theirs for ours, theirs in times):+.1f} ms, "
            f"{100 * median(ours / theirs - 1 for ours, theirs in times):+.1f} %",
        )


def _chunks(count: int) -> str:
    return "one chunk" if count == 1 else f"{count} chunks"
