"""A router without sockets for the tests of what is scraped, and a folder of programs, in which `launch` is a stub."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.deploy.commands import note_call, write_program
from tests.router.fakes import Site


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """A router without sockets, whose fleet has joined."""
    async with Site() as site:
        yield site


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder for the front of PATH. `launch` in it notes its calls for `calls_of`."""
    folder = tmp_path / "programs"
    folder.mkdir()
    write_program(folder / "launch", note_call(folder))
    return folder
