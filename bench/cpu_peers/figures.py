"""What came of each turn, and whether Tandem is ahead of each peer of the same precision.

Owns the figures and the goals. Pure: measures and prints nothing.
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from bench.client import TimedAnswer
from bench.cpu_peers.engines import ENGINES, Tandem
from bench.report import BenchOutcome, Goal, Spread
from bench.serve import times_ms

AHEAD = {"openvino": 1.1, "transformers-cb": 4.0}
"""How many times a peer's output tokens/s Tandem must make. All others: more than once."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """An engine in one round. seconds: from the first sending to the last token. memory_gb: 10^9 bytes, of all its processes
    after the load; what several of them map is shared out among them. start_s: until it was ready, with the model loaded."""

    engine: str
    round: int
    seconds: float
    output_tokens_per_s: float
    ttft_p50_ms: float
    itl_p50_ms: float
    itl_p95_ms: float
    memory_gb: float
    start_s: float

    @classmethod
    def of(cls, engine: str, round_number: int, answers: Sequence[TimedAnswer], memory_gb: float, start_s: float) -> "Turn":
        """answers: whole."""
        seconds = max(answer.token_s for answer in answers) - min(answer.sent_s for answer in answers)
        times = times_ms(answers)
        itl_p50, itl_p95 = np.percentile(times["itl"], (50, 95)).tolist() if len(times["itl"]) else (0.0, 0.0)
        return cls(
            engine=engine,
            round=round_number,
            seconds=seconds,
            output_tokens_per_s=sum(answer.counted for answer in answers) / seconds,
            ttft_p50_ms=float(np.median(times["ttft"])),
            itl_p50_ms=itl_p50,
            itl_p95_ms=itl_p95,
            memory_gb=memory_gb,
            start_s=start_s,
        )


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A turn without figures."""

    engine: str
    round: int
    reason: str


class CpuPeersOutcome(BenchOutcome, frozen=True, kw_only=True):
    """All that is known at the end of `launch bench cpu-peers`. engines: in order. versions: of the peers' packages."""

    shape: str
    requests: int
    prompt_tokens: int
    answer_tokens: int
    threads: int
    rounds: int
    engines: list[str]
    versions: dict[str, str]
    turns: list[Turn]
    failures: list[Failure]

    def of(self, engine: str) -> list[Turn]:
        return [turn for turn in self.turns if turn.engine == engine]


def lead(turns: Sequence[Turn], engine: str) -> Spread | None:
    """The output tokens/s of colocated Tandem in the engine's precision, in those of the engine, round by round: what changes
    about the machine between rounds cancels out. None where they have no round in common."""
    rates = {(turn.engine, turn.round): turn.output_tokens_per_s for turn in turns}
    own = _tandem_of(engine)
    shares = [rates[own, each] / rate for (name, each), rate in rates.items() if name == engine and (own, each) in rates]
    return Spread.of(shares) if shares else None


def judge(engines: Sequence[str], turns: Sequence[Turn]) -> Iterator[Goal]:
    """One goal for each peer that took part beside Tandem of its precision."""
    for name in engines:
        if isinstance(ENGINES[name], Tandem) or _tandem_of(name) not in engines:
            continue
        least, found = AHEAD.get(name, 1.0), lead(turns, name)
        times = f"at least {least:g}" if least > 1 else "more than 1"
        yield Goal(
            rule=f"{_tandem_of(name)}: {times} times the output tokens/s of {name}",
            met=None if found is None else (found.median >= least if least > 1 else found.median > 1),
            figure="not measured" if found is None else f"{found.median:.2f} times",
        )


def _tandem_of(engine: str) -> str:
    """The colocated layout of the same precision."""
    precision = ENGINES[engine].precision
    return next(
        each.name for each in ENGINES.values() if isinstance(each, Tandem) and not each.separate and each.precision == precision
    )
