"""The gateway: the core, its mail and its clock, joined in one event loop.

Owns the delivery of what the core decides, and the one timer. Decides nothing. Everything runs on the loop's thread and nothing
here waits.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from common.ids import DETOKENIZER, InstanceId, RequestId
from common.instance.ports import Mail, Send
from common.messages import RouterInbox
from router.core import RouterCore
from router.outbox import Outbox
from router.requests import RequestSpec


class Gateway:
    """The core as the HTTP side sees it. Whoever owns the mail calls `pump` when something has arrived."""

    def __init__(self, core: RouterCore, mail: Mail[RouterInbox], clock: Callable[[], float]) -> None:
        self.core = core
        self.clock = clock
        self.mail = mail
        self._routes: dict[InstanceId, str] = {}
        self._routes_version = 0
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")

    def submit(self, specs: Sequence[RequestSpec], outbox: Outbox, received_at: float) -> None:
        """Dispatch every choice of a client's request, or none. Raises Overloaded, Unavailable, BadRequest."""
        self._deliver(self.core.submit(specs, outbox, received_at, self.clock()))

    def cancel(self, request_ids: Iterable[RequestId]) -> None:
        """The client of these requests has gone; those that have ended are passed over."""
        self._deliver(self.core.cancel(request_ids, self.clock()))

    def drain(self, instance: InstanceId) -> None:
        """Let the instance leave in order. Raises UnknownInstance."""
        self._deliver(self.core.drain(instance))

    def detokenizer_moved(self, address: str) -> None:
        """Another detokenizer has taken the place of the former. Its route comes first: it is told all that is open."""
        if not self._closed:
            self.mail.route(DETOKENIZER, address)
            self._deliver(self.core.detokenizer_moved(address, self.clock()))

    def pump(self) -> None:
        """Take in everything that has arrived."""
        now = self.clock()
        for _, message in self.mail.receive():
            self._deliver(self.core.receive(message, now))

    def connection_broken(self, instance: InstanceId) -> None:
        """The instance's side closed the connection to its inbox."""
        if not self._closed:
            self.core.connection_broken(instance, self.clock())
            self._set_timer()

    def close(self) -> None:
        """Stop the timer. Idempotent."""
        self._closed = True
        self._stop_timer()

    def _deliver(self, sends: Iterable[Send]) -> None:
        if self.core.addresses_version != self._routes_version:
            self._learn_routes()
        for send in sends:
            self.mail.send(send.to, send.message)
        self._set_timer()

    def _learn_routes(self) -> None:
        """The detokenizer's route is that which its starter gave: no instance can take it over."""
        self._routes_version = self.core.addresses_version
        addresses = {name: address for name, address in self.core.addresses().items() if name != DETOKENIZER}
        for name in self._routes.keys() - addresses.keys():
            self.mail.route(name, None)
        for name, address in addresses.items():
            if self._routes.get(name) != address:
                self.mail.route(name, address)
        self._routes = addresses

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        """Be called when the earliest deadline passes. A deadline that moved away costs one call that does nothing."""
        deadline = self.core.next_deadline()
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        self._stop_timer()
        self._timer_at = deadline
        self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - self.clock()), self._tick)

    def _tick(self) -> None:
        """What has arrived is taken in first: however long this loop was held up, whoever wrote in time is not silent."""
        self._timer = None
        self.pump()
        self._deliver(self.core.tick(self.clock()))
