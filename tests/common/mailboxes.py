"""What the tests of the wire share: names, a message, and reading until a deadline."""

import time
from collections.abc import Callable
from typing import TypeAlias

from common.ids import InstanceId, Key, RequestId
from common.messages import DetokenizerInbox, ForgetAnswer
from common.wire import Mailbox

LOOPBACK = "tcp://127.0.0.1:0"
WAIT_S = 60.0
PREFILL, DECODE = InstanceId("prefill-1"), InstanceId("decode-1")
KEY = Key(RequestId("r"), 0)
FORGET = ForgetAnswer(key=KEY)
"""The smallest message."""
Detok: TypeAlias = Mailbox[DetokenizerInbox]
Make: TypeAlias = Callable[..., Detok]


def received(mailbox: Detok, count: int) -> list[tuple[InstanceId, DetokenizerInbox]]:
    """`count` messages, or those that came before the deadline."""
    mail: list[tuple[InstanceId, DetokenizerInbox]] = []
    deadline = time.monotonic() + WAIT_S
    while len(mail) < count and (left := deadline - time.monotonic()) > 0:
        mailbox.wait(left)
        mail += mailbox.receive()
    return mail


def closes(count: int) -> list[ForgetAnswer]:
    """Messages that tell apart in which order they arrive."""
    return [ForgetAnswer(key=Key(RequestId("r"), attempt)) for attempt in range(count)]
