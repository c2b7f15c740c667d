"""A request on a prefill instance: what it adds to the shared record. Decides nothing: `scheduler.py` does."""

from collections.abc import Callable
from dataclasses import dataclass

from common.errors import NoRoom, Overloaded
from common.ids import InstanceId
from common.instance.request import Request
from common.messages import Failed


@dataclass(slots=True, eq=False)
class PrefillRequest(Request):
    """Its peer is the decode instance that is asked for a reservation, and then the one that its KV goes to.

    candidates: the decode instances that may still be asked, best first. full: those that had no room in this round. waits:
    whether its peer may let it wait for room. asked_s: when the first of them was asked. source_open: pushes may still read its
    pages. sampled_s: when the first token was sampled. Both times are on this instance's clock.
    """

    candidates: tuple[InstanceId, ...] = ()
    full: tuple[InstanceId, ...] = ()
    waits: bool = False
    asked_s: float = 0.0
    source_open: bool = False
    sampled_s: float = 0.0

    def choose(self, is_there: Callable[[InstanceId], bool]) -> InstanceId | None:
        """Whom to ask now; None when nobody is left. Each candidate that is there is asked in turn, and has no time to wait for
        room. Then the best of them is asked again, and the request waits there for a while: that ends the round. One that is
        alone is asked to let it wait at once."""
        able = [name for name in self.candidates if is_there(name)]
        untried = [name for name in able if name not in self.full]
        self.waits = not untried or len(able) == 1
        return next(iter(untried or able), None)

    def refused(self, by: InstanceId, failure: Failed) -> None:
        """A candidate grants nothing. If it let the request wait and got no room, the next round begins, with the others; this
        goes on until the request's deadline. One whose waiting line is full then is asked no more."""
        if self.waits and failure.kind == NoRoom.kind:
            self.full = (by,)
        elif not self.waits and failure.kind in (NoRoom.kind, Overloaded.kind):
            self.full += (by,)
        else:
            self.candidates = tuple(name for name in self.candidates if name != by)
