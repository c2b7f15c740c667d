"""What a placement costs, in seconds: until the first token, and of everybody's time.

Owns what a request demands of the instances that serve it, and the arithmetic, over what members have measured of themselves and
what the router knows of their queues. One unit, no weights to tune. Holds no state, draws nobody and decides nothing: policies
compare by it. Does not know messages or time.

    seconds of a step = step_s + chunk tokens * chunk_token_s + decode rows * decode_row_s + tokens that they hold * held_token_s

    prefill  │ queue in front │ own prompt, what is not cached │ first token
    link     │                  ├── KV that decode lacks ──┤···│···┤          what computing does not hide delays the second token
    decode   │ waits for room                                       │ second token …  every row makes every step longer
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from common.ids import Digest, Life
from common.messages import Load
from common.sampling_params import ANSWER_TOKENS
from router.cache_index import NO_OVERLAP, Overlap
from router.members import Member, RolePace


@dataclass(slots=True, eq=False)
class Demand:
    """What an attempt of a request needs of the instances that serve it."""

    prompt_tokens: int
    """Tokens of the prompt and of the answer so far."""
    max_new_tokens: int
    """How many tokens may still follow."""
    overlap: Overlap = NO_OVERLAP
    """Which member has how much of the prompt in its cache."""
    session: str = ""
    """Requests of one session follow each other, and share what came before; "": it has none."""
    avoid: Set[Life] = frozenset()
    """Where it failed before, or had to give up memory."""
    owner: str = ""
    """Name of the client's API key; "": it has none."""
    blocks: Sequence[int] = ()
    """Names of the prompt's blocks; none where nobody wants to know what is cached."""
    adapter: Digest = Digest("")
    """The LoRA adapter that members must hold; "": none."""

    growth_tokens: int = field(init=False)
    """How many tokens its answer is expected to have."""
    held_tokens: int = field(init=False)
    """How many tokens of memory it is expected to need where it decodes."""
    most_tokens: int = field(init=False)
    """How many tokens it holds at most: the KV of its last token is never needed."""

    def __post_init__(self) -> None:
        self.growth_tokens = min(self.max_new_tokens, ANSWER_TOKENS)
        self.held_tokens = self.prompt_tokens + self.growth_tokens
        self.most_tokens = self.prompt_tokens + self.max_new_tokens - 1


ASSUMED = RolePace(step_s=0.006, chunk_token_s=0.00004, decode_row_s=0.0001)
"""The pace of members of which nobody has measured one. All have the same then, so they are ordered by their load."""
STEPS_AHEAD = 1.5
"""Steps that run on a decode instance when a request comes: two are in flight, and the first is half done on average."""


class Estimate(NamedTuple):
    """What serving a request on one instance takes."""

    ttft_s: float
    """Seconds until its first token."""
    cost_s: float
    """How much longer it and all others wait for their tokens because of it, in sum."""


def uncached_tokens(member: Member, demand: Demand) -> int:
    """How many tokens of the prompt it has to compute; the last one always."""
    return max(1, demand.prompt_tokens - demand.overlap.tokens(member))


def prefill_cost_s(member: Member, demand: Demand, behind: float = 0.0) -> float:
    """Seconds that computing the prompt on this prefill instance costs: until its first token, and for `behind` prompts that come
    behind it. Behind others it waits for the step that runs, and then for its own."""
    queue = member.tokens_to_compute
    steps = 2 if queue else 1
    return _pace(member).step_s * steps + (queue + (1 + behind) * uncached_tokens(member, demand)) * _chunk_token_s(member)


def decode_cost_s(decode: Member, prefill: Member, demand: Demand) -> float:
    """Seconds that decoding there costs: the second token waits for room and for KV that does not arrive while the prompt is
    computed, and every step of it and of the other rows takes longer."""
    speed = prefill.speeds.get(decode.info.id)
    exposed_s = 0.0
    if speed:
        lacking = (demand.prompt_tokens - demand.overlap.tokens(decode)) * decode.info.page_bytes / decode.page_size
        exposed_s = max(0.0, lacking / speed - uncached_tokens(prefill, demand) * _chunk_token_s(prefill))
    rows = _decode_rows(decode, demand)
    return exposed_s + rows.room_s + rows.decoding_s


