"""The gateway: the core, its mail and its clock, joined in one event loop.

A turn of the loop takes in mail for TURN_S at most, so that everything else on the loop gets its share. While mail is left,
nobody is taken for silent.

Owns the delivery of what the core decides, and the one timer. Decides nothing. Everything here runs on the loop's thread and
nothing blocks.
"""

import asyncio
from collections.abc import Callable, Iterable

from common.errors import DeadlinePassed
from common.ids import InstanceId
from common.instance.ports import Mail, Send
from common.messages import LinkReport, RouterInbox
from router.core import RouterCore

TURN_S, TURN_MESSAGES = 0.01, 1_024
"""How long one turn takes in mail, and how many messages at most."""
LINKS_S = 2.0
"""How long an instance may take to tell of its links."""
BACKLOG_S = 30.0
"""A router that has not caught up with its mail for this long takes silence for what it is: what is left to read cannot be from
those that it waits for, because mail is read from all of them in turn."""


class Gateway:
    """The core as the HTTP side sees it: use `core` with `clock()`, and `deliver` what it decides. The mail's owner calls `pump`
    when something has arrived."""

    def __init__(self, core: RouterCore, mail: Mail[RouterInbox], clock: Callable[[], float]) -> None:
        self.core = core
        self.clock = clock
        self.mail = mail
        self.turn = 0
        """Counts the turns of mail."""
        self._closed = False
        self._behind_since_s: float | None = None
        """Since when mail has been left unread at the end of each turn; None: everything that had arrived was read."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")

    def detokenizer_moved(self, shard: int, address: str) -> None:
        """A new detokenizer has replaced the former one. Its route comes first, because it is told about all open requests."""
        if not self._closed:
            self.mail.route(self.core.detokenizer_names[shard], address)
            self.deliver(self.core.detokenizer_moved(shard, address, self.clock()))

    def pump(self) -> None:
        """Take in what has arrived, within the limits of a turn. Each message counts as heard when it is read: it may have waited
        long. The mail's owner calls again while mail is left."""
        self.turn += 1
        self._take_in(TURN_MESSAGES)
        self.deliver(self.core.flush(self.clock()))

    def _take_in(self, most: int) -> None:
        """most: so many messages, unless TURN_S is over before."""
        began_s = self.clock()
        for _ in range(most):
            mail = self.mail.receive(1)
            if not mail:
                self._behind_since_s = None
                return
            now = self.clock()
            self._send(self.core.receive(mail[0][1], now))
            if now - began_s >= TURN_S:
                break
        if self._behind_since_s is None:
            self._behind_since_s = began_s

    async def links_of(self, instance: InstanceId) -> LinkReport:
        """All links of a prefill instance, with their traffic, as it tells them now. Raises UnknownInstance, BadRequest,
        DeadlinePassed."""
        told: asyncio.Future[LinkReport] = asyncio.get_running_loop().create_future()

        def answer(report: LinkReport) -> None:
            if not told.done():
                told.set_result(report)

        self.deliver(self.core.fleet.ask_links(instance, answer))
        try:
            return await asyncio.wait_for(told, LINKS_S)
        except TimeoutError as error:
            raise DeadlinePassed(f"{instance} did not tell of its links within {LINKS_S:g} s") from error

    def connection_broken(self, instance: InstanceId) -> None:
        """The instance closed the connection to its inbox."""
        if not self._closed:
            self.core.fleet.connection_broken(instance, self.clock())
            self.deliver(())

    def deliver(self, sends: Iterable[Send]) -> None:
        """Send what the core decided, and set the timer to its earliest deadline. Call it after everything that changes the core.

        A deadline that moves later costs one call of the timer that does nothing.
        """
        self._send(sends)
        deadline = self.core.next_deadline()
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - self.clock()), self._tick)

    def close(self) -> None:
        """Stop the timer. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send(self, sends: Iterable[Send]) -> None:
        for name, address in self.core.take_moves():
            self.mail.route(name, address)
        for send in sends:
            self.mail.send(send.to, send.message)

    def _tick(self) -> None:
        """Read the mail first: an instance that wrote in time is not silent, however long this loop was held up.

        While mail is left, its owner calls `pump` before the loop looks at its sockets again. A second whole turn would make
        everybody else wait for twice as long, so one message is read here: that shows whether more is left."""
        self._timer = None
        if self._behind_since_s is None:
            self.pump()
        else:
            self._take_in(1)
        now = self.clock()
        caught_up = self._behind_since_s is None or now - self._behind_since_s > BACKLOG_S
        self.deliver(self.core.tick(now, caught_up=caught_up))
