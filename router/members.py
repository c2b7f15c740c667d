"""A member of the fleet: one incarnation of an instance, as it reported itself last.

Owns what it takes for a member to get requests. Does not know who else is a member, nor requests: a member only carries the
tokens that the request book has assigned to it.
"""

from dataclasses import dataclass, field
from typing import Literal

from common.ids import InstanceId, Life
from common.messages import Counters, InstanceInfo, LinkInfo, Load

QUARANTINE_DIVISOR = 4
"""An instance takes no requests while more than one in so many of its pages is quarantined: transfers fail there, and little
memory is left for others."""
STUCK_S = 30.0
"""A step or a transfer that does not move for longer will not."""

"""Which incarnation of which instance."""
State = Literal["live", "draining", "stuck", "quarantined"]


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a member takes no requests."""

    state: State
    reason: str


@dataclass(slots=True, eq=False)
class Member:
    """One incarnation of an instance in the fleet.

    told_to_drain: by this router; reports_draining: by the member itself.
    assigned_tokens: tokens of the router's open requests that this member works on or will, kept by the request book.
    chosen: number of the last choice that fell on it; among equals the one that waited longest is next.
    """

    info: InstanceInfo
    load: Load
    counters: Counters = field(default_factory=Counters)
    links: dict[InstanceId, LinkInfo] = field(default_factory=dict)
    told_to_drain: bool = False
    reports_draining: bool = False
    assigned_tokens: int = 0
    chosen: int = 0

    @property
    def life(self) -> Life:
        return Life(self.info.id, self.info.incarnation)

    @property
    def draining(self) -> bool:
        return self.told_to_drain or self.reports_draining

    @property
    def stuck(self) -> bool:
        """A step or transfer of it does not move, though it reports: what it was given will not be served."""
        return max(self.load.oldest_step_s, self.load.oldest_transfer_s) > STUCK_S

    @property
    def trouble(self) -> Trouble | None:
        """Why it takes no requests; None when it does."""
        load, total_pages = self.load, self.info.pool.total_pages
        if self.draining:
            return Trouble("draining", "it is leaving the fleet")
        if self.stuck:
            what, seconds = max(("step", load.oldest_step_s), ("transfer", load.oldest_transfer_s), key=lambda age: age[1])
            return Trouble("stuck", f"its oldest {what} has not moved for {seconds:.0f} s")
        if load.pages_quarantined * QUARANTINE_DIVISOR > total_pages:
            return Trouble("quarantined", f"{load.pages_quarantined} of {total_pages} pages are quarantined")
        return None

    @property
    def takes_requests(self) -> bool:
        return self.trouble is None

    @property
    def load_tokens(self) -> int:
        """Tokens it has to do: what it reported, or what was assigned to it since, whichever is more."""
        return max(self.load.waiting_tokens + self.load.running_tokens, self.assigned_tokens)

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose KV fits its memory when it is empty."""
        return self.info.pool.total_pages * self.info.pool.layout.page_size

    def linked(self, peer: "Member") -> bool:
        """Whether it reports a ready link to this incarnation of the peer."""
        link = self.links.get(peer.info.id)
        return link is not None and link.incarnation == peer.info.incarnation and link.state == "ready"

    def ready_links(self) -> frozenset[Life]:
        """The peers to which it reports a ready link."""
        return frozenset(Life(link.peer, link.incarnation) for link in self.links.values() if link.state == "ready")
