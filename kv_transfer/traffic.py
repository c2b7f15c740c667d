"""What went over the links of an instance: one sum for each peer, and one over all.

Owns the sums. Knows the events of pushes; does not know requests, links or how anything is reported.
"""

from collections import defaultdict
from collections.abc import Container

from common.ids import InstanceId
from common.instance.ports import PushDone, PushFailed
from common.messages import LinkTraffic


class Traffic:
    """total: since the instance began, also to peers that have left."""

    def __init__(self) -> None:
        self.total = LinkTraffic()
        self._by_peer: defaultdict[InstanceId, LinkTraffic] = defaultdict(LinkTraffic)

    def to(self, peer: InstanceId) -> LinkTraffic:
        """Of this peer, since it was met."""
        return self._by_peer.get(peer, LinkTraffic())

    def pushed(self, peer: InstanceId, event: PushDone | PushFailed) -> None:
        """A push to the peer has ended."""
        self._add(peer, _done(event) if isinstance(event, PushDone) else _failed(event))

    def handed_off(self, peer: InstanceId, exposed_s: float) -> None:
        """A handoff to the peer was sent, so long after its first token."""
        self._add(peer, LinkTraffic(handoffs=1, exposed_seconds=exposed_s))

    def keep(self, peers: Container[InstanceId]) -> None:
        """Forget the others."""
        for gone in [peer for peer in self._by_peer if peer not in peers]:
            del self._by_peer[gone]

    def _add(self, peer: InstanceId, more: LinkTraffic) -> None:
        self._by_peer[peer] += more
        self.total += more


def _done(event: PushDone) -> LinkTraffic:
    return LinkTraffic(pushes=1, runs=event.runs, bytes_pushed=event.pushed_bytes, push_seconds=event.seconds)


def _failed(event: PushFailed) -> LinkTraffic:
    if not event.begun:
        return LinkTraffic(pushes_refused=1)
    return LinkTraffic(pushes_broken=1) if event.quiescent else LinkTraffic(pushes_unproven=1)
