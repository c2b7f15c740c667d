"""What most tests of the router begin with: a core that serves a request, or a site. Async tests run on asyncio."""

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.router.bench import D0, P0, Bench
from tests.router.fakes import Site


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def bench() -> Bench:
    """A core with one request, which is on its way through p0 and d0."""
    return Bench(P0, D0).serving()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """A router without sockets, whose fleet has joined."""
    async with Site() as site:
        yield site


@pytest.fixture
async def client(site: Site) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the router's API."""
    async with site.client() as client:
        yield client
