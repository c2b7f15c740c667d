"""What a fleet of so many prefill and decode instances can serve, and which change makes it serve more.

Owns the arithmetic and the choice. One unit, *headroom*: how many times the present load keeps both time limits. Pure: figures
in, a choice with its reason out. Does not know who reports, who acts or what time it is.

A closed form, not a simulation: a choice takes milliseconds for a hundred instances, the same figures make the same choice, and
a person can check the reason with a pencil. It leaves out what averages out over the seconds that a choice is for.

    prefill   first tokens   prompts wait in one line for n instances. P(wait > t) = rho^(sqrt(2(n+1))-1) * exp(-n(1-rho)t/S),
                             S: the seconds of a prompt, rho: the busy share (Sakasegawa 1977; exact for one instance)
    decode    next tokens    rows = tokens/s * seconds of a step, and a step takes step_s + rows * (decode_row_s + what one
                             holds * held_token_s); rows must fit the time limit, the batch and the memory, and vary as a
                             Poisson number does
    decode alone             computes prompts too: each instance has a line of its own, because a request stays where it was
                             sent, and what prompts take of the time makes steps longer, VARIES times that for some answers
    both                     the better of the two. A mix of them serves up to a fifth more (simulated), which is not counted
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from common.ids import Role, ServingRole
from launch.fleet_options import ScalingConfig
from router.scaling import ScalingAction

GOOD_SHARE = 0.9
"""Time limits are kept for at least this share of the requests."""
DEVIATIONS = 1.28
"""So many standard deviations above the mean lie all but the rest of them."""
MOST = 16.0
"""A headroom above this says nothing more."""
VARIES = 2.0
"""Where prompts are computed beside rows, the slowest answers but GOOD_SHARE have steps so many times as long as the mean."""
SCARCE, ENOUGH, AMPLE = 1.1, 1.5, 1.8
"""With less headroom than the first even the best division of the instances needs one more. With less than the second roles may
change. With more than the third in a fleet of one less, one may go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDemand:
    """What comes, and what one instance makes of it."""

    requests_per_s: float
    """Those that wait count as if they had come within some seconds."""
    prompt_tokens: float
    """Prompt tokens of one, without those that are cached."""
    answer_tokens_per_s: float
    held_tokens: float
    """Tokens of KV that one holds while it decodes."""
    prompt_step_s: float
    """Seconds of a step of an instance that computes prompts."""
    chunk_token_s: float
    step_s: float
    """Seconds of a decode step, without its rows."""
    decode_row_s: float
    held_token_s: float = 0.0
    """Seconds that each token adds which a row holds."""
    capacity_tokens: float
    """Tokens of KV that one decode instance holds."""
    max_running: float
    """Requests that it computes at once."""
    backlog_per_s: float = 0.0
    """The part of `requests_per_s` that waits already, and will be over."""
    backlog_tokens_per_s: float = 0.0
    """The same part of `answer_tokens_per_s`."""

    @property
    def lasting(self) -> Self:
        """What comes, without what waits."""
        requests_per_s = self.requests_per_s - self.backlog_per_s
        answer_tokens_per_s = self.answer_tokens_per_s - self.backlog_tokens_per_s
        return replace(self, requests_per_s=requests_per_s, answer_tokens_per_s=answer_tokens_per_s)


@dataclass(frozen=True, slots=True)
class ScalingChoice:
    """What to do with an instance, or with several."""

    action: ScalingAction
    reason: str
    role: ServingRole | None = None
    """The instance's role from now on, or that of the one that goes."""
    count: int = 1
    """How many instances change their role."""


def prefill_serves(demand: FleetDemand, times: float, instances: int, slo_ttft_s: float) -> bool:
    """Whether enough first tokens of so many times the load come in time."""
    compute_s = demand.prompt_tokens * demand.chunk_token_s
    prompt_s = compute_s + demand.prompt_step_s
    busy = times * demand.requests_per_s * compute_s / instances
    if busy >= 1:
        return False
    left_s = max(slo_ttft_s - prompt_s, prompt_s)  # where prompts are longer than the limit, at least none may pile up
    waits = math.pow(busy, math.sqrt(2 * (instances + 1)) - 1)
    return waits * math.exp(-instances * (1 - busy) * left_s / prompt_s) <= 1 - GOOD_SHARE


