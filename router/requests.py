"""A request at the router: what was asked, and the places that open requests share.

Owns the rule by which the keys of the API share places. Does not know HTTP or messages.

The rule is that of dynamic thresholds (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches",
1998): a key gets another place while it has fewer than four times as many as are free. So one key alone takes 4/5 of all places,
two that both want more get 4/9 each, and some places stay free for a key that comes later. As a key with many places gives some
back, those with fewer get them. Nothing depends on how many keys there are, or on which of them are in use.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.errors import Overloaded
from common.ids import ID_BYTES, RequestId
from common.instance.waiting_line import has_place
from common.pages.radix_cache import BlockNames
from common.sampling_params import SamplingParams


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
        taken, mine = self._taken.total(), self._taken[owner]
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
    adapter: str = ""
    """The name of the LoRA adapter that computes it beside the model; "": none."""
    blocks: BlockNames | None = None
    """Names of the prompt's blocks; None: they were not named."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // ID_BYTES

    @property
    def can_share(self) -> bool:
        """Whether a cached prompt helps: not where something is needed of each of its tokens."""
        return self.sampling.prompt_logprobs is None and self.sampling.pooling is None
