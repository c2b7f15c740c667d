"""Mailboxes for the tests of the wire."""

from collections.abc import Iterator

import pytest

from common.ids import DETOKENIZER, InstanceId
from common.mail import Mailbox
from common.messages import DetokenizerInbox
from tests.common.mailboxes import LOOPBACK, AnyBox, Make


@pytest.fixture
def make() -> Iterator[Make]:
    """Mailboxes, with a detokenizer's inbox unless they are to have another; closed at the end."""
    made: list[AnyBox] = []

    def build(
        me: InstanceId = DETOKENIZER, bind: str = LOOPBACK, max_frame_bytes: int = 2**20, inbox: object = DetokenizerInbox
    ) -> AnyBox:
        made.append(Mailbox(me, inbox, bind, max_frame_bytes))
        return made[-1]

    yield build
    for mailbox in made:
        mailbox.close()
