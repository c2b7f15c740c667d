"""The links of a prefill instance to the decode instances that it writes to.

Owns what is known of each link, and what of it the router has not been told yet. Does not know requests or pushes; making the
links is the transport's work.
"""

import logging
from collections.abc import Callable

import msgspec

from common.ids import Incarnation, InstanceId
from common.instance.ports import Connect, PeersChanged
from common.messages import LinkInfo, LinkReport, LinkTraffic

_log = logging.getLogger(__name__)


class LinkBook:
    """lost: peers whose link is down. version: of the last report of changes."""

    def __init__(self, instance: InstanceId, incarnation: Incarnation) -> None:
        self._id, self._incarnation = instance, incarnation
        self._known: dict[InstanceId, LinkInfo] = {}
        self._untold: dict[InstanceId, None] = {}
        self.lost: set[InstanceId] = set()
        self.version = 0

    def meet(self, change: PeersChanged) -> Connect:
        """Other peers: links to new lives are to be made, links to those that left to be closed."""
        for gone in change.left:
            self._known.pop(gone, None)
            self._untold.pop(gone, None)
            self.lost.discard(gone)
        for peer in change.joined:
            self._note(LinkInfo(peer=peer.id, incarnation=peer.incarnation, state="connecting"))
        return Connect(change.joined, change.left)

    def changed(self, link: LinkInfo) -> None:
        """Note the new state, unless the peer has left or has come back as another life."""
        if link.state == "lost":
            self.lost.add(link.peer)
        else:
            self.lost.discard(link.peer)
        known = self._known.get(link.peer)
        if known is None or known.incarnation != link.incarnation:
            return
        self._note(link)
        if link.state != "connecting":
            speed = "" if link.bytes_per_s is None else f", {link.bytes_per_s / 1e9:.2f} GB/s"
            _log.info("link to %s %s: %s%s", link.peer, link.state, link.detail, speed)
        if link.warning:
            _log.warning("link to %s is %s", link.peer, link.warning)

    def news(self) -> LinkReport | None:
        """What has changed since the last report; None: nothing."""
        if not self._untold:
            return None
        links = tuple(self._known[peer] for peer in self._untold)
        self._untold.clear()
        self.version += 1
        return LinkReport(id=self._id, incarnation=self._incarnation, version=self.version, since=self.version - 1, links=links)

    def all_links(self, traffic_to: Callable[[InstanceId], LinkTraffic]) -> LinkReport:
        """Every link with its traffic. What has changed since the last report of changes comes in the next one too."""
        links = tuple(msgspec.structs.replace(link, traffic=traffic_to(peer)) for peer, link in self._known.items())
        return LinkReport(id=self._id, incarnation=self._incarnation, version=self.version, links=links)

    def _note(self, link: LinkInfo) -> None:
        self._known[link.peer] = link
        self._untold[link.peer] = None
