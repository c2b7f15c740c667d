"""Async tests of the router run on asyncio, most of them against a site."""

from collections.abc import AsyncIterator

import pytest

from tests.router.fakes import Site


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """A router without sockets, whose fleet has joined."""
    async with Site() as site:
        yield site
