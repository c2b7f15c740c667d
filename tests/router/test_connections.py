"""Connections that wait are bounded in number, bytes and time, on real sockets, while everybody else is served."""

import asyncio
import json

import pytest

from common.access import Access, KeyRing
from common.config import RouterConfig
from router.api import admission, server
from router.metrics import Dropped
from tests.router.calls import chat, get, until
from tests.router.fakes import EchoFleet, Site, listening

pytestmark = pytest.mark.anyio
SHORT_S = 0.05
PLAIN = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = json.dumps(chat(stream=True)).encode()
QUESTION = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    % len(BODY)
    + BODY
)


async def dropped(site: Site, why: Dropped) -> float:
    lines = (await get(site, "/metrics")).text.splitlines()
    return next(
        float(line.split()[1]) for line in lines if line.startswith(f'tandem_http_connections_dropped_total{{reason="{why}"}}')
    )


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server ends the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 5)
    except ConnectionError:
        return b""


async def answered(port: int, question: bytes = PLAIN, end: bytes = b"") -> bytes:
    """What a client gets that asks as it should. end: of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(question)
    answer = await asyncio.wait_for(reader.readuntil(end or (b"0\r\n\r\n" if b"POST" in question else b"}")), 5)
    writer.close()
    return answer


@pytest.mark.parametrize("dribble", [b"", b"GET /health HTTP/1.1\r\nHo", b"\r\n", b"G"])
async def test_a_connection_whose_request_does_not_arrive_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, dribble: bytes
) -> None:
    monkeypatch.setattr(server, "HEAD_S", SHORT_S)
    async with Site() as site, listening(site) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(dribble)
        assert await ended(reader) == b""
        assert await dropped(site, Dropped.NO_HEAD) == 1
        writer.close()


@pytest.mark.parametrize("dribble", [b"\r\n", b"GET /health HTTP/1.1\r\n"])
async def test_a_request_that_dribbles_in_behind_an_answer_is_dropped_too(
    monkeypatch: pytest.MonkeyPatch, dribble: bytes
) -> None:
    monkeypatch.setattr(server, "HEAD_S", SHORT_S)
    async with Site() as site, listening(site) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PLAIN)
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"}"), 5)
        writer.write(dribble)
        assert await ended(reader) == b""
        assert await dropped(site, Dropped.NO_HEAD) == 1
        writer.close()


async def test_an_open_answer_and_a_resting_connection_outlive_the_time_of_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_S", SHORT_S)
    async with Site(EchoFleet(stall_at=2)) as site, listening(site) as port:
        streaming, stream = await asyncio.open_connection("127.0.0.1", port)
        stream.write(QUESTION)
        await asyncio.wait_for(streaming.readuntil(b'"content":"e"'), 5)
        resting, rest = await asyncio.open_connection("127.0.0.1", port)
        rest.write(PLAIN)
        await asyncio.wait_for(resting.readuntil(b"}"), 5)
        _, silent = await asyncio.open_connection("127.0.0.1", port)
        while not await dropped(site, Dropped.NO_HEAD):
            await asyncio.sleep(SHORT_S)
        rest.write(PLAIN)
        assert b"200 OK" in await asyncio.wait_for(resting.readuntil(b"}"), 5)
        assert len(site.core.requests) == 1
        for writer in (stream, rest, silent):
            writer.close()


async def test_when_too_many_wait_the_one_that_waits_for_longest_makes_room() -> None:
    async with Site() as site, listening(site, most_waiting=2) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        for reader, _ in idle[:3]:
            assert await ended(reader) == b""
        assert b"[DONE]" in await answered(port, QUESTION), "who asks at once is served"
        assert await dropped(site, Dropped.TOO_MANY) == 4
        for _, writer in idle:
            writer.close()


def unfinished(body_bytes: int) -> bytes:
    """A request whose body lacks its last byte."""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % (body_bytes + 1)
        + b" " * body_bytes
    )


async def test_bodies_that_do_not_come_take_neither_pages_nor_places_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "SPARE_CONNECTIONS", 0)
    async with Site(EchoFleet(stall_at=2), RouterConfig(max_requests=1)) as site, listening(site) as port:
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        for _, writer in clients[1:]:
            writer.write(unfinished(0))
        await until(lambda: len(site.core.requests.clients) == 5)
        for page in (b"health", b"ready", b"metrics"):
            assert b" 200 OK" in await answered(port, PLAIN.replace(b"health", page))
        clients[0][1].write(QUESTION)
        await asyncio.wait_for(clients[0][0].readuntil(b'"content":"e"'), 5)
        assert b"1 HTTP requests open" in await answered(port, QUESTION, b"}}")
        assert b" 200 OK" in await answered(port)
        for _, writer in clients:
            writer.close()


async def test_of_too_many_bodies_that_do_not_come_the_oldest_is_dropped() -> None:
    async with Site() as site, listening(site, most_waiting=2) as port:
        clients = []
        for _ in range(5):
            clients.append(await asyncio.open_connection("127.0.0.1", port))
            clients[-1][1].write(unfinished(0))
            await until(lambda: len(site.core.requests.clients) == min(len(clients), 2))
        for reader, _ in clients[:3]:
            assert await ended(reader) == b""
        assert await dropped(site, Dropped.MANY_BODIES) == 3
        assert b"[DONE]" in await answered(port, QUESTION)
        for _, writer in clients:
            writer.close()


async def test_of_too_many_bodies_that_do_not_come_one_of_the_key_with_the_most_is_dropped() -> None:
    keys = {name: name[0] * 20 for name in ("alice", "bob")}
    access = Access(KeyRing({key: name for name, key in keys.items()}), KeyRing({"c" * 20: "control"}))
    async with Site(access=access) as site, listening(site, most_waiting=3) as port:
        clients = []
        for name in ("bob", "alice", "alice", "alice", "alice"):
            head = f"Host: localhost\r\nAuthorization: Bearer {keys[name]}\r\n".encode()
            clients.append(await asyncio.open_connection("127.0.0.1", port))
            clients[-1][1].write(unfinished(0).replace(b"Host: localhost\r\n", head))
            await until(lambda: len(site.core.requests.clients) == min(len(clients), 3))
        for reader, _ in clients[1:3]:
            assert await ended(reader) == b"", "these are alice's oldest"
        assert await dropped(site, Dropped.MANY_BODIES) == 2
        clients[0][1].write(b"}")
        assert b" 400 " in await asyncio.wait_for(clients[0][0].readline(), 5), "bob's body is read"
        for _, writer in clients:
            writer.close()


async def test_of_too_many_bytes_of_bodies_those_that_are_held_for_longest_are_dropped() -> None:
    async with Site() as site, listening(site, most_body_bytes=100_000) as port:
        clients = []
        for size in (10, 60_000, 30_000, 30_000):
            clients.append(await asyncio.open_connection("127.0.0.1", port))
            clients[-1][1].write(unfinished(size) if size > 10 else QUESTION[:-10])
            await until(lambda: len(site.core.requests.clients) == min(len(clients), 3))
            await asyncio.sleep(0.01)
        assert await ended(clients[1][0]) == b""
        assert await dropped(site, Dropped.LARGE_BODIES) == 1
        clients[0][1].write(QUESTION[-10:])
        assert b"[DONE]" in await asyncio.wait_for(clients[0][0].readuntil(b"[DONE]"), 5)
        for _, writer in clients:
            writer.close()
