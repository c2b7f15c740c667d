"""One attempt at serving a request: who serves it, what it has brought, and what its members say of it.

Owns the tokens that it assigns to its members, until each is released. Does not know texts, clients, or why there is another
attempt after it.

    first ──first token──► decode ──later tokens──►        (decode is None: first alone)
    └─ needed until token 2 proves the handoff ─┘└─ needed
"""

from dataclasses import dataclass
from enum import StrEnum

from common.ids import DETOKENIZER, Incarnation, InstanceId, Key
from common.instance.ports import Send
from common.messages import Cancel, Failed, ForgetAnswer
from router.members import Member
from router.policy import Choice


class ResumeReason(StrEnum):
    """Why a request is resumed."""

    LOST_INSTANCE = "lost_instance"
    FAILED_ATTEMPT = "failed_attempt"
    PREEMPTED = "preempted"
    LOST_MESSAGES = "lost_messages"
    DETOKENIZER = "detokenizer"


@dataclass(frozen=True, slots=True)
class Setback:
    """Why an attempt is over. failed: what the client is told when there is no further attempt. at: where the next one had
    better not be."""

    reason: ResumeReason
    failed: Failed
    at: tuple[Member, ...] = ()


class Attempt:
    """first_token: number of the first token that it is to bring. prompt_tokens: of the prompt that its members get."""

    def __init__(self, key: Key, choice: Choice, first_token: int, prompt_tokens: int, now: float) -> None:
        self.key = key
        self.first, self.decode = choice.first, choice.decode
        self.next_token = first_token
        self.news_s = now
        """Since when it is silent."""
        self._first_token = first_token
        self._assigned: dict[Member, int] = {}
        self._standings: dict[Member, int | None] = {}
        self._suspected = False
        for member in self.members:
            self._assign(member, prompt_tokens)

    @property
    def members(self) -> tuple[Member, ...]:
        return (self.first,) if self.decode is None else (self.first, self.decode)

    @property
    def needed(self) -> tuple[Member, ...]:
        """Those without whom it cannot go on. Its second token proves that the handoff is done: from then on the prefill
        instance is not needed."""
        return (self.decode,) if self.decode is not None and self.tokens >= 2 else self.members

    @property
    def tokens(self) -> int:
        """How many it has brought."""
        return self.next_token - self._first_token

    def advance(self, tokens: int, now: float) -> None:
        """So many tokens came."""
        if self.decode is not None:
            self._release(self.first)
        self._assign(self.decode or self.first, tokens)
        self.next_token += tokens
        self.hear(now)

    def hear(self, now: float) -> None:
        """A token came, or none could come: its silence is counted from now."""
        self.news_s = now
        self._suspected = False
        self._standings.clear()

    def withdraw(self) -> list[Send]:
        """It is over, though others believe it to be open. Also to a member that was lost: it may only be silent, and then the
        message waits for it."""
        return [*self.cancels(), Send(DETOKENIZER, ForgetAnswer(key=self.key))]

    def cancels(self) -> list[Send]:
        return [Send(member.info.id, Cancel(key=self.key)) for member in self.members]

    def release(self) -> None:
        """Take its tokens off its members."""
        for member in self.members:
            self._release(member)

    def _assign(self, member: Member, tokens: int) -> None:
        member.assigned_tokens += tokens
        self._assigned[member] = self._assigned.get(member, 0) + tokens

    def _release(self, member: Member) -> None:
        member.assigned_tokens -= self._assigned.pop(member, 0)

    # --- probes --------------------------------------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Its members are asked again what they know."""
        self._suspected = self._is_suspect()
        self._standings.clear()

    def asked(self, name: InstanceId, incarnation: Incarnation) -> Member | None:
        """The member of that name, if it is one that is asked."""
        return next((member for member in self.needed if member.life == (name, incarnation)), None)

    def answer(self, member: Member, next_token: int | None) -> bool:
        """Take in what a member knows: the token that it emits next, or that it knows nothing.

        Returns whether messages of this attempt were lost: what two rounds in a row say is not merely on its way.
        """
        self._standings[member] = next_token
        return self._suspected and self._is_suspect()

    def _is_suspect(self) -> bool:
        """Whether tokens were sent that did not come, or nobody is about to send the next one: whoever knows of it at all is a
        decode instance that waits for a handoff of which its writer knows nothing."""
        if any(next_token is not None and next_token > self.next_token for next_token in self._standings.values()):
            return True
        if len(self._standings) < len(self.needed):
            return False
        return all(
            next_token is None or (member is self.decode and next_token == self._first_token)
            for member, next_token in self._standings.items()
        )