def pair_cost_s(prefill: Member, decode: Member, demand: Demand) -> float:
    """Seconds that it costs if one computes the prompt and the other one decodes. While queues are as long as now, as many
    prompts come behind as are in front."""
    return prefill_cost_s(prefill, demand, prefill.requests_to_do) + decode_cost_s(decode, prefill, demand)


def single_estimate(decode: Member, demand: Demand) -> Estimate:
    """A decode instance computes the prompt too. Its steps with chunks delay the next token of each row that runs there."""
    rows, chunk_token_s = _decode_rows(decode, demand), _chunk_token_s(decode)
    compute_s = uncached_tokens(decode, demand) * chunk_token_s
    queue_s = decode.tokens_to_compute * chunk_token_s
    steps = 1 + STEPS_AHEAD if rows.others else 1
    ttft_s = rows.room_s + queue_s + rows.token_s * steps + compute_s
    return Estimate(ttft_s, ttft_s + rows.others * compute_s + rows.decoding_s)


def predict_ttft(first: Member, demand: Demand, since_s: float = 0.0) -> float | None:
    """Seconds until the first token, if this member computes the prompt; None: nobody has measured how fast prompts are. since_s:
    for how long it has computed what is first in its queue. Owners share the member: the requests of others delay this one only
    as far as `Member` says."""
    if not is_measured(first):
        return None
    queue_s = first.tokens_to_compute * _chunk_token_s(first)
    front_s = first.tokens_in_front(demand.owner, uncached_tokens(first, demand)) * _chunk_token_s(first)
    gone_s = max(min(since_s, queue_s), queue_s - front_s)
    if first.info.role == "prefill":
        return prefill_cost_s(first, demand) - gone_s
    room_s = _decode_rows(first, demand).room_s if first.has_part_for(demand.owner, demand.held_tokens) else 0.0
    return single_estimate(first, demand).ttft_s - gone_s - room_s


class _DecodeRows(NamedTuple):
    """What a request finds on a decode instance."""

    others: int
    """How many other requests run there."""
    token_s: float
    """Seconds of a step, with its own row."""
    room_s: float
    """Seconds until there are a row and memory for it."""
    decoding_s: float
    """Seconds that its answer takes, and what its row adds meanwhile to the answers of the others."""


def _decode_rows(decode: Member, demand: Demand) -> _DecodeRows:
    """All that others have there, rows and memory, comes free, on average, while an answer is decoded: so for what is short the
    request waits for a share of that time. Rows may be short by more than there are, where many wait."""
    pace, requests, most, growth = _pace(decode), decode.requests_to_do, decode.info.max_running, demand.growth_tokens
    rows = requests if requests < most else most - 1
    held = min(decode.tokens_to_do * rows / max(1, requests), decode.capacity_tokens)
    own_s = pace.decode_row_s + demand.held_tokens * pace.held_token_s
    token_s = pace.step_s + rows * pace.decode_row_s + held * pace.held_token_s + own_s
    share = (requests - rows) / most
    short = min(demand.held_tokens, decode.capacity_tokens) - decode.tokens_free
    if short > 0:
        share = max(share, min(1.0, short / max(decode.tokens_to_do, 1)))
    return _DecodeRows(rows, token_s, share * growth * token_s, growth * (token_s + rows * own_s))


def _pace(member: Member) -> Load | RolePace:
    """The pace of its steps as it has measured it, or as its role has."""
    load, pace = member.load, member.pace
    if load.step_s or load.decode_row_s:
        return load
    return pace if pace.step_s or pace.decode_row_s else ASSUMED


def _chunk_token_s(member: Member) -> float:
    """A decode instance that computes no prompts is taken to be as fast as those that do."""
    load, pace, other = member.load, member.pace, member.other_pace
    return load.chunk_token_s or pace.chunk_token_s or other.chunk_token_s or ASSUMED.chunk_token_s


def is_measured(first: Member) -> bool:
    """Whether anybody has measured how fast prompts are. If not, nothing is predicted."""
    return bool(first.load.chunk_token_s or first.pace.chunk_token_s or first.other_pace.chunk_token_s)
