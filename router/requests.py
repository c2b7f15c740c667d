"""A request at the router: what was asked, what it has got so far, and what begins its next attempt.

Owns the tokens and texts that were delivered, so that the next attempt is prompt + tokens so far. Decides nothing: when an
attempt begins and ends is said by the request book. Does not know HTTP, nor text but to pass it on.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from msgspec.structs import replace

from common.ids import DETOKENIZER, Key, Life, RequestId, pack_ids
from common.instance.ports import Send
from common.messages import ExpectAnswer, Generate, Terms
from common.sampling_params import SamplingParams
from router.attempts import Attempt, ResumeReason, Setback
from router.outbox import Outbox
from router.policy import Choice

TOKEN_BYTES = 4
CONTEXT_TOKENS = 8
"""Tokens of the prompt that the detokenizer gets, so that the answer's first characters are decoded in their context."""
SPARE_LIFE_S = 60.0
"""The detokenizer forgets an answer so long after its deadline, should it never hear of its end."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One choice of a client's request. prompt: packed token ids. index: its number in the answer. priority: the lower, the
    earlier. timeout_s: from its arrival; None: the router's own limit."""

    request_id: RequestId
    index: int
    prompt: bytes
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    priority: int = 0
    timeout_s: float | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES


class Phase(StrEnum):
    """Where an open request is."""

    AWAITING = "awaiting_first_token"
    GENERATING = "generating"
    RESUMING = "resuming"


@dataclass(slots=True, eq=False)
class Record:
    """An open request: what it has got so far, and its present attempt (None while it waits for an instance). Times in seconds
    of the caller's clock.

    attempts: begun so far. fruitless: that brought no token, in a row. avoid: where they failed. texts: what was delivered, in
    pieces. gap_s: since when the client of a resumed request waits for its next token; None when it does not.
    """

    spec: RequestSpec
    outbox: Outbox
    received_s: float
    deadline_s: float
    attempt: Attempt | None = None
    attempts: int = 0
    fruitless: int = 0
    avoid: set[Life] = field(default_factory=set)
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    last_token_s: float = 0.0
    gap_s: float | None = None

    @property
    def phase(self) -> Phase:
        if self.attempt is None:
            return Phase.RESUMING
        return Phase.GENERATING if self.token_ids else Phase.AWAITING

    @property
    def remaining_tokens(self) -> int:
        return self.spec.sampling.max_new_tokens - len(self.token_ids)

    @property
    def prompt_tokens(self) -> int:
        """Of the next attempt's prompt."""
        return self.spec.prompt_tokens + len(self.token_ids)

    def begin(self, choice: Choice, now: float) -> Attempt:
        """The next attempt, by these members; nobody has been told yet."""
        key = Key(self.spec.request_id, self.attempts)
        self.attempts += 1
        self.attempt = Attempt(key, choice, len(self.token_ids), self.prompt_tokens, now)
        return self.attempt

    def opening(self, attempt: Attempt, now: float) -> list[Send]:
        """What makes the detokenizer and the members begin the attempt."""
        spec, first = self.spec, len(self.token_ids)
        so_far, left_s = pack_ids(self.token_ids), self.deadline_s - now
        opened = ExpectAnswer(
            key=attempt.key,
            stop=spec.stop,
            first=first,
            context=spec.prompt[-CONTEXT_TOKENS * TOKEN_BYTES :] + so_far,
            text="".join(self.texts),
            life_s=left_s + SPARE_LIFE_S,
        )
        generate = Generate(
            key=attempt.key,
            prompt=spec.prompt + so_far,
            sampling=replace(spec.sampling, max_new_tokens=self.remaining_tokens),
            decode=None if attempt.decode is None else attempt.decode.info.id,
            first=first,
            terms=Terms(priority=spec.priority, age_s=now - self.received_s, timeout_s=left_s),
        )
        return [Send(DETOKENIZER, opened), Send(attempt.first.info.id, generate)]

    def set_back(self, attempt: Attempt, setback: Setback, now: float) -> None:
        """The attempt is over, and the request is not."""
        attempt.release()
        self.attempt = None
        if attempt.tokens:
            self.fruitless = 0
        elif setback.reason is not ResumeReason.PREEMPTED:
            self.fruitless += 1
        self.avoid.update(member.life for member in setback.at)
        if self.gap_s is None:
            self.gap_s = self.last_token_s if self.token_ids else now
