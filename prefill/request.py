"""A request on a prefill instance: what it adds to the shared record. Decides nothing: `scheduler.py` does."""

from collections.abc import Callable
from dataclasses import dataclass

from common.ids import InstanceId
from common.instance.request import Request


@dataclass(slots=True, eq=False)
class PrefillRequest(Request):
    """Its peer is the decode instance that is asked for a reservation, and then the one that its KV goes to.

    candidates: the decode instances that may still be asked, best first. full: those that had no room at once. waits: whether
    its peer may let it wait for room. source_open: pushes may still read its pages. sampled_s: when the first token was sampled,
    on this instance's clock.
    """

    candidates: tuple[InstanceId, ...] = ()
    full: tuple[InstanceId, ...] = ()
    waits: bool = False
    source_open: bool = False
    sampled_s: float = 0.0

    def choose(self, is_there: Callable[[InstanceId], bool]) -> InstanceId | None:
        """Whom to ask now; None when nobody is left. Each candidate that is there is asked in turn, and has no time to wait for
        room. Then the best of them is asked again, and the request waits. One that is alone is asked to let it wait at once."""
        able = [name for name in self.candidates if is_there(name)]
        untried = [name for name in able if name not in self.full]
        self.waits = not untried or len(able) == 1
        return next(iter(untried or able), None)

    def refused(self, by: InstanceId, *, for_now: bool) -> None:
        """A candidate grants nothing. for_now: it has no room, and may be asked again to let the request wait."""
        if for_now and not self.waits:
            self.full += (by,)
        else:
            self.candidates = tuple(name for name in self.candidates if name != by)
