"""An open request, and its present attempt: who serves it, how many tokens it has brought, and what its members know about it.

Owns the tokens and texts that were delivered, so that the next attempt is prompt + tokens so far, and the tokens that an attempt
assigns to its members, until each is released. Decides nothing: the request book says when an attempt starts and ends.

    first ──first token──► decode ──later tokens──►        (no candidates: first serves it alone)
    └─ needed until token 2 proves the handoff ─┘└─ needed

Which candidate becomes its decode instance is the first member's to say (Placed). Until then only the first is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from common.ids import ID_BYTES, AttemptId, Digest, InstanceId, Life, Variant, pack_ids
from common.instance.ports import Send
from common.messages import Cancel, Failed, ForgetAnswer
from common.pages.radix_cache import BlockNames
from router.cost import Demand, predict_ttft, uncached_tokens
from router.members import Member
from router.requests import ClientRequest, RequestSpec
from router.timelines import PlacementGrounds, RequestTimes, ResumeReason

ROUNDS = 8
"""As many rounds of probes may be under way. A member that is slower by more is not judged."""


class Loss(Enum):
    """What the answers to a round of probes say of messages about an attempt. SEEMS: some were lost, and nothing was asked for
    again yet, or nothing had said so before. PROVEN: all that are needed say so once more, although the tokens were asked for
    again before they were asked."""

    NONE = auto()
    SEEMS = auto()
    PROVEN = auto()


@dataclass(frozen=True, slots=True)
class Setback:
    """Why an attempt is over. failed: what the client is told when no attempt follows. at: the members that the next attempt
    should avoid."""

    reason: ResumeReason
    failed: Failed
    at: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """Who serves an attempt."""

    first: Member
    """The member that gets the request."""
    decodes: tuple[Member, ...] = ()
    """A few decode instances that are linked to `first`, best first. One of them takes over after the first token. When there are
    none, `first` serves the request alone."""

    @property
    def decode(self) -> Member | None:
        """The best candidate; None when `first` serves the request alone."""
        return self.decodes[0] if self.decodes else None


class Phase(StrEnum):
    """Where an open request is."""

    AWAITING = "awaiting_first_token"
    GENERATING = "generating"
    RESUMING = "resuming"


@dataclass(slots=True, eq=False)
class Record:
    """An open request. Times are seconds of the caller's clock."""

    spec: RequestSpec
    client: ClientRequest
    times: RequestTimes
    timeout_s: float
    adapter: Digest = Digest("")
    """What its adapter's name stood for when it came."""
    attempt: "Attempt | None" = None
    """The present one; None while the request waits for an instance."""
    attempts: int = 0
    """How many were started."""
    excused: int = 0
    """How many of them ended because their memory was needed, or the weights have changed."""
    fruitless: int = 0
    """How many in a row failed without a token."""
    failed_steps: list[str] = field(default_factory=list)
    """Failures of steps that it was in, which have ended their instances."""
    avoid: set[Life] = field(default_factory=set)
    """Where attempts failed."""
    crowded: set[Life] = field(default_factory=set)
    """Where the last one was preempted."""
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """What was delivered, in pieces."""
    weight_version: str = ""
    """What people call the weights that its last token came from."""
    gap_since_s: float | None = None
    """When the client of a resumed request began to wait for its next token; None when it does not wait."""
    _blocks: BlockNames | None = None

    @property
    def deadline_s(self) -> float:
        return self.times.received_s + self.timeout_s

    @property
    def phase(self) -> Phase:
        if self.attempt is None:
            return Phase.RESUMING
        return Phase.GENERATING if self.token_ids else Phase.AWAITING

    @property
    def prompt(self) -> bytes:
        """Packed token ids of the next attempt's prompt."""
        return self.spec.prompt + pack_ids(self.token_ids) if self.token_ids else self.spec.prompt

    @property
    def prompt_tokens(self) -> int:
        """Length of the next attempt's prompt."""
        return len(self.spec.prompt) // ID_BYTES + len(self.token_ids)

    def block_names(self, page_size: int, variant: Variant) -> Sequence[int]:
        """Names of the blocks of the next attempt's prompt. They are kept: only tokens that have come since are named."""
        blocks = self._blocks or self.spec.blocks
        if blocks is None or (blocks.page_size, blocks.variant) != (page_size, variant):
            blocks = BlockNames.of(self.spec.prompt, page_size, variant, self.spec.salt)
        if blocks.tokens < self.prompt_tokens:
            blocks = blocks.extended(pack_ids(self.token_ids[blocks.tokens - self.prompt_tokens :]))
        self._blocks = blocks
        return blocks.names

    @property
    def remaining_tokens(self) -> int:
        return self.spec.sampling.max_new_tokens - len(self.token_ids)

    def set_back(self, attempt: "Attempt", setback: Setback, now: float) -> None:
        """The attempt is over, but the request is not. Who gives up memory, or leaves in order, has not failed."""
        attempt.release(now)
        self.attempt = None
        self.times.resumed(setback.reason, setback.failed, now, attempt.tokens)
        places = {member.life for member in setback.at}
        is_excused = setback.reason in (ResumeReason.PREEMPTED, ResumeReason.WEIGHTS)
        is_excused = is_excused or (bool(setback.at) and all(member.draining or member.told_role for member in setback.at))
        self.excused += is_excused
        self.crowded = places if is_excused else set()
        self.avoid |= set() if is_excused else places
        if attempt.tokens:
            self.fruitless = 0
        elif not is_excused:
            self.fruitless += 1
        if self.gap_since_s is None:
            self.gap_since_s = now if self.times.last_token_s is None else self.times.last_token_s


