"""A request on a prefill instance: what it adds to the shared record. Decides nothing: `scheduler.py` does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.errors import NoRoom, Overloaded
from common.ids import Incarnation, InstanceId
from common.instance.request import Request
from common.messages import Ending, Failed, Finished, LinkTraffic, Reserve, Terms


@dataclass(slots=True, eq=False)
class PrefillRequest(Request):
    """Its peer is the decode instance that is asked for a reservation, and then the one that its KV goes to.

    candidates: the decode instances that may still be asked, best first. full: those that had no room in this round. waits:
    whether its peer may let it wait for room. source_open: pushes may still read its pages.
    """

    candidates: tuple[InstanceId, ...] = ()
    full: tuple[InstanceId, ...] = ()
    waits: bool = False
    source_open: bool = False

    def reserve(self, writer: Incarnation, now: float) -> Reserve:
        """What asks its peer for a reservation. writer: this instance's life."""
        asked, rank, asked_s = self.asked, self.rank, self.times.asked_s
        return Reserve(
            key=self.key,
            incarnation=writer,
            prompt=asked.prompt,
            sampling=asked.sampling,
            sent_s=now,
            first=asked.first,
            terms=Terms(
                priority=rank.priority,
                age_s=max(0.0, now - rank.arrived_s),
                timeout_s=max(0.0, self.deadline_s - now),
                owner=self.owner,
            ),
            waits=self.waits,
            waited_s=0.0 if asked_s is None else now - asked_s,
            salt=asked.salt,
            cached_tokens=self.cached_tokens,
        )

    def ending_with(self, token: int, eos_token_ids: Sequence[int]) -> Ending | None:
        """How its answer ends if this is the token after its prompt; None when more follow."""
        sampling = self.asked.sampling
        if token in sampling.stop_token_ids or (token in eos_token_ids and not sampling.ignore_eos):
            return Finished(reason="stop", matched=token)
        return Finished(reason="length") if sampling.max_new_tokens == 1 else None

    def handed_off(self, now: float) -> LinkTraffic:
        """Handoff was sent. Returns what that adds to the traffic of the link."""
        times = self.times
        assert times.last_chunk_s is not None and times.pages_had is not None
        times.handed_off_s, times.pages_pushed = now, self.pages - times.pages_had
        return LinkTraffic(handoffs=1, exposed_seconds=now - times.last_chunk_s)

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
