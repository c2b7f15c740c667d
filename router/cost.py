"""What a placement costs, in seconds: until the first token, and of everybody's time.

Owns the arithmetic, over what members have measured of themselves and what the router knows of their queues. One unit, no weights
to tune. Holds no state, draws nobody and decides nothing: policies compare by it. Does not know messages or time.

    seconds of a step = step_s + chunk tokens * chunk_token_s + decode rows * decode_row_s

    prefill  │ queue in front │ own prompt, what is not cached │ first token
    link     │                  ├── KV that decode lacks ──┤···│···┤          what computing does not hide delays the second token
    decode   │ waits for room                                       │ second token …  every row makes every step longer

What a request asks of the fleet: the sizes, prefixes and wishes by which its instances are chosen.

Owns the sizes that follow from each other. Does not know who is asked, tokens or time.
"""

from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from common.ids import Life
from common.messages import Load
from common.sampling_params import ANSWER_TOKENS
from router.cache_index import NO_OVERLAP, Overlap
from router.members import Member, RolePace


@dataclass(slots=True, eq=False)
class Ask:
    """One attempt of a request that is to be placed.

    prompt_tokens: of the prompt and what the answer has so far. max_new_tokens: how many tokens may still follow. overlap: who
    has how much of the prompt in its cache. session: requests of one session follow each other, and share what came before;
    "": it has none. avoid: where it failed before, or had to give up memory. owner: see `Terms`.
    """

    prompt_tokens: int
    max_new_tokens: int
    overlap: Overlap = NO_OVERLAP
    session: str = ""
    avoid: Set[Life] = frozenset()
    owner: str = ""

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

    def sharing(self, overlap: Overlap) -> "Ask":
        """The same, where others have more of the prompt."""
        return replace(self, overlap=overlap)


ASSUMED = RolePace(step_s=0.006, chunk_token_s=0.00004, decode_row_s=0.0001)
"""The pace of members of which nobody has measured one. All have the same then, so they are ordered by their load."""
STEPS_AHEAD = 1.5
"""Of a decode instance, when a request comes: two steps are in flight, and the first of them is half done on average."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What serving a request somewhere takes. ttft_s: seconds until its first token. cost_s: how much longer it and all others
    wait for their tokens because of it, in sum."""

    ttft_s: float
    cost_s: float


def to_compute(member: Member, ask: Ask) -> int:
    """How many tokens of the prompt it has to compute; the last one always."""
    return max(1, ask.prompt_tokens - ask.overlap.tokens(member))


def at_prefill(member: Member, ask: Ask) -> float:
    """Seconds until the first token, if this prefill instance computes the prompt. Behind others it waits for the step that runs,
    and then for its own."""
    return of_prefill(member, ask, 0.0)


def of_prefill(member: Member, ask: Ask, behind: float) -> float:
    """Seconds that computing the prompt there costs: until its first token, and for those that come behind it. behind: how many
    these are. While queues are as long as now, as many come behind as are in front."""
    queue = member.tokens_to_compute
    steps = 2 if queue else 1
    return _pace(member).step_s * steps + (queue + (1 + behind) * to_compute(member, ask)) * _chunk_token_s(member)


def at_decode(decode: Member, prefill: Member, ask: Ask) -> float:
    """Seconds that decoding there costs: the second token waits for room and for KV that does not arrive while the prompt is
    computed, and every step of it and of the rows beside it takes longer."""
    speed = prefill.speeds.get(decode.info.id)
    exposed_s = 0.0
    if speed:
        lacking = (ask.prompt_tokens - ask.overlap.tokens(decode)) * decode.info.page_bytes / decode.page_size
        exposed_s = max(0.0, lacking / speed - to_compute(prefill, ask) * _chunk_token_s(prefill))
    beside = _beside(decode, ask)
    return exposed_s + beside.room_s + beside.decoding_s


def apart(prefill: Member, decode: Member, ask: Ask) -> Estimate:
    """One computes the prompt, the other one decodes."""
    return Estimate(at_prefill(prefill, ask), of_prefill(prefill, ask, prefill.requests_to_do) + at_decode(decode, prefill, ask))


def alone(decode: Member, ask: Ask) -> Estimate:
    """A decode instance does both. Its steps with chunks of the prompt delay the next token of each row that runs there."""
    beside, chunk_token_s = _beside(decode, ask), _chunk_token_s(decode)
    compute_s = to_compute(decode, ask) * chunk_token_s
    queue_s = decode.tokens_to_compute * chunk_token_s
    steps = 1 + STEPS_AHEAD if beside.rows else 1
    ttft_s = beside.room_s + queue_s + beside.token_s * steps + compute_s
    return Estimate(ttft_s, ttft_s + beside.rows * compute_s + beside.decoding_s)


def is_measured(first: Member) -> bool:
    """Whether anybody has measured how fast prompts are. If not, nothing is predicted."""
    return bool(first.load.chunk_token_s or first.pace.chunk_token_s or first.other_pace.chunk_token_s)


def predict_ttft(first: Member, ask: Ask, since_s: float = 0.0) -> float | None:
    """Seconds until the first token, if this member computes the prompt; None: nobody has measured how fast prompts are. since_s:
    for how long it has computed what is first in its queue. Owners share the member: the requests of others delay this one only
    as far as `Member` says."""
    if not is_measured(first):
        return None
    queue_s = first.tokens_to_compute * _chunk_token_s(first)
    front_s = first.tokens_in_front(ask.owner, to_compute(first, ask)) * _chunk_token_s(first)
    gone_s = max(min(since_s, queue_s), queue_s - front_s)
    if first.info.role == "prefill":
        return at_prefill(first, ask) - gone_s
    room_s = _beside(first, ask).room_s if first.has_part_for(ask.owner, ask.held_tokens) else 0.0
    return alone(first, ask).ttft_s - gone_s - room_s


class _Beside(NamedTuple):
    """What a request finds on a decode instance. rows: how many others run beside it. token_s: seconds of a step, with its own
    row. room_s: seconds until there are a row and memory for it. decoding_s: seconds that its answer takes, and what its row adds
    meanwhile to the answers of the others."""

    rows: int
    token_s: float
    room_s: float
    decoding_s: float


def _beside(decode: Member, ask: Ask) -> _Beside:
    """All that others have there, rows and memory, comes free, on average, while an answer is decoded: so for what is short the
    request waits for a share of that time. Rows may be short by more than there are, where many wait."""
    pace, requests, most, growth = _pace(decode), decode.requests_to_do, decode.info.max_running, ask.growth_tokens
    rows = requests if requests < most else most - 1
    token_s = pace.step_s + (rows + 1) * pace.decode_row_s
    share = (requests - rows) / most
    short = min(ask.held_tokens, decode.capacity_tokens) - decode.tokens_free
    if short > 0:
        share = max(share, min(1.0, short / max(decode.tokens_to_do, 1)))
    return _Beside(rows, token_s, share * growth * token_s, growth * (token_s + rows * pace.decode_row_s))


def _pace(member: Member) -> Load | RolePace:
    """Of its steps: as it has measured it, or as its role has."""
    load, pace = member.load, member.pace
    if load.step_s or load.decode_row_s:
        return load
    return pace if pace.step_s or pace.decode_row_s else ASSUMED


def _chunk_token_s(member: Member) -> float:
    """A decode instance that computes no prompts is taken to be as fast as those that do."""
    load, pace, other = member.load, member.pace, member.other_pace
    return load.chunk_token_s or pace.chunk_token_s or other.chunk_token_s or ASSUMED.chunk_token_s