class Attempt:
    """demand: what was placed. detokenizer: who makes text of its tokens. weight_version: what the weights of its members are
    called."""

    def __init__(
        self,
        record: Record,
        key: AttemptId,
        detokenizer: InstanceId,
        demand: Demand,
        placement: Placement,
        weight_version: str,
        now: float,
    ) -> None:
        self.record = record
        self.key, self.demand, self.detokenizer = key, demand, detokenizer
        self.first, self.candidates = placement.first, placement.decodes
        self.variant = Variant(self.first.weights, record.adapter)
        """What computes it, on all its members."""
        self.weight_version = f"{weight_version}{record.adapter and f'+{record.adapter}'}"
        self.decode: Member | None = None
        """The candidate that has granted a reservation, once that is known."""
        self.started_s = self.silent_since_s = now
        self._first_token = len(record.token_ids)
        self._bearer = placement.decode or self.first
        """To whom its later tokens are assigned: the best candidate, until it is known who decodes."""
        if not self.first.computing:
            self.first.computes_since_s = now
        self.predicted_s = predict_ttft(self.first, demand, self.first.computed_s(now))
        """Seconds from its start until its first token; None: there is nothing to predict it from."""
        self.tokens_in_front = self.first.tokens_to_compute
        """Prompt tokens that were in front of its own when it was placed."""
        self._computing = uncached_tokens(self.first, demand)
        """Tokens of its prompt that are to be computed, until its first token has come."""
        self._assigned = {self.first: self._computing}
        if self._bearer.info.role == "decode":
            self._assigned[self._bearer] = demand.prompt_tokens
        for member, tokens in self._assigned.items():
            member.assign(demand.owner, tokens)
        self.first.compute(key, demand.owner, self._computing)
        self._growth_tokens = demand.growth_tokens
        self._bearer.growth_tokens += self._growth_tokens
        self._asked_where = False
        self._answers: dict[int, dict[Member, int | None]] = {}
        """What members answered since the last token, by the round of probes: one may be slower than another by some rounds."""
        self.is_repeated = False
        """Its tokens were asked for again, none has come since, and no later round has shown that nothing is missing."""
        self.seemed_lost = False
        """Something has said since the last token that messages were lost: a gap in the text, or a round of probes."""
        self._was_opened_again = False
        self._repeat_round = 0
        """The latest round that began before that."""

    @property
    def grounds(self) -> PlacementGrounds:
        """Why it is where it is. Ask before its first token."""
        cached, names = self.demand.prompt_tokens - self._computing, tuple(member.info.id for member in self.candidates)
        return PlacementGrounds(self.tokens_in_front, cached, self.predicted_s, names)

    @property
    def members(self) -> tuple[Member, ...]:
        """Everyone who may hold something of it."""
        return (self.first, *(self.candidates if self.decode is None else (self.decode,)))

    @property
    def server(self) -> Member | None:
        """Who sends its last tokens; None while that is not known."""
        return self.decode if self.candidates else self.first

    @property
    def needed(self) -> tuple[Member, ...]:
        """The members without which it cannot go on. The prefill instance finds another candidate when one is lost before its
        grant. The attempt's second token proves that the handoff is done: from then on it does not need the prefill instance."""
        if self.decode is None:
            return (self.first,)
        return (self.decode,) if self.tokens >= 2 else (self.first, self.decode)

    @property
    def possible_senders(self) -> tuple[Member, ...]:
        """Who may know its tokens from the next one on, or its ending: any candidate, while it is not known who decodes."""
        return self.members if self.decode is None else self.needed

    @property
    def next_token(self) -> int:
        """Number of the next token that it is to bring."""
        return len(self.record.token_ids)

    @property
    def tokens(self) -> int:
        """How many tokens it has brought."""
        return len(self.record.token_ids) - self._first_token

    def place(self, decode: Member) -> None:
        """This decode instance has granted its reservation. Nothing changes that: what is told later is old, or the same."""
        if self.decode is not None or not self.candidates:
            return
        self.decode = decode
        tokens = self._assigned.pop(self._bearer)
        self._bearer.assign(self.demand.owner, -tokens, -1)
        decode.assign(self.demand.owner, tokens)
        self._assigned[decode] = tokens
        self._bearer.growth_tokens -= self._growth_tokens
        decode.growth_tokens += self._growth_tokens
        self._bearer = decode
        self.is_repeated = False
        self._answers.clear()

    def advance(self, token_ids: Sequence[int], now: float) -> None:
        """Take in tokens that it brought."""
        tokens, record = len(token_ids), self.record
        if self._computing:
            self.first.computed(self.key, self.demand.owner, self._computing, now)
            self.first.computes_since_s, self._computing = now, 0
            record.times.attempts[-1].first_token_s = now
            if self.candidates:
                self.first.assign(self.demand.owner, -self._assigned.pop(self.first), -1)
        self._bearer.assigned_tokens += tokens
        self._assigned[self._bearer] += tokens
        growth_tokens = min(tokens, self._growth_tokens)
        self._growth_tokens -= growth_tokens
        self._bearer.growth_tokens -= growth_tokens
        record.token_ids += token_ids
        record.times.tokens += tokens
        record.gap_since_s, record.times.last_token_s = None, now
        self.restart_silence(now)

    def should_ask_where(self) -> bool:
        """True once: it was handed off, and Placed has not come, so that it may be lost."""
        if self._asked_where or self.decode is not None or not self.candidates or self.tokens < 2:
            return False
        self._asked_where = True
        return True

    def restart_silence(self, now: float) -> None:
        """Count its silence from now: a token came, or none could come until now."""
        self.silent_since_s = now
        self.is_repeated = self.seemed_lost = False
        self._answers.clear()

    def start_again(self, now: float, repeat_round: int) -> None:
        """Count its silence from now: its tokens are asked for again. What members answer in rounds up to this one decides
        nothing."""
        self.silent_since_s = now
        self.is_repeated = self._was_opened_again = True
        self._repeat_round = repeat_round
        self._answers.clear()

    def withdraw(self) -> list[Send]:
        """End it for members and detokenizer that believe it is open. A lost member is told too: it may only be silent, and then
        the message waits for it."""
        return [*self.cancels(), Send(self.detokenizer, ForgetAnswer(key=self.key))]

    def close(self) -> list[Send]:
        """Its ending came with its text, so the detokenizer knows it, unless it has opened the answer once more since."""
        return [Send(self.detokenizer, ForgetAnswer(key=self.key))] if self._was_opened_again else []

    def cancels(self, *, complete: bool = False) -> list[Send]:
        """complete: see `Cancel`."""
        return [Send(member.info.id, Cancel(key=self.key, complete=complete)) for member in self.members]

    def release(self, now: float) -> None:
        """Take its tokens off its members. Idempotent."""
        for member, tokens in self._assigned.items():
            member.assign(self.demand.owner, -tokens, -1)
        self._assigned.clear()
        if self._computing:
            self.first.computed(self.key, self.demand.owner, self._computing, now)
            self._computing = 0
        self._bearer.growth_tokens -= self._growth_tokens
        self._growth_tokens = 0

    # --- probes --------------------------------------------------------------------------------------------------------

    def note_answer(self, member: Member, next_token: int | None, round_: int) -> Loss:
        """Take in a member's answer to a probe: the number of the token that it emits next, or None when it knows nothing. What
        it had sent before has come, or was lost. Returns what the answers of this round say.

        Answers of one round are not of one moment: between them a prefill instance may have handed off, which looks as if nobody
        had the request. That happens once. So a loss is proven only when two rounds say so, whatever else had the tokens told
        again between them."""
        known = self._answers.setdefault(round_, {})
        known[member] = next_token
        if len(self._answers) > ROUNDS:
            del self._answers[min(self._answers)]
        is_suspect = self._is_suspect(known)
        if self.is_repeated:
            if round_ <= self._repeat_round or len(known) < len(self.needed):
                return Loss.NONE
            self.is_repeated = is_suspect
        if not is_suspect:
            return Loss.NONE
        is_proven = self.is_repeated and self.seemed_lost
        self.seemed_lost = True
        return Loss.PROVEN if is_proven else Loss.SEEMS

    def _is_suspect(self, known: Mapping[Member, int | None]) -> bool:
        """Whether a round says that messages were lost: a member has sent tokens that did not come, or no member is about to
        send the next token. A decode instance that still waits for the handoff does not count when its prefill instance knows
        nothing."""
        if any(next_token is not None and next_token > self.next_token for next_token in known.values()):
            return True
        if len(known) < len(self.needed):
            return False
        return all(
            next_token is None or (member is self.decode and next_token == self._first_token)
            for member, next_token in known.items()
        )
