"""What a planner of the fleet reads here and tells: figures of each role, instances that could be started, and its decisions.

Owns the sums over the members of a role, and the memory of decisions. Asked by the page, by scrapes and by planners, never by a
request. Decides nothing: `launch autoscale` does, or who else reads the figures.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from common.errors import Conflict
from common.ids import ROLES, Role, ServingRole
from router.cost import ASSUMED, Demand, is_measured, predict_ttft
from router.fleet import Members
from router.members import RoleTotals

REMEMBERED = 256
"""How many decisions are remembered, the latest."""
REASON_CHARS = 1000
ScalingAction = Literal["stay", "flip", "add", "remove"]
ACTIONS: tuple[ScalingAction, ...] = get_args(ScalingAction)


class RoleFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The members of one role that take requests, as they last reported."""

    instances: int
    """How many there are."""
    queue_s: float
    """Seconds that they need to compute the prompts which they have, if no more come."""
    occupancy: float
    """The share of their KV pages that is held."""
    predicted_ttft_s: float
    """Seconds until the first token of a prompt that comes now and has as many tokens to compute as others had; 0: unknown."""
    waiting_requests: int
    """Requests that wait for memory or for their turn."""
    running_requests: int
    """Requests that are being computed."""
    tokens_to_compute: int
    """Prompt tokens that are still to be computed."""
    tokens_held: int
    """Tokens of KV whose pages are held."""
    capacity_tokens: int
    """Tokens of KV that fit the memory of all of them."""
    max_running: int
    """Requests that all of them can compute at once."""
    step_s: float
    """Seconds that any step takes, as measured or else assumed; so are the next three."""
    chunk_token_s: float
    """Seconds that each prompt token adds to a step."""
    decode_row_s: float
    """Seconds that each decode row adds to a step."""
    held_token_s: float = 0.0
    """Seconds that each token of KV adds which the decode rows hold. A router of an older release does not say."""
    totals: RoleTotals
    """What members of the role have done so far."""


def role_figures(fleet: Members, role: Role) -> RoleFigures:
    members, pace, other = fleet.candidates.lines[role], fleet.paces[role], fleet.paces[ROLES[role == "prefill"]]
    measured = pace if pace.step_s or pace.decode_row_s else ASSUMED
    chunk_token_s = pace.chunk_token_s or other.chunk_token_s or ASSUMED.chunk_token_s
    count, totals = max(1, len(members)), pace.totals
    tokens_to_compute = sum(member.tokens_to_compute for member in members)
    free = sum(member.load.pages_free * member.page_size for member in members)
    capacity = sum(member.capacity_tokens for member in members)
    demand = Demand(max(1, totals.prompt_tokens // max(1, totals.requests)), max_new_tokens=1)
    soonest_s = min((predict_ttft(member, demand) or 0.0 for member in members if is_measured(member)), default=0.0)
    return RoleFigures(
        instances=len(members),
        queue_s=tokens_to_compute * chunk_token_s / count,
        occupancy=(capacity - free) / capacity if capacity else 0.0,
        predicted_ttft_s=soonest_s,
        waiting_requests=sum(member.load.waiting_requests for member in members),
        running_requests=sum(member.load.running_requests for member in members),
        tokens_to_compute=tokens_to_compute,
        tokens_held=capacity - free,
        capacity_tokens=capacity,
        max_running=sum(member.info.max_running for member in members),
        step_s=measured.step_s,
        chunk_token_s=chunk_token_s,
        decode_row_s=measured.decode_row_s,
        held_token_s=measured.held_token_s,
        totals=totals,
    )


class ScalingDecision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a planner has decided: the body of POST /cluster/decisions."""

    action: ScalingAction
    """What is done; stay: nothing."""
    reason: Annotated[str, Meta(min_length=1, max_length=REASON_CHARS)]
    """Why, in words."""
    instance: Annotated[str, Meta(max_length=128)] = ""
    """Whom it is about; empty: nobody who is there yet."""
    role: ServingRole | None = None
    """The role of the instance from now on."""
    outcome: Annotated[str, Meta(max_length=REASON_CHARS)] = ""
    """What became of it; empty: it was done."""
    at: float = 0.0
    """When it was made, as UNIX time."""


class KeptInstances(msgspec.Struct, frozen=True, kw_only=True):
    """What whoever started this router keeps alive beside it."""

    names: tuple[str, ...] = ()
    """Instances that are there or will be."""
    spare: int = 0
    """How many more it can start."""


class ScalingBoard:
    """What planners have told this router, and who starts instances for them."""

    def __init__(self) -> None:
        self.decisions: deque[ScalingDecision] = deque(maxlen=REMEMBERED)
        self.counts: Counter[ScalingAction] = Counter()
        self.kept: KeptInstances | None = None
        """None: nobody keeps instances beside this router."""
        self.starts: Callable[[Role], object] = lambda role: None
        """Asks whoever keeps instances for one more."""

    def keeps(self, names: Sequence[str], spare: int) -> None:
        """Whoever started this router tells what it keeps alive."""
        self.kept = KeptInstances(names=tuple(names), spare=spare)

    def decided(self, decision: ScalingDecision) -> None:
        """Remember it; a decision to stay takes the place of one before it."""
        self.counts[decision.action] += 1
        if self.decisions and decision.action == self.decisions[-1].action == "stay":
            self.decisions.pop()
        self.decisions.append(decision)

    def start(self, role: Role) -> None:
        """Raises Conflict when nobody can start one more."""
        if self.kept is None or not self.kept.spare:
            why = "the router was not started by `launch local` or `launch ray`" if self.kept is None else "no spare one is left"
            raise Conflict(f"no instance can be started: {why}; give the command that starts the fleet more with --spare")
        self.kept = replace(self.kept, spare=self.kept.spare - 1)  # until whoever keeps them tells the next time
        self.starts(role)
