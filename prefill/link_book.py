"""The links of a prefill instance to the decode instances that it writes to.

Owns what is known of each link, as it is reported. Does not know requests or pushes; making the links is the transport's work.
"""

import logging

from common.ids import InstanceId
from common.instance.ports import Connect
from common.messages import LinkInfo, Peers

_log = logging.getLogger(__name__)


class LinkBook:
    """known: the link to each peer. lost: peers whose link is down."""

    def __init__(self) -> None:
        self.known: dict[InstanceId, LinkInfo] = {}
        self.lost: set[InstanceId] = set()

    def meet(self, peers: Peers) -> Connect:
        """The set of peers is new: links to new lives of peers are to be made."""
        before, self.known = self.known, {}
        for peer in peers.instances:
            link = before.get(peer.id)
            if link is None or link.incarnation != peer.incarnation:
                link = LinkInfo(peer=peer.id, incarnation=peer.incarnation, state="connecting")
            self.known[peer.id] = link
        self.lost &= self.known.keys()
        return Connect(peers.instances)

    def changed(self, link: LinkInfo) -> None:
        """Note the new state, unless the peer has left or has come back as another life."""
        if link.state == "lost":
            self.lost.add(link.peer)
        else:
            self.lost.discard(link.peer)
        known = self.known.get(link.peer)
        if known is None or known.incarnation != link.incarnation:
            return
        self.known[link.peer] = link
        if link.state != "connecting":
            speed = "" if link.bytes_per_s is None else f", {link.bytes_per_s / 1e9:.2f} GB/s"
            _log.info("link to %s %s: %s%s", link.peer, link.state, link.detail, speed)
        if link.warning:
            _log.warning("link to %s is %s", link.peer, link.warning)
