"""One attempt at serving a request: who serves it, how many tokens it has brought, and what its members know about it.

Owns the tokens that it assigns to its members, until each is released. Does not know texts, clients, or why another attempt
follows it.

    first ──first token──► decode ──later tokens──►        (no candidates: first serves it alone)
    └─ needed until token 2 proves the handoff ─┘└─ needed

Which candidate becomes its decode instance is the first member's to say (Placed). Until then only the first is needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from common.ids import AttemptId, Incarnation, InstanceId
from common.instance.ports import Send
from common.messages import Cancel, Failed, ForgetAnswer
from router.cost import Demand, predict_ttft, uncached_tokens
from router.members import Member

ROUNDS = 8
"""As many rounds of probes may be under way. A member that is slower by more is not judged."""


class ResumeReason(StrEnum):
    """Why a request is resumed."""

    LOST_INSTANCE = "lost_instance"
    FAILED_ATTEMPT = "failed_attempt"
    PREEMPTED = "preempted"
    LOST_MESSAGES = "lost_messages"


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


class Attempt:
    """demand: what was placed. detokenizer: who makes text of its tokens. first_token: number of the first token that it is to
    bring."""

    def __init__(
        self,
        key: AttemptId,
        detokenizer: InstanceId,
        demand: Demand,
        placement: Placement,
        first_token: int,
        now: float,
    ) -> None:
        self.key = key
        self.demand = demand
        self.detokenizer = detokenizer
        self.first, self.candidates = placement.first, placement.decodes
        self.decode: Member | None = None
        """The candidate that has granted a reservation, once that is known."""
        self.next_token = first_token
        self.started_s = self.silent_since_s = now
        self._first_token = first_token
        self._bearer = placement.decode or self.first
        """To whom its later tokens are assigned: the best candidate, until it is known who decodes."""
        if not self.first.computing:
            self.first.computes_since_s = now
        self.predicted_s = predict_ttft(self.first, demand, self.first.computed_s(now))
        """Seconds from its start until its first token; None: there is nothing to predict it from."""
        self.is_next = self.first.tokens_to_compute == 0
        """No other prompt was in front of it when it was placed."""
        self._computing = uncached_tokens(self.first, demand)
        """Tokens of its prompt that are to be computed, until its first token has come."""
        self._assigned = {self.first: self._computing}
        if self._bearer.info.role == "decode":
            self._assigned[self._bearer] = demand.prompt_tokens
        self._owner = demand.owner
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
    def tokens(self) -> int:
        """How many tokens it has brought."""
        return self.next_token - self._first_token

    def place(self, decode: Member) -> None:
        """This decode instance has granted its reservation. Nothing changes that: what is told later is old, or the same."""
        if self.decode is not None or not self.candidates:
            return
        self.decode = decode
        tokens = self._unassign(self._bearer)
        decode.assign(self._owner, tokens)
        self._assigned[decode] = tokens
        self._bearer.growth_tokens -= self._growth_tokens
        decode.growth_tokens += self._growth_tokens
        self._bearer = decode
        self.is_repeated = False
        self._answers.clear()

    def advance(self, tokens: int, now: float) -> None:
        """Take in that it brought this many tokens."""
        if self._computing:
            self._computed()
            self.first.computes_since_s = now
        if self.candidates and self.first in self._assigned:
            self._unassign(self.first)
        self._bearer.assigned_tokens += tokens
        self._assigned[self._bearer] += tokens
        self._grow_less(tokens)
        self.next_token += tokens

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
        return [*self.cancels(), self._forget()]

    def close(self) -> list[Send]:
        """Its ending came with its text, so the detokenizer knows it, unless it has opened the answer once more since."""
        return [self._forget()] if self._was_opened_again else []

    def _forget(self) -> Send:
        return Send(self.detokenizer, ForgetAnswer(key=self.key))

    def cancels(self, *, complete: bool = False) -> list[Send]:
        """complete: see `Cancel`."""
        return [Send(member.info.id, Cancel(key=self.key, complete=complete)) for member in self.members]

    def release(self, now: float) -> None:
        """Take its tokens off its members. Idempotent."""
        for member in list(self._assigned):
            self._unassign(member)
        if self._computing:
            if next(iter(self.first.computing)) == self.key:
                self.first.computes_since_s = now
            self._computed()
        self._grow_less(self._growth_tokens)

    def _unassign(self, member: Member) -> int:
        """Take it off this member. Returns how many tokens that was."""
        tokens = self._assigned.pop(member)
        member.unassign(self._owner, tokens)
        return tokens

    def _computed(self) -> None:
        """Nothing of its prompt is to be computed any more."""
        self.first.computed(self.key, self._owner, self._computing)
        self._computing = 0

    def _grow_less(self, tokens: int) -> None:
        """So many of the tokens that are still expected are not any more; all of them, if there are fewer."""
        fewer = min(tokens, self._growth_tokens)
        self._growth_tokens -= fewer
        self._bearer.growth_tokens -= fewer

    # --- probes --------------------------------------------------------------------------------------------------------

    def find_needed(self, name: InstanceId, incarnation: Incarnation) -> Member | None:
        """The needed member that this is, if it is one."""
        return next((member for member in self.needed if member.life == (name, incarnation)), None)

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
