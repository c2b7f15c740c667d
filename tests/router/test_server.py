"""The HTTP server on a real socket: disconnects as TCP tells them, and its end."""

import asyncio
import json
import socket

import pytest

from common.errors import ConfigError
from router.api.server import listen
from tests.router.calls import chat, until
from tests.router.fakes import EchoFleet, Site, listening

pytestmark = pytest.mark.anyio


async def ask(port: int, stream: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Post a chat over a connection of our own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(chat(stream=stream, max_tokens=None)).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [True, False])
async def test_a_connection_that_is_closed_cancels_its_request(stream: bool) -> None:
    async with Site(EchoFleet(stall_at=2)) as site, listening(site) as port:
        reader, writer = await ask(port, stream)
        if stream:
            await asyncio.wait_for(reader.readuntil(b'"content":"e"'), 5)
        await until(lambda: len(site.core.requests) > 0)
        writer.close()
        await until(lambda: not len(site.core.requests))
        assert len(site.fleet.cancelled()) == 1


async def test_a_request_behind_an_open_one_ends_the_connection_and_cancels_the_open_one() -> None:
    async with Site(EchoFleet(stall_at=2)) as site, listening(site) as port:
        reader, writer = await ask(port, stream=False)
        await until(lambda: len(site.core.requests) > 0)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.wait_for(reader.read(), 60)
        await until(lambda: not len(site.core.requests))
        writer.close()


async def test_a_server_that_stops_lets_an_open_answer_end() -> None:
    async with Site() as site:
        async with listening(site) as port:
            reader, writer = await ask(port, stream=True)
            await asyncio.wait_for(reader.readuntil(b"data: "), 5)
        rest = await asyncio.wait_for(reader.read(), 5)
        assert b"data: [DONE]" in rest
        writer.close()


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="--port"):
        listen("127.0.0.1", taken.getsockname()[1])
