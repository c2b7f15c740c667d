"""The figures of a simulation, and their tables.

Owns what is reported, and in which words. All but the CPU times depends on nothing but the flags. Prints nothing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.ids import ROLES, Role
from simulation.run import ClientFigures, Simulation

Lines = list[tuple[str, ...]]
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

    def shown(self, name: str, unit: str = "") -> tuple[str, ...]:
        """A line of a table, in milliseconds, or with the unit % as shares."""
        return name, *(f"{value:.1%}" if unit else f"{1e3 * value:.1f}" for value in msgspec.structs.astuple(self))


PERCENTILES_HEAD = ("", "p50", "p90", "p99", "most")


class Engines(msgspec.Struct, frozen=True, kw_only=True):
    """The instances of one role."""

    role: Role
    instances: int
    steps: int
    busy_share: float
    """The share of their time that they spent in steps."""
    pages_mean: float
    """The share of KV pages in use, of all instances over the time that they lived."""
    pages_most: float
    """The largest share of any instance at any moment."""
    killed: int
    """Instances that were killed."""


class Caches(msgspec.Struct, frozen=True, kw_only=True):
    """The prefix caches of one role."""

    role: Role
    tokens_asked: int
    """Tokens of the prompts that were computed there, of all attempts."""
    tokens_hit: int
    """Those of them that were in the cache."""
    pages_asked: int
    """Pages of the prompts that were handed over to it."""
    pages_hit: int
    """Those of them that were in the cache."""
    pages_evicted: int
    """Cached pages that were given to others."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """How well times to first tokens were predicted, where they were."""

    answers: int
    predicted_s: Percentiles
    real_s: Percentiles
    error_s: Percentiles
    """The size of the error, whatever its sign."""
    error_share: Percentiles
    """The same as a share of the real time."""
    mean_error_s: float
    """Above 0 where first tokens came sooner than predicted."""


class TurnFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of one turn of all conversations, as far as they finished, with the sums of their tokens and bytes."""

    turn: int
    """The number of the turn, from 1."""
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
    """CPU seconds of this machine that all processes of a role took together for one kind of work: a sample, without sockets."""

    role: str
    work: str
    seconds: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation has found."""

    seconds: float
    """Simulated seconds."""
    requests: int
    endings: dict[str, int]
    resumes: dict[str, int]
    preemptions: int
    first_token_s: Percentiles
    """Over answers that finished."""
    between_tokens_s: Percentiles
    """Over all answers."""
    mean_between_tokens_s: Percentiles
    """Over answers that finished: the mean of each."""
    answer_s: Percentiles
    """Over answers that finished: seconds until the last token."""
    good_requests: int
    """Answers that finished and kept to both limits."""
    slo_ttft_s: float
    slo_itl_s: float
    prompt_tokens: int
    tokens: int
    kv_bytes: int
    cut_short: int
    """Conversations that ended before their last turn, because an answer failed or was refused."""
    prediction: Prediction | None
    turns: tuple[TurnFigures, ...]
    caches: tuple[Caches, ...]
    engines: tuple[Engines, ...]
    messages: int
    frame_bytes: int
    ways: tuple[Way, ...]
    cpu: tuple[Cpu, ...]
    """The only part that differs from run to run."""

    def cpu_share(self, role: str) -> float:
        """The share of one core that the processes of a role took."""
        return sum(each.seconds for each in self.cpu if each.role == role) / self.seconds


def figures(simulation: Simulation) -> Figures:
    """The figures of a simulation that has run."""
    measured, fleet, load = simulation.measured, simulation.fleet, simulation.load
    network = fleet.network
    ways = [
        Way(kind=way[1], sender=way[0], receiver=way[2], messages=messages, frame_bytes=network.frame_bytes[way])
        for way, messages in network.messages.items()
    ]
    return Figures(
        seconds=simulation.seconds,
        requests=measured.endings.total(),
        endings=dict(sorted(measured.endings.items())),
        resumes=dict(sorted(Counter(str(reason) for reason in fleet.observer.resumes).items())),
        preemptions=sum(each.preemptions for role in ROLES for each in simulation.counters(role)),
        first_token_s=Percentiles.of(measured.first_s),
        between_tokens_s=Percentiles.of(measured.between_s),
        mean_between_tokens_s=Percentiles.of(measured.pace_s),
        answer_s=Percentiles.of(measured.answer_s),
        good_requests=simulation.good,
        slo_ttft_s=load.slo_ttft_s,
        slo_itl_s=load.slo_itl_s,
        prompt_tokens=measured.prompt_tokens_asked,
        tokens=measured.tokens,
        kv_bytes=fleet.wires.bytes_written,
        cut_short=simulation.cut_short,
        prediction=_prediction(fleet.observer.predictions),
        turns=tuple(_turn(measured, turn) for turn in sorted(set(measured.turn))),
        caches=tuple(_caches(simulation, role) for role in ROLES),
        engines=tuple(_engines(simulation, role) for role in ROLES),
        messages=network.messages.total(),
        frame_bytes=network.frame_bytes.total(),
        ways=tuple(sorted(ways, key=lambda way: (-way.frame_bytes, way.kind, way.sender, way.receiver))),
        cpu=tuple(
            Cpu(role=role, work=work, seconds=seconds)
            for role, meter in network.meters.items()
            for work, seconds in sorted(meter.seconds().items(), key=lambda item: -item[1])
        ),
    )


def _prediction(pairs: Sequence[tuple[float, float]]) -> Prediction | None:
    """pairs: predicted and real times. None: there are none."""
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
    is_of_turn = np.equal(measured.turn, turn)
    return TurnFigures(
        turn=turn + 1,
        answers=int(np.count_nonzero(is_of_turn)),
        first_token_s=Percentiles.of(np.asarray(measured.first_s)[is_of_turn]),
        prompt_tokens=int(np.asarray(measured.prompt_tokens)[is_of_turn].sum()),
        cached_tokens=int(np.asarray(measured.cached_tokens)[is_of_turn].sum()),
        pushed_bytes=int(np.asarray(measured.pushed_bytes)[is_of_turn].sum()),
    )


def _caches(simulation: Simulation, role: Role) -> Caches:
    counters = simulation.counters(role)
    spared = sum(each.pages_spared for each in simulation.counters("decode" if role == "prefill" else "prefill"))
    return Caches(
        role=role,
        tokens_asked=sum(each.prompt_tokens_asked for each in counters),
        tokens_hit=sum(each.prompt_tokens_hit for each in counters),
        pages_asked=spared + sum(each.pages_received for each in counters),
        pages_hit=spared,
        pages_evicted=sum(each.pages_evicted for each in counters),
    )


def _engines(simulation: Simulation, role: Role) -> Engines:
    plan, fleet = simulation.plan, simulation.fleet
    for living in fleet.instances.values():
        living.page_use.look(fleet.clock.now)
    lives = [each.page_use for each in fleet.lives if each.name.role == role]
    page_s = plan.kv_pages * sum(each.seconds for each in lives)
    instances = plan.prefill if role == "prefill" else plan.decode
    return Engines(
        role=role,
        instances=instances,
        steps=fleet.steps[role],
        busy_share=fleet.busy_s[role] / (simulation.seconds * max(1, instances)),
        pages_mean=sum(each.page_s for each in lives) / page_s if page_s else 0.0,
        pages_most=max((each.most for each in lives), default=0.0),
        killed=simulation.killed[role],
    )


# --- tables ----------------------------------------------------------------------------------------------------------------


def tables(found: Figures) -> list[tuple[str, Lines]]:
    """Titles and lines; the first line of each is its head."""
    times = [
        found.first_token_s.shown("time to first token"),
        found.between_tokens_s.shown("between two tokens"),
        found.mean_between_tokens_s.shown("mean between tokens of an answer"),
        found.answer_s.shown("whole answer"),
    ]
    shown = [("Requests", _requests(found)), ("Time, ms", [PERCENTILES_HEAD, *times])]
    if found.prediction:
        shown.append(("Time to first token, ms, and its prediction", _predictions(found.prediction)))
    if len(found.turns) > 1:
        shown.append(("Turns", _turns(found.turns)))
    title = f"Control plane: {found.messages} messages, {_rate(found.frame_bytes / found.seconds)} in all"
    return [
        *shown,
        ("Prefix caches", _cache_lines(found.caches)),
        ("Instances", _instances(found.engines)),
        (title, _messages(found.ways, found.seconds)),
        ("CPU of this machine, without sockets, in simulated time", _cpu(found)),
    ]


def _requests(found: Figures) -> Lines:
    share = found.good_requests / max(1, found.requests)
    limits = f"first token within {found.slo_ttft_s:g} s and {1e3 * found.slo_itl_s:g} ms a token"
    lines: Lines = [("", ""), ("simulated", f"{found.seconds:.1f} s")]
    lines += [(f"ended: {how}", str(count)) for how, count in found.endings.items()]
    lines += [(f"resumed: {why}", str(count)) for why, count in found.resumes.items()]
    lines += [
        (f"goodput: {limits}", f"{share:.1%}, {found.good_requests / found.seconds:.2f} requests/s"),
        ("prompt tokens", f"{found.prompt_tokens} ({found.prompt_tokens / found.seconds:.0f}/s)"),
        ("answer tokens", f"{found.tokens} ({found.tokens / found.seconds:.0f}/s)"),
        ("KV pushed", _rate(found.kv_bytes / found.seconds)),
        ("preemptions", str(found.preemptions)),
    ]
    if found.cut_short:
        lines.append(("conversations that ended before their last turn", str(found.cut_short)))
    return lines


def _predictions(found: Prediction) -> Lines:
    return [
        PERCENTILES_HEAD,
        found.predicted_s.shown("predicted"),
        found.real_s.shown("real"),
        found.error_s.shown("error, whatever its sign"),
        found.error_share.shown("error / real", "%"),
    ]


def _turns(turns: Iterable[TurnFigures]) -> Lines:
    lines: Lines = [("turn", "answers", "first token, ms: p50", "p99", "prompt tokens", "not computed", "KV pushed each, MB")]
    for each in turns:
        first, p99 = f"{1e3 * each.first_token_s.p50:.1f}", f"{1e3 * each.first_token_s.p99:.1f}"
        prompt, cached = f"{each.prompt_tokens / each.answers:.0f}", _share(each.cached_tokens, each.prompt_tokens)
        pushed = f"{each.pushed_bytes / each.answers / 1e6:.1f}"
        lines.append((str(each.turn), str(each.answers), first, p99, prompt, cached, pushed))
    return lines


def _cache_lines(caches: Iterable[Caches]) -> Lines:
    """What was found in them of prompts to be computed there, in tokens, and of prompts handed over, in pages."""
    lines: Lines = [("role", "tokens to compute", "found", "share", "pages to push here", "found", "share", "pages evicted")]
    for each in caches:
        tokens = str(each.tokens_asked), str(each.tokens_hit), _share(each.tokens_hit, each.tokens_asked)
        pages = str(each.pages_asked), str(each.pages_hit), _share(each.pages_hit, each.pages_asked)
        lines.append((each.role, *tokens, *pages, str(each.pages_evicted)))
    return lines


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _instances(engines: Iterable[Engines]) -> Lines:
    lines: Lines = [("role", "instances", "busy", "pages in use, mean", "at most in one", "steps", "killed")]
    for each in engines:
        shares = (f"{share:.1%}" for share in (each.busy_share, each.pages_mean, each.pages_most))
        lines.append((each.role, str(each.instances), *shares, str(each.steps), str(each.killed)))
    return lines


def _messages(ways: Iterable[Way], seconds: float) -> Lines:
    lines: Lines = [("message", "from", "to", "messages/s", "bytes/s", "bytes each")]
    for way in ways:
        rates = f"{way.messages / seconds:.2f}", f"{way.frame_bytes / seconds:.0f}", f"{way.frame_bytes / way.messages:.0f}"
        lines.append((way.kind, way.sender, way.receiver, *rates))
    return lines


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
