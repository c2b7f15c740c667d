"""The figures of a simulation, and their tables.

Owns what is reported, and in which words. All but the CPU times depends on nothing but the flags. Prints nothing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.ids import Role
from common.messages import Counters
from simulation.run import ClientFigures, Simulation

Lines = list[tuple[str, ...]]
ROLES: tuple[Role, ...] = ("prefill", "decode")
CPU_SHOWN_S = 0.005
"""Less is not shown."""


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles, in seconds."""

    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, seconds: Sequence[float] | NDArray[np.float64]) -> "Percentiles":
        """Zeros when there are none."""
        values = np.asarray(seconds, dtype=np.float64) if len(seconds) else np.zeros(1)
        return cls(*(float(value) for value in np.percentile(values, (50, 90, 99, 100))))


class Engines(msgspec.Struct, frozen=True, kw_only=True):
    """The instances of one role. busy_share: of their time, spent in steps. pages_mean, pages_most: share of KV pages in use, of
    all instances over the time that they lived, and of any instance at any moment. killed: instances."""

    role: Role
    instances: int
    steps: int
    busy_share: float
    pages_mean: float
    pages_most: float
    killed: int


class Caches(msgspec.Struct, frozen=True, kw_only=True):
    """The prefix caches of one role. tokens_asked, tokens_hit: of the prompts that were computed there, of all attempts.
    pages_asked, pages_hit: of the prompts that were handed over to it. pages_evicted: given to others."""

    role: Role
    tokens_asked: int
    tokens_hit: int
    pages_asked: int
    pages_hit: int
    pages_evicted: int


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """How well times to first tokens were predicted, where they were. error_s: whatever its sign. error_share: of the real time.
    mean_error_s: above 0 where first tokens came sooner than predicted."""

    answers: int
    predicted_s: Percentiles
    real_s: Percentiles
    error_s: Percentiles
    error_share: Percentiles
    mean_error_s: float


class TurnFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of one turn of all conversations, as far as they finished. prompt_tokens, cached_tokens, pushed_bytes: sums.
    turn: from 1."""

    turn: int
    answers: int
    first_token_s: Percentiles
    prompt_tokens: int
    cached_tokens: int
    pushed_bytes: int


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """Messages of one kind from one role to another, and the bytes of their frames."""

    kind: str
    sender: str
    receiver: str
    messages: int
    frame_bytes: int


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds of this machine that all processes of a role took together for one kind of work: a sample. Sockets are not
    part of it."""

    role: str
    work: str
    seconds: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation has found. seconds: simulated. cpu: the only part that differs from run to run.

    good_requests: answers that finished and kept to both limits. first_token_s: of answers that finished. between_tokens_s: of
    all answers. mean_between_tokens_s: one for each answer that finished. cut_short: conversations that ended before their last
    turn, because an answer failed or was refused.
    """

    seconds: float
    requests: int
    endings: dict[str, int]
    resumes: dict[str, int]
    preemptions: int
    first_token_s: Percentiles
    between_tokens_s: Percentiles
    mean_between_tokens_s: Percentiles
    good_requests: int
    slo_ttft_s: float
    slo_itl_s: float
    prompt_tokens: int
    tokens: int
    kv_bytes: int
    cut_short: int
    prediction: Prediction | None
    turns: tuple[TurnFigures, ...]
    caches: tuple[Caches, ...]
    engines: tuple[Engines, ...]
    messages: int
    frame_bytes: int
    ways: tuple[Way, ...]
    cpu: tuple[Cpu, ...]

    def cpu_share(self, role: str) -> float:
        """Of one core."""
        return sum(each.seconds for each in self.cpu if each.role == role) / self.seconds


def figures(simulation: Simulation) -> Figures:
    """Of a simulation that has run."""
    measured, fleet, load = simulation.measured, simulation.fleet, simulation.load
    good = np.less_equal(measured.first_s, load.slo_ttft_s) & np.less_equal(measured.pace_s, load.slo_itl_s)
    traffic, counters = fleet.network.traffic, {role: simulation.counters(role) for role in ROLES}
    ways = [
        Way(kind=kind, sender=sender, receiver=receiver, messages=tally.messages, frame_bytes=tally.frame_bytes)
        for (sender, kind, receiver), tally in traffic.by_way.items()
    ]
    return Figures(
        seconds=simulation.seconds,
        requests=sum(measured.endings.values()),
        endings=dict(sorted(measured.endings.items())),
        resumes=dict(sorted(Counter(str(reason) for reason in fleet.observer.resumes).items())),
        preemptions=sum(each.preemptions for role in ROLES for each in counters[role]),
        first_token_s=Percentiles.of(measured.first_s),
        between_tokens_s=Percentiles.of(measured.between_s),
        mean_between_tokens_s=Percentiles.of(measured.pace_s),
        good_requests=int(np.count_nonzero(good)),
        slo_ttft_s=load.slo_ttft_s,
        slo_itl_s=load.slo_itl_s,
        prompt_tokens=measured.prompt_tokens_asked,
        tokens=measured.tokens,
        kv_bytes=fleet.wires.bytes_written,
        cut_short=simulation.cut_short,
        prediction=_prediction(fleet.observer.predictions),
        turns=tuple(_turn(measured, turn) for turn in sorted(set(measured.turn))),
        caches=tuple(_caches(role, counters) for role in ROLES),
        engines=tuple(_engines(simulation, role) for role in ROLES),
        messages=traffic.messages,
        frame_bytes=traffic.frame_bytes,
        ways=tuple(sorted(ways, key=lambda way: (-way.frame_bytes, way.kind, way.sender, way.receiver))),
        cpu=tuple(
            Cpu(role=role, work=work, seconds=seconds)
            for role, meter in fleet.network.meters.items()
            for work, seconds in sorted(meter.seconds().items(), key=lambda item: -item[1])
        ),
    )


def _prediction(pairs: Sequence[tuple[float, float]]) -> Prediction | None:
    """Of predicted and real times. None: there are none."""
    if not pairs:
        return None
    predicted_s, real_s = np.asarray(pairs, dtype=np.float64).T
    error_s = predicted_s - real_s
    return Prediction(
        answers=len(pairs),
        predicted_s=Percentiles.of(predicted_s),
        real_s=Percentiles.of(real_s),
        error_s=Percentiles.of(np.abs(error_s)),
        error_share=Percentiles.of(np.abs(error_s) / real_s),
        mean_error_s=float(error_s.mean()),
    )


def _turn(measured: ClientFigures, turn: int) -> TurnFigures:
    its = np.equal(measured.turn, turn)
    sums = (int(np.asarray(each)[its].sum()) for each in (measured.prompt_tokens, measured.cached_tokens, measured.pushed_bytes))
    prompt_tokens, cached_tokens, pushed_bytes = sums
    return TurnFigures(
        turn=turn + 1,
        answers=int(np.count_nonzero(its)),
        first_token_s=Percentiles.of(np.asarray(measured.first_s)[its]),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        pushed_bytes=pushed_bytes,
    )


def _caches(role: Role, counters: Mapping[Role, Sequence[Counters]]) -> Caches:
    own = counters[role]
    spared = sum(each.pages_spared for other in ROLES if other != role for each in counters[other])
    return Caches(
        role=role,
        tokens_asked=sum(each.prompt_tokens_asked for each in own),
        tokens_hit=sum(each.prompt_tokens_hit for each in own),
        pages_asked=spared + sum(each.pages_received for each in own),
        pages_hit=spared,
        pages_evicted=sum(each.pages_evicted for each in own),
    )


def _engines(simulation: Simulation, role: Role) -> Engines:
    plan, fleet, work = simulation.plan, simulation.fleet, simulation.fleet.work[role]
    for living in fleet.instances.values():
        living.page_use.look(fleet.clock.now)
    lives = [each.page_use for each in fleet.lives if each.name.role == role]
    page_s = plan.kv_pages * sum(each.seconds for each in lives)
    instances = plan.prefill if role == "prefill" else plan.decode
    return Engines(
        role=role,
        instances=instances,
        steps=work.steps,
        busy_share=work.busy_s / (simulation.seconds * max(1, instances)),
        pages_mean=sum(each.page_s for each in lives) / page_s if page_s else 0.0,
        pages_most=max((each.most for each in lives), default=0.0),
        killed=simulation.killed[role],
    )


# --- tables ----------------------------------------------------------------------------------------------------------------


def tables(found: Figures) -> list[tuple[str, Lines]]:
    """Titles and lines; the first line of each is its head."""
    return [
        ("Requests", _requests(found)),
        ("Time, ms", _times(found)),
        *([("Time to first token, ms, and its prediction", _predictions(found.prediction))] if found.prediction else []),
        *([("Turns", _turns(found))] if len(found.turns) > 1 else []),
        ("Prefix caches", _cache_lines(found)),
        ("Instances", _instances(found)),
        (f"Control plane: {found.messages} messages, {_rate(found.frame_bytes / found.seconds)} in all", _messages(found)),
        ("CPU of this machine, without sockets, in simulated time", _cpu(found)),
    ]


def _requests(found: Figures) -> Lines:
    share = found.good_requests / max(1, found.requests)
    kept = f"first token within {found.slo_ttft_s:g} s and {1e3 * found.slo_itl_s:g} ms a token"
    lines: Lines = [("", ""), ("simulated", f"{found.seconds:.1f} s")]
    lines += [(f"ended: {how}", str(count)) for how, count in found.endings.items()]
    lines += [(f"resumed: {why}", str(count)) for why, count in found.resumes.items()]
    return [
        *lines,
        (f"goodput: {kept}", f"{share:.1%}, {found.good_requests / found.seconds:.2f} requests/s"),
        ("prompt tokens", f"{found.prompt_tokens} ({found.prompt_tokens / found.seconds:.0f}/s)"),
        ("answer tokens", f"{found.tokens} ({found.tokens / found.seconds:.0f}/s)"),
        ("KV pushed", _rate(found.kv_bytes / found.seconds)),
        ("preemptions", str(found.preemptions)),
        *([("conversations that ended before their last turn", str(found.cut_short))] if found.cut_short else []),
    ]


def _times(found: Figures) -> Lines:
    named = (
        ("time to first token", found.first_token_s),
        ("between two tokens", found.between_tokens_s),
        ("mean between tokens of an answer", found.mean_between_tokens_s),
    )
    shown = [(name, *(f"{1e3 * value:.1f}" for value in (t.p50, t.p90, t.p99, t.most))) for name, t in named]
    return [("", "p50", "p90", "p99", "most"), *shown]


def _predictions(found: Prediction) -> Lines:
    named = (("predicted", found.predicted_s), ("real", found.real_s), ("error, whatever its sign", found.error_s))
    lines: Lines = [("", "p50", "p90", "p99", "most")]
    lines += [(name, *(f"{1e3 * value:.1f}" for value in (t.p50, t.p90, t.p99, t.most))) for name, t in named]
    share = found.error_share
    return [*lines, ("error / real", *(f"{value:.1%}" for value in (share.p50, share.p90, share.p99, share.most)))]


def _turns(found: Figures) -> Lines:
    lines: Lines = [("turn", "answers", "first token, ms: p50", "p99", "prompt tokens", "not computed", "KV pushed each, MB")]
    return lines + [
        (
            str(each.turn),
            str(each.answers),
            f"{1e3 * each.first_token_s.p50:.1f}",
            f"{1e3 * each.first_token_s.p99:.1f}",
            f"{each.prompt_tokens / each.answers:.0f}",
            f"{each.cached_tokens / each.prompt_tokens:.1%}",
            f"{each.pushed_bytes / each.answers / 1e6:.1f}",
        )
        for each in found.turns
    ]


def _cache_lines(found: Figures) -> Lines:
    """What was found in them of prompts to be computed there, in tokens, and of prompts handed over, in pages."""
    lines: Lines = [("role", "tokens to compute", "found", "share", "pages to push here", "found", "share", "pages evicted")]
    return lines + [
        (
            each.role,
            str(each.tokens_asked),
            str(each.tokens_hit),
            _share(each.tokens_hit, each.tokens_asked),
            str(each.pages_asked),
            str(each.pages_hit),
            _share(each.pages_hit, each.pages_asked),
            str(each.pages_evicted),
        )
        for each in found.caches
    ]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _instances(found: Figures) -> Lines:
    lines: Lines = [("role", "instances", "busy", "pages in use, mean", "at most in one", "steps", "killed")]
    return lines + [
        (
            each.role,
            str(each.instances),
            f"{each.busy_share:.1%}",
            f"{each.pages_mean:.1%}",
            f"{each.pages_most:.1%}",
            str(each.steps),
            str(each.killed),
        )
        for each in found.engines
    ]


def _messages(found: Figures) -> Lines:
    lines: Lines = [("message", "from", "to", "messages/s", "bytes/s", "bytes each")]
    return lines + [
        (
            way.kind,
            way.sender,
            way.receiver,
            f"{way.messages / found.seconds:.2f}",
            f"{way.frame_bytes / found.seconds:.0f}",
            f"{way.frame_bytes / way.messages:.0f}",
        )
        for way in found.ways
    ]


def _cpu(found: Figures) -> Lines:
    """The router and the detokenizer by what they do; an instance as a whole."""
    lines: Lines = [("process", "work", "CPU seconds", "share of a core")]
    for role in ("router", "detokenizer"):
        lines.append((role, "all", f"{found.cpu_share(role) * found.seconds:.2f}", f"{found.cpu_share(role):.3%}"))
        shown = [each for each in found.cpu if each.role == role and each.seconds >= CPU_SHOWN_S]
        lines += [("", each.work, f"{each.seconds:.2f}", f"{each.seconds / found.seconds:.3%}") for each in shown]
    for engines in found.engines:
        share = found.cpu_share(engines.role) / max(1, engines.instances)
        lines.append((f"{engines.role}, mean of {engines.instances}", "all", f"{share * found.seconds:.2f}", f"{share:.3%}"))
    return lines


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.2f} MB/s"
