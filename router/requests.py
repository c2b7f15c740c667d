"""A request at the router: what was asked, what its client has got so far, and the places that open requests share.

Owns the tokens and texts that were delivered, so that the next attempt is prompt + tokens so far, and the rule by which the keys
of the API share places. Decides nothing: the request book says when an attempt starts and ends. Does not know HTTP or messages.

The rule is that of dynamic thresholds (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches",
1998): a key gets another place while it has fewer than four times as many as are free. So one key alone takes 4/5 of all places,
two that both want more get 4/9 each, and some places stay free for a key that comes later. As a key with many places gives some
back, those with fewer get them. Nothing depends on how many keys there are, or on which of them are in use.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from common.errors import Overloaded
from common.ids import ID_BYTES, Life, RequestId, pack_ids
from common.instance.waiting_line import has_place
from common.pages.radix_cache import BlockNames
from common.sampling_params import SamplingParams
from router.attempts import Attempt, ResumeReason, Setback
from router.outbox import ClientRequest
from router.timelines import RequestTimes


class Places:
    """limit: how many there are. what: is open there, for messages. An owner is a key's name; "" is everybody without a key, who
    may take all places."""

    def __init__(self, limit: int, what: str) -> None:
        self._limit = limit
        self._what = what
        self._taken: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._taken.total()

    def of_keys(self) -> Iterable[tuple[str, int]]:
        """How many each key has that ever had one."""
        return ((owner, count) for owner, count in self._taken.items() if owner)

    def take(self, owner: str, count: int = 1) -> None:
        """Whoever takes places must `leave` them. Raises Overloaded, and takes none, when so many are not free for this owner."""
        self.require(owner, count)
        self._taken[owner] += count

    def require(self, owner: str, count: int = 1) -> None:
        """Raises Overloaded when so many are not free for this owner."""
        taken, mine = len(self), self._taken[owner]
        free = self._limit - taken
        if count > free:
            raise Overloaded(f"the router has {taken} of at most {self._limit} {self._what} open: try again shortly")
        if owner and not has_place(free, mine, count):
            own = f"your key has {mine} {self._what} open"
            raise Overloaded(f"{own}, and {free} of {self._limit} places are left for all: try again when some have ended")

    @contextmanager
    def held(self, owner: str, count: int) -> Iterator[None]:
        """Have places meanwhile. Raises Overloaded."""
        self.take(owner, count)
        try:
            yield
        finally:
            self.leave(owner, count)

    def leave(self, owner: str, count: int = 1) -> None:
        self._taken[owner] -= count
        assert self._taken[owner] >= 0


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One choice of a client's request."""

    request_id: RequestId
    index: int
    """Its number in the answer."""
    prompt: bytes
    """Packed token ids."""
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    priority: int = 0
    """Lower is earlier."""
    timeout_s: float | None = None
    """Seconds from its arrival; None: the router's own limit."""
    skip_special_tokens: bool = True
    """See `ExpectAnswer`, also for `include_stop` and `shown`."""
    include_stop: bool = False
    owner: str = ""
    """Name of the client's API key; "": it has none."""
    shown: tuple[int, ...] = ()
    salt: str = ""
    """See `Generate`."""
    session: str = ""
    """See `Demand`."""
    blocks: BlockNames | None = None
    """Names of the prompt's blocks; None: they were not named."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // ID_BYTES

    @property
    def can_share(self) -> bool:
        """Whether a cached prompt helps: not where something is needed of each of its tokens."""
        return self.sampling.prompt_logprobs is None and self.sampling.pooling is None


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
    attempt: Attempt | None = None
    """The present one; None while the request waits for an instance."""
    attempts: int = 0
    """How many were started."""
    preemptions: int = 0
    """How many of them ended because their memory was needed."""
    fruitless: int = 0
    """How many in a row failed without a token."""
    avoid: set[Life] = field(default_factory=set)
    """Where attempts failed."""
    crowded: set[Life] = field(default_factory=set)
    """Where the last one was preempted."""
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """What was delivered, in pieces."""
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
    def failed_attempts(self) -> int:
        """How many attempts have failed, when none is open. Preemptions need no limit: they end with the request's deadline, and
        they become rarer as it grows older than the others."""
        return self.attempts - self.preemptions

    @property
    def prompt(self) -> bytes:
        """Packed token ids of the next attempt's prompt."""
        return self.spec.prompt + pack_ids(self.token_ids) if self.token_ids else self.spec.prompt

    @property
    def prompt_tokens(self) -> int:
        """Length of the next attempt's prompt."""
        return self.spec.prompt_tokens + len(self.token_ids)

    def block_names(self, page_size: int) -> Sequence[int]:
        """Names of the blocks of the next attempt's prompt. They are kept: only tokens that have come since are named."""
        blocks = self._blocks or self.spec.blocks
        if blocks is None or blocks.page_size != page_size:
            blocks = BlockNames.of(self.spec.prompt, page_size, self.spec.salt)
        if blocks.tokens < self.prompt_tokens:
            blocks = blocks.extended(pack_ids(self.token_ids[blocks.tokens - self.prompt_tokens :]))
        self._blocks = blocks
        return blocks.names

    @property
    def remaining_tokens(self) -> int:
        return self.spec.sampling.max_new_tokens - len(self.token_ids)

    def begin(self, attempt: Attempt, now: float) -> None:
        """The request's next attempt begins."""
        self.attempt = attempt
        self.times.dispatched(self.attempts, attempt.first.info.id, attempt.predicted_s, now)
        self.attempts += 1

    def set_back(self, attempt: Attempt, setback: Setback, now: float) -> None:
        """The attempt is over, but the request is not. A preemption is no failure: the instance is well, only full for now."""
        attempt.release(now)
        self.attempt = None
        self.times.resumed(setback.reason, setback.failed, now)
        places = {member.life for member in setback.at}
        is_preemption = setback.reason is ResumeReason.PREEMPTED
        self.preemptions += is_preemption
        self.crowded = places if is_preemption else set()
        self.avoid |= set() if is_preemption else places
        if attempt.tokens:
            self.fruitless = 0
        elif not is_preemption:
            self.fruitless += 1
        if self.gap_since_s is None:
            self.gap_since_s = now if self.times.last_token_s is None else self.times.last_token_s