def decode_serves(demand: FleetDemand, times: float, instances: int, slo_itl_s: float, *, alone: bool) -> bool:
    """Whether enough next tokens of so many times the load come in time, and every answer has room. alone: they compute the
    prompts too."""
    prompts = times * demand.requests_per_s * demand.prompt_tokens * demand.chunk_token_s / instances if alone else 0.0
    each_per_s = times * demand.answer_tokens_per_s / instances
    left = 1 - prompts - each_per_s * (demand.decode_row_s + demand.held_tokens * demand.held_token_s)
    if left <= 0:
        return False
    token_s = demand.step_s / left
    rows = instances * each_per_s * token_s
    room = instances * min(demand.max_running, demand.capacity_tokens / max(demand.held_tokens, 1.0))
    return token_s * (VARIES if alone else 1.0) <= slo_itl_s and rows + DEVIATIONS * math.sqrt(rows) <= room


class Headroom(NamedTuple):
    """How many times the load each role serves; the same of both where decode instances serve alone."""

    prefill: float
    decode: float

    @property
    def least(self) -> float:
        return min(self.prefill, self.decode)

    def __str__(self) -> str:
        return f"{self.prefill:.2f} times the load at prefill and {self.decode:.2f} at decode"


class Division(NamedTuple):
    """How many instances of a fleet have which role."""

    prefill: int
    decode: int
    whole: bool = False
    """The decode instances have the role both. Without prefill instances it makes no difference."""

    def __str__(self) -> str:
        return f"{self.prefill} prefill + {self.decode} {'both' if self.whole else 'decode'}"


def headroom(demand: FleetDemand, config: ScalingConfig, division: Division) -> Headroom:
    """What a fleet of so many instances has."""
    prefill, decode, whole = division
    found: list[Headroom] = []
    if prefill:
        of_prefill = _most(lambda times: prefill_serves(demand, times, prefill, config.slo_ttft_s))
        found.append(
            Headroom(of_prefill, _most(lambda times: decode_serves(demand, times, decode, config.slo_itl_s, alone=False)))
        )
    if whole or not prefill:
        of_prompts = _most(lambda times: prefill_serves(demand, times / decode, 1, config.slo_ttft_s))
        of_tokens = _most(lambda times: decode_serves(demand, times, decode, config.slo_itl_s, alone=True))
        found.append(Headroom(*[min(of_prompts, of_tokens)] * 2))
    return max(found, key=lambda each: each.least)


def _most(serves: Callable[[float], bool]) -> float:
    """The largest number of times that is served, up to MOST, to a thousandth of it."""
    least, most = 0.0, MOST
    for _ in range(10):
        middle = (least + most) / 2
        least, most = (middle, most) if serves(middle) else (least, middle)
    return most if most == MOST else least


def choose(demand: FleetDemand, config: ScalingConfig, fleet: Division, coming: int = 0) -> ScalingChoice:
    """What is best for a fleet of so many instances that take requests. coming: how many more will be there, or fewer."""
    now, (prefill, decode, whole) = headroom(demand, config, fleet), fleet
    have, size = f"{fleet} serve {now}", prefill + decode

    def options(*divisions: Division) -> list[tuple[Headroom, Division]]:
        """Those that keep to the limits, the best first, and of equal ones the most similar."""
        found = [(headroom(demand, config, each), each) for each in divisions if config.allows(each.prefill, each.decode)]
        return sorted(found, key=lambda each: (-each[0].least, each[1].whole != whole, abs(each[1].prefill - prefill)))

    lasts = min(1.0, headroom(demand.lasting, config, fleet).least)
    others = [
        each
        for each in options(*(Division(each, size - each, way) for each in range(size) for way in {whole, each > 0}))
        if headroom(demand.lasting, config, each[1]).least >= lasts  # a line that waits is no reason to fail what comes
    ]
    # What cannot be served piles up, so then all the roles change at once; otherwise half of them, and a second look.
    if others and now.least < ENOUGH and others[0][0].least >= now.least * (1 + config.margin):
        best, there = others[0]
        reason = f"{have}; {there} would serve {best}"
        if there.whole and not whole:
            return ScalingChoice("flip", reason, "both", decode)
        role: Role = "prefill" if there.prefill > prefill else "decode"
        distance = abs(there.prefill - prefill)
        return ScalingChoice("flip", reason, role, distance if now.least < 1 else max(1, distance // 2))
    if config.scale == "none" or coming:
        return ScalingChoice("stay", have + (f"; {coming} instances are on their way" if coming else ""))
    larger = options(Division(prefill + 1, decode, whole), Division(prefill, decode + 1, whole)) if now.least < SCARCE else []
    if larger:
        best, there = larger[0]
        return ScalingChoice("add", f"{have}; {there} would serve {best}", "prefill" if there.prefill > prefill else "decode")
    smaller = options(Division(prefill - 1, decode, whole), Division(prefill, decode - 1, whole))
    if smaller and smaller[0][0].least > AMPLE:
        best, there = smaller[0]
        return ScalingChoice("remove", f"{have}; {there} still serve {best}", "prefill" if there.prefill < prefill else "decode")
    return ScalingChoice("stay", have)
