"""What a placement costs, in seconds: until the first token, and of everybody's time.

Owns the arithmetic, over what members have measured of themselves and what the router knows of their queues. One unit, no weights
to tune. Holds no state, draws nobody and decides nothing: policies compare by it. Does not know messages or time.

    seconds of a step = step_s + chunk tokens * chunk_token_s + decode rows * decode_row_s

    prefill  │ queue in front │ own prompt, what is not cached │ first token
    link     │                  ├── KV that decode lacks ──┤···│···┤          what computing does not hide delays the second token
    decode   │ waits for room                                       │ second token …  every row makes every step longer
"""

from dataclasses import dataclass

from common.messages import Load
from router.ask import Ask
from router.members import Member, RolePace

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
    queue = member.tokens_to_compute
    steps = 2 if queue else 1
    return _pace(member).step_s * steps + (queue + to_compute(member, ask)) * _chunk_token_s(member)


def of_prefill(member: Member, ask: Ask, behind: float) -> float:
    """Seconds that computing the prompt there costs: until its first token, and for those that come behind it. behind: how many
    these are. While queues are as long as now, as many come behind as are in front."""
    return at_prefill(member, ask) + behind * to_compute(member, ask) * _chunk_token_s(member)


def at_decode(decode: Member, prefill: Member, ask: Ask) -> float:
    """Seconds that decoding there costs: the second token waits for room and for KV that does not arrive while the prompt is
    computed, and every step of it and of the rows beside it takes longer."""
    speed = prefill.speeds.get(decode.info.id)
    exposed_s = 0.0
    if speed:
        lacking = (ask.prompt_tokens - ask.overlap.tokens(decode)) * decode.info.page_bytes / decode.page_size
        exposed_s = max(0.0, lacking / speed - to_compute(prefill, ask) * _chunk_token_s(prefill))
    rows = _rows(decode)
    return exposed_s + _room_s(decode, ask, rows) + _decoding_s(decode, ask, rows)


def apart(prefill: Member, decode: Member, ask: Ask) -> Estimate:
    """One computes the prompt, the other one decodes."""
    return Estimate(at_prefill(prefill, ask), of_prefill(prefill, ask, prefill.requests_to_do) + at_decode(decode, prefill, ask))


def alone(decode: Member, ask: Ask) -> Estimate:
    """A decode instance does both. Its steps with chunks of the prompt delay the next token of each row that runs there."""
    rows = _rows(decode)
    compute_s = to_compute(decode, ask) * _chunk_token_s(decode)
    queue_s = decode.tokens_to_compute * _chunk_token_s(decode)
    steps = 1 + STEPS_AHEAD if rows else 1
    ttft_s = _room_s(decode, ask, rows) + queue_s + _token_s(decode, rows) * steps + compute_s
    return Estimate(ttft_s, ttft_s + rows * compute_s + _decoding_s(decode, ask, rows))


def predict_ttft(first: Member, ask: Ask, since_s: float = 0.0) -> float | None:
    """Seconds until the first token, if this member computes the prompt; None: nobody has measured how fast prompts are. since_s:
    for how long it has computed what is first in its queue."""
    if not (first.load.chunk_token_s or first.pace.chunk_token_s or first.other_pace.chunk_token_s):
        return None
    done_s = min(since_s, first.tokens_to_compute * _chunk_token_s(first))
    return (at_prefill(first, ask) if first.info.role == "prefill" else alone(first, ask).ttft_s) - done_s


def _rows(decode: Member) -> int:
    """How many requests run beside a new one."""
    return min(decode.requests_to_do, decode.info.max_running - 1)


def _room_s(decode: Member, ask: Ask, rows: int) -> float:
    """Seconds until there are a row and memory for it. All that others have there comes free, on average, while an answer is
    decoded: so of what is short it waits for a share of that time. Rows may be short by more than there are, where many wait."""
    rows_short = decode.requests_to_do - rows
    short = min(ask.held_tokens, decode.capacity_tokens) - decode.tokens_free
    if short <= 0 and not rows_short:
        return 0.0
    of_memory = min(1.0, max(0, short) / max(decode.tokens_to_do, 1))
    return max(of_memory, rows_short / decode.info.max_running) * ask.growth_tokens * _token_s(decode, rows)


def _decoding_s(decode: Member, ask: Ask, rows: int) -> float:
    """Seconds that its answer takes, and what its row adds meanwhile to the answers of the others."""
    return ask.growth_tokens * (_token_s(decode, rows) + rows * _pace(decode).decode_row_s)


def _token_s(decode: Member, rows: int) -> float:
    """Seconds of a step with one more row."""
    pace = _pace(decode)
    return pace.step_s + (rows + 1) * pace.decode_row_s


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
