"""The memberships of an instance: one at each router that it was told of.

Owns which router is which: it has an address, and each life of it a name of its own. Opens no socket, reads no clock.

    Register(address) ─► Welcome(router, address) ─► Met: its requests are served     at other times Welcome comes without address
    Welcome of another life, Refused, ABANDON_AFTER_S of silence, or its process is gone ─► Lost: its requests end

An instance is ready when one router has welcomed it. The others may come later, or be refused their help: it goes on registering.
So it does when all refuse it later: the first that came to a router that has just started may be the odd one.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from common.errors import PeerRefused
from common.ids import InstanceId
from common.instance.membership import Membership
from common.messages import InstanceInfo, Refused, Welcome
from common.messages.base import fits

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Met:
    """A life of a router has welcomed us, or its detokenizers have moved. at: the membership."""

    at: Membership
    router: InstanceId
    detokenizers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """That life is gone, or does not want us any more."""

    at: Membership
    router: InstanceId
    detokenizers: tuple[str, ...]


RouterNews: TypeAlias = Met | Lost


class Memberships:
    """addresses: of the routers. Raises PeerRefused, from `receive` when no router wants us or ever has, one says that a newer
    life has taken our place, or two addresses lead to one router at the start, and from `check` when none has answered within
    `startup_timeout_s`."""

    def __init__(self, info: InstanceInfo, addresses: Sequence[str], startup_timeout_s: float, now: float) -> None:
        self.info = info
        self._all = [Membership(info, address, now) for address in addresses]
        self._started_s = now + startup_timeout_s
        """From then on it is no mistake of the start when two addresses lead to one router."""
        self._give_up_s: float | None = self._started_s
        self.stale = 0
        """Messages from lives of routers that are over, or to another life of ours."""

    def __iter__(self) -> Iterator[Membership]:
        return iter(self._all)

    @property
    def joined(self) -> bool:
        """Whether a router answers us."""
        return any(membership.joined for membership in self._all)

    @property
    def next_deadline(self) -> float:
        return min(membership.next_deadline for membership in self._all)

    def of(self, router: InstanceId) -> Membership | None:
        """Where this life of a router has welcomed us."""
        return next((one for one in self._all if one.welcome is not None and one.welcome.router == router), None)

    def receive(self, message: Welcome | Refused, now: float) -> list[RouterNews]:
        if isinstance(message, Refused):
            return self._refused(message, now)
        known = self.of(message.router)
        at = next((one for one in self._all if one.address == message.address), known)
        if at is None or at.is_over(message.router, now):
            self.stale += 1  # from a life that is over, or from nobody whom we asked
            return []
        if known is not None and known is not at:
            return self._twice(known, at, message.router, now)
        self._give_up_s, before = None, at.welcome
        at.receive(message, now)
        met = Met(at, message.router, message.detokenizers)
        if before is not None and before.router == message.router:
            return [met] if before.detokenizers != message.detokenizers else []
        _log.info("welcomed by %s at %s", message.router, at.address)
        return [met] if before is None else [Lost(at, before.router, before.detokenizers), met]

    def _twice(self, known: Membership, at: Membership, router: InstanceId, now: float) -> list[RouterNews]:
        """A router that is known answers at another address too. Later than at the start it is ignored: names may be moved."""
        reason = f"it is {router}, which has welcomed us at {known.address} already"
        if now < self._started_s and not at.was_welcome:
            raise PeerRefused(f"--router names one router twice: {known.address} and {at.address} are both {router}")
        if at.refusal != reason:
            at.refusal = reason
            _log.warning("the router at %s is of no use: %s", at.address, reason)
        return []

    def _refused(self, message: Refused, now: float) -> list[RouterNews]:
        if not fits(message.incarnation, self.info.incarnation) or message.id not in ("", self.info.id):
            self.stale += 1
            return []
        if message.final:
            raise PeerRefused(f"a router refused {self.info.id} for good: {message.reason}")
        at = next((one for one in self._all if one.address == message.address or len(self._all) == 1), None)
        if at is None:
            return []
        is_news, at.refusal = at.refusal != message.reason, message.reason
        never_welcome = not any(one.was_welcome for one in self._all)
        if never_welcome and all(one.refusal is not None for one in self._all):
            reasons = (f"the router at {one.address} refused {self.info.id}: {one.refusal}" for one in self._all)
            raise PeerRefused("; ".join(reasons))
        if is_news:
            _log.warning("the router at %s refused us: %s", at.address, message.reason)
        return self._lose(at, now)

    def gone(self, names: Iterable[InstanceId], now: float) -> list[RouterNews]:
        """The processes of these routers, as the mail calls them, are proven to be gone."""
        named = set(names)
        return [news for one in self._all if one.name in named for news in self._lose(one, now)]

    def check(self, now: float) -> list[RouterNews]:
        """The routers that have been silent for too long."""
        if self._give_up_s is not None and now >= self._give_up_s:
            asked = ", ".join(one.address if one.refusal is None else f"{one.address} ({one.refusal})" for one in self._all)
            raise PeerRefused(
                f"no router answered the registration in time, of {asked}: is --router right, is it running, and do both sides "
                "have the same --cluster-key, or none? (the log of a router counts those that it turns away)"
            )
        return [news for one in self._all if one.abandoned for news in self._lose(one, now)]

    def hurry(self, now: float) -> None:
        """Something changed that the routers should know soon."""
        for membership in self._all:
            membership.hurry(now)

    def _lose(self, at: Membership, now: float) -> list[RouterNews]:
        welcome = at.welcome
        if welcome is None:
            return []
        at.end(now)
        _log.info("%s at %s is gone", welcome.router, at.address)
        return [Lost(at, welcome.router, welcome.detokenizers)]
