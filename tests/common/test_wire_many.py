"""A mailbox has room for a large fleet."""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import closing

import pytest

from common.ids import InstanceId
from common.messages import RouterInbox
from common.wire import Mailbox

CORRESPONDENTS = 400
FILES = 8_192


@pytest.fixture
def _many_files() -> Iterator[None]:
    """As the router's process allows itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < FILES:
        pytest.skip(f"this system allows only {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("_many_files")
def test_a_mailbox_that_watches_its_connections_reaches_four_hundred_correspondents() -> None:
    """ZeroMQ's usual limit lets it reach 340."""

    async def route_all() -> None:
        with closing(Mailbox[RouterInbox](InstanceId("router"), RouterInbox, "tcp://127.0.0.1:0")) as mailbox:
            mailbox.attach(asyncio.get_running_loop(), lambda: None, lambda broken: None)
            for number in range(CORRESPONDENTS):
                mailbox.route(InstanceId(f"instance-{number}"), f"tcp://127.0.0.1:{20_000 + number}")
            assert mailbox.messages_lost == {}

    asyncio.run(route_all())
