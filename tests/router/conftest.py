"""What most tests of the router begin with: a core that serves a request, or a site. Async tests run on asyncio."""

from collections.abc import AsyncIterator

import httpx
import pytest

from router.api import app, batches, stored_responses
from tests.router.bench import D0, P0, Bench
from tests.router.fakes import Site


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _stores_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits a second for the next beat, nor seconds for what will not end."""
    times = {app: ("BEAT_S", "END_S"), batches: ("LONGEST_RETRY_S",), stored_responses: ("ELSEWHERE_S",)}
    for module, names in times.items():
        for name in names:
            monkeypatch.setattr(module, name, 0.1)


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
