"""A recording, against a router behind a real socket that wants its control key."""

import asyncio
from contextlib import closing

import pytest

from bench.trace.record import Recording, TraceFailed
from common.access import Access, KeyRing
from tests.router.fakes import Site, listening

CONTROL = "c" * 20


def record(url: str) -> None:
    with closing(Recording(url)) as stranger, pytest.raises(TraceFailed, match="HTTP 401"):
        stranger.begin(1.0)
    with closing(Recording(f"{url}/", CONTROL)) as recording, closing(Recording(url, CONTROL)) as other:
        recording.begin(0.01)
        with pytest.raises(TraceFailed, match=r"HTTP 409.*a trace runs already"):
            other.begin(1.0)
        status, lines = recording.spans()
        assert (status.seconds, list(lines)) == (0.01, [])
        assert {process.role for process in status.processes} == {"router", "detokenizer", "prefill", "decode"}
        recording.forget()
        with pytest.raises(TraceFailed, match=r"HTTP 404.*begin one with POST /cluster/trace"):
            recording.spans()


def test_a_recording_shows_its_key_and_fails_with_the_routers_words() -> None:
    async def main() -> None:
        async with Site(access=Access(None, KeyRing({CONTROL: "control"}))) as site, listening(site) as port:
            await asyncio.to_thread(record, f"http://127.0.0.1:{port}")

    asyncio.run(main())


def test_nobody_is_there() -> None:
    with closing(Recording("http://127.0.0.1:9")) as recording, pytest.raises(TraceFailed, match="the router does not answer"):
        recording.begin(1.0)
