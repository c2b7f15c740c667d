"""The report: the run in numbers, and how long clients waited when something was struck.

Owns the tables. Judges nothing.

Which instance serves a stream cannot be seen from outside. A stream that was on an instance when it was killed or stopped waits
until the router knows: so a gap that spans the moment, and is as long as that takes at least, is one of those.

    kill    the connection breaks, and two heartbeats pass, or the next life of the instance registers; a rank that is not
            rank 0: its leader says goodbye when the host refuses connections to it
    stop    --dead-after-s pass since the last heartbeat, or the instance goes on
    term    nothing waits for the drain to end: the longest gap of every stream that was open meanwhile counts
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.chaos.checks import Difference
from tests.chaos.faults import KINDS, Fault
from tests.chaos.fleet import Shape
from tests.rig.client import Answer, Gap
from tests.rig.report import percentile

AFTER_S = 1.0
"""What waited for an instance goes on within this of when its loss is known."""
REFUSED_S = 0.3
"""A host refuses connections to a process that is gone no earlier."""
LONGEST = 8
"""Gaps that are listed."""
HEADER = f"{'gaps between tokens, s':<44} {'streams':>8} {'median':>8} {'p90':>8} {'worst':>8}"
LATENCY_HEADER = f"{'heartbeat-s':>11} {'dead-after-s':>12} {'kills':>6} " + " ".join(
    f"{name:>16}" for name in ("resumed streams", "median", "p90", "worst", "others: p90", "others: worst")
)


@dataclass(slots=True)
class Outcome:
    """What a run brought. reference: answers without faults; answers: under faults. seconds: that the faults took."""

    shape: Shape
    reference: list[Answer] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    resumes: Counter[str] = field(default_factory=Counter)
    most_attempts: float = 0.0
    seconds: float = 0.0
    differences: list[Difference] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """What clients saw that they should not."""
    problems: list[str] = field(default_factory=list)
    """Everything else that is wrong."""

    @property
    def is_good(self) -> bool:
        return not self.errors and not self.problems and all(difference.is_right for difference in self.differences)


def summary(outcome: Outcome) -> Iterator[str]:
    """The lines of the table."""
    answers, shape = outcome.answers, outcome.shape
    counts = Counter((fault.kind, fault.role) for fault in outcome.faults)
    faults = ", ".join(f"{kind} {role} {count}" for (kind, role), count in sorted(counts.items()))
    wrong = sum(not difference.is_right for difference in outcome.differences)
    tokens = sum(answer.tokens for answer in answers)
    resumes = ", ".join(f"{reason} {count}" for reason, count in sorted(outcome.resumes.items()))
    rows = {
        "fleet": f"{shape.prefill} prefill, {shape.decode} decode" + (f", --tp {shape.tp}" if shape.tp > 1 else ""),
        "heartbeats": f"every {shape.heartbeat_s:g} s, dead after {shape.dead_after_s:g} s",
        "faults": f"{len(outcome.faults)} in {outcome.seconds:.0f} s ({faults})",
        "requests, choices, tokens": f"{len(answers)}, {sum(len(answer.choices) for answer in answers)}, {tokens}",
        "resumes": f"{outcome.resumes.total()} ({resumes})",
        "most attempts of a request": f"at most {outcome.most_attempts:g}",
        "errors that clients saw": str(len(outcome.errors)),
        "answers that differ": f"{len(outcome.differences)}, of which {wrong} are wrong and the others near ties",
        "other problems": str(len(outcome.problems)),
    }
    yield from (f"{name:<28} {value}" for name, value in rows.items())
    yield ""
    yield from latencies(outcome)
    yield ""
    yield from longest(outcome)


def latencies(outcome: Outcome) -> Iterator[str]:
    yield HEADER
    for role, kind in itertools.product(("decode", "prefill"), KINDS):
        faults = [fault for fault in outcome.faults if (fault.role, fault.kind) == (role, kind)]
        if faults:
            what = "every stream open in a drain" if kind == "term" else "streams that waited for it"
            yield _row(f"{role} {kind} ({len(faults)}): {what}", [gap.seconds for gap in disturbed(outcome, faults)])
    yield _row("longest of each undisturbed stream", undisturbed(outcome))
    if outcome.reference:
        yield _row("longest of each stream without faults", _longest(outcome.reference))


def longest(outcome: Outcome) -> Iterator[str]:
    """The longest gaps of all, and the faults that they may come from, for whoever looks for the cause in the logs."""
    began_s = min((fault.at_s for fault in outcome.faults), default=0.0)
    gaps = [(gap, answer) for answer in outcome.answers for gaps in answer.gaps() for gap in gaps]
    for gap, answer in sorted(gaps, key=lambda pair: pair[0].seconds, reverse=True)[:LONGEST]:
        near = [fault for fault in outcome.faults if gap.overlaps(*_unknown(fault, outcome.shape))]
        causes = ", ".join(f"{fault} at {fault.at_s - began_s:.1f}" for fault in near)
        what = "first token" if gap.is_first else "next token"
        times = f"{gap.start_s - began_s:.1f} to {gap.end_s - began_s:.1f} ({gap.seconds:.1f} s)"
        yield f"request {answer.request.number} waited for its {what} from {times}; {causes or 'no fault'}"


def latency_line(outcome: Outcome) -> str:
    """One line of the table that compares settings."""
    gaps, others = [gap.seconds for gap in disturbed(outcome, outcome.faults)], undisturbed(outcome)
    shape = outcome.shape
    values = (percentile(gaps, 0.5), percentile(gaps, 0.9), percentile(gaps, 1), percentile(others, 0.9), percentile(others, 1))
    numbers = " ".join(f"{value:>16.2f}" for value in values)
    return f"{shape.heartbeat_s:>11g} {shape.dead_after_s:>12g} {len(outcome.faults):>6} {len(gaps):>16} {numbers}"


def disturbed(outcome: Outcome, faults: Sequence[Fault]) -> list[Gap]:
    """The gaps that these faults made."""
    return [gap for fault in faults for answer in outcome.answers for gap in _gaps_of(answer, fault, outcome.shape)]


def undisturbed(outcome: Outcome) -> list[float]:
    """The longest gap of each choice at times when the router knew of everyone who was away."""
    return _longest(outcome.answers, [_unknown(fault, outcome.shape) for fault in outcome.faults])


def _gaps_of(answer: Answer, fault: Fault, shape: Shape) -> list[Gap]:
    """Those of an answer that this fault made. Before a first token only a prefill instance is waited for."""
    made = []
    for gaps in answer.gaps():
        counted = [gap for gap in gaps if fault.role == "prefill" or not gap.is_first]
        if fault.kind == "term":
            meanwhile = (gap for gap in counted if gap.overlaps(*_unknown(fault, shape)))
            made += sorted(meanwhile, key=lambda gap: gap.seconds)[-1:]
        else:
            spanning = (gap for gap in counted if gap.start_s <= fault.at_s < gap.end_s)
            made += [gap for gap in spanning if gap.end_s >= _known_s(fault, shape)]
    return made


def _known_s(fault: Fault, shape: Shape) -> float:
    """When the router knows at the earliest that the victim was killed or stopped. A stop may count from two heartbeats before,
    for a busy machine beats late."""
    beats_s = 2 * shape.heartbeat_s
    killed_s = beats_s if fault.rank == 0 else REFUSED_S
    alone_s = fault.at_s + (killed_s if fault.kind == "kill" else shape.dead_after_s - beats_s)
    return min(alone_s, fault.back_s)


def _unknown(fault: Fault, shape: Shape) -> tuple[float, float]:
    """From when to when something may wait for the victim."""
    return fault.at_s, (fault.over_s if fault.kind == "term" else fault.at_s + shape.dead_after_s) + AFTER_S


def _longest(answers: Sequence[Answer], without: Sequence[tuple[float, float]] = ()) -> list[float]:
    """The longest gap of each choice after its first token, of those that overlap none of these times."""
    of_choices = ([gap for gap in choice if not gap.is_first] for answer in answers for choice in answer.gaps())
    quiet = ([gap.seconds for gap in gaps if not any(gap.overlaps(*time) for time in without)] for gaps in of_choices)
    return [max(gaps) for gaps in quiet if gaps]


def _row(name: str, seconds: Sequence[float]) -> str:
    numbers = " ".join(f"{percentile(seconds, share):>8.2f}" for share in (0.5, 0.9, 1.0))
    return f"{name:<44} {len(seconds):>8} {numbers}"
