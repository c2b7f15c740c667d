"""What the tests of the wire share: names, a message, and reading until a deadline; and, for other tests, a mailbox of lists."""

import time
from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

from common.ids import ROUTER, AttemptId, InstanceId, RequestId
from common.mail import RECEIVE_LIMIT, Mailbox
from common.messages import AnyMessage, DetokenizerInbox, ForgetAnswer

LOOPBACK = "tcp://127.0.0.1:0"
WAIT_S = 60.0
PREFILL, DECODE = InstanceId("prefill-1"), InstanceId("decode-1")
KEY = AttemptId(RequestId("r"), 0, ROUTER)
FORGET = ForgetAnswer(key=KEY)
"""The smallest message."""
Detok: TypeAlias = Mailbox[DetokenizerInbox]
AnyBox: TypeAlias = Mailbox[Any]
Make: TypeAlias = Callable[..., AnyBox]
Inbox = TypeVar("Inbox")


class FakeMail(Generic[Inbox]):
    """Implements `Mail` with lists. Keeps in order what is asked of it."""

    def __init__(self) -> None:
        self.arriving: list[tuple[InstanceId, Inbox]] = []
        self.sent: list[tuple[InstanceId, AnyMessage]] = []
        self.routes: dict[InstanceId, str | None] = {}
        self.asked: list[str] = []
        self.gone: list[InstanceId] = []
        """Whom `refused` will name."""
        self.broken: set[InstanceId] = set()
        """Whom `reaches` does not reach."""
        self.frames_refused: dict[str, int] = {}
        self.messages_lost: dict[str, int] = {}

    def send(self, to: InstanceId, message: AnyMessage) -> None:
        self.sent.append((to, message))
        self.asked.append(f"send {type(message).__name__} to {to}")

    def receive(self, most: int = RECEIVE_LIMIT) -> list[tuple[InstanceId, Inbox]]:
        arrived, self.arriving = self.arriving[:most], self.arriving[most:]
        return arrived

    def reaches(self, to: InstanceId) -> bool:
        return to not in self.broken

    def refused(self) -> list[InstanceId]:
        gone, self.gone = self.gone, []
        return gone

    def route(self, to: InstanceId, address: str | None, *, watch: bool = False) -> None:
        self.routes[to] = address
        self.asked.append(f"route {to} to {address}")


def received(mailbox: Mailbox[Inbox], count: int) -> list[tuple[InstanceId, Inbox]]:
    """`count` messages, or those that came before the deadline."""
    mail: list[tuple[InstanceId, Inbox]] = []
    deadline = time.monotonic() + WAIT_S
    while len(mail) < count and (left := deadline - time.monotonic()) > 0:
        mailbox.wait(left)
        mail += mailbox.receive()
    return mail


def closes(count: int) -> list[ForgetAnswer]:
    """Messages that tell apart in which order they arrive."""
    return [ForgetAnswer(key=AttemptId(RequestId("r"), attempt, ROUTER)) for attempt in range(count)]
