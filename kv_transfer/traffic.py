"""What went over the links of an instance: one total for each peer, and one over all.

Owns the totals. Knows the events of pushes. Does not know requests, links or how anything is reported.
"""

from collections import defaultdict
from collections.abc import Container

from common.ids import InstanceId
from common.instance.ports import PushDone, PushFailed
from common.messages import LinkTraffic


class Traffic:
    """total: since the instance began, including peers that have left."""

    def __init__(self) -> None:
        self.total = LinkTraffic()
        self._by_peer: defaultdict[InstanceId, LinkTraffic] = defaultdict(LinkTraffic)

    def to(self, peer: InstanceId) -> LinkTraffic:
        """The total of this peer since it was first met."""
        return self._by_peer.get(peer, LinkTraffic())

    def add(self, peer: InstanceId, more: LinkTraffic) -> None:
        self._by_peer[peer] += more
        self.total += more

    def keep(self, peers: Container[InstanceId]) -> None:
        """Forget all other peers."""
        for gone in [peer for peer in self._by_peer if peer not in peers]:
            del self._by_peer[gone]


def traffic_of(event: PushDone | PushFailed) -> LinkTraffic:
    """What one push adds to the totals."""
    match event:
        case PushDone():
            return LinkTraffic(pushes=1, runs=event.runs, bytes_pushed=event.pushed_bytes, push_seconds=event.seconds)
        case PushFailed(begun=False):
            return LinkTraffic(pushes_refused=1)
        case PushFailed(quiescent=True):
            return LinkTraffic(pushes_broken=1)
        case PushFailed():
            return LinkTraffic(pushes_unproven=1)
