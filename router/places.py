"""Places for open requests: how many there are, and how the keys of the API share them.

Owns the counts and the rule. Does not know what a request is.

The rule is that of dynamic thresholds (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches",
1998): a key gets another place while it has fewer than four times as many as are free. So one key alone takes 4/5 of all places,
two that both want more get 4/9 each, and some places stay free for a key that comes later. As a key with many places gives some
back, those with fewer get them. Nothing depends on how many keys there are, or on which of them are in use.
"""

from collections import Counter
from collections.abc import Iterable

from common.errors import Overloaded
from common.instance.shares import has_place


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

    def leave(self, owner: str, count: int = 1) -> None:
        self._taken[owner] -= count
        assert self._taken[owner] >= 0
