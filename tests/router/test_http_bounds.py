"""What one connection can cost the server: clients that do not read, heads without an end, clients of HTTP/1.0, and upgrades.

Also disconnects as TCP tells them, and the server's end.
"""

import asyncio
import gc
import json
import socket
import struct
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.errors import ConfigError
from common.messages import Finished, Generate, TextDelta
from router.api import server
from router.api.server import HEAD_BYTES, MAX_PIPELINED, PIECE_BYTES, _Protocol, listen
from router.metrics import Dropped
from tests.router.calls import chat, completion, metric, until
from tests.router.fakes import EchoFleet, Site, listening

pytestmark = pytest.mark.anyio
BUFFER = 4096
ASKS = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
LARGE = completion(["x" * 20] * 2, n=16, max_tokens=100, stream=True, return_token_ids=True)
"""Its answer is larger than all buffers between the server and a client."""


def question(body: Any, version: str = "1.1") -> bytes:
    text = json.dumps(body).encode()
    return (
        b"POST /v1/completions HTTP/%s\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % (version.encode(), len(text))
        + text
    )


def dropped(site: Site, why: Dropped) -> float:
    return metric(site.metrics.text().decode(), f'tandem_http_connections_dropped_total{{reason="{why}"}}')


@asynccontextmanager
async def deaf(port: int) -> AsyncIterator[socket.socket]:
    """A client that reads nothing."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        yield client


async def broken(client: socket.socket) -> None:
    """The server has dropped the connection without having sent everything: sending to it fails."""
    async with asyncio.timeout(20):
        try:
            while True:
                await asyncio.get_running_loop().sock_sendall(client, b"\r\n")
                await asyncio.sleep(0.01)
        except ConnectionError:
            return


async def test_the_connection_of_a_client_that_does_not_read_its_stream_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "SEND_TIMEOUT_S", 0.2)
    async with Site() as site, listening(site, send_buffer=BUFFER) as port, deaf(port) as client:
        await asyncio.get_running_loop().sock_sendall(client, question(LARGE))
        await until(lambda: dropped(site, Dropped.UNREAD) == 1)
        await until(lambda: not len(site.core.requests))
        await broken(client)


async def test_a_client_that_asks_more_than_it_reads_is_dropped_and_counted() -> None:
    async with Site() as site, listening(site, send_buffer=BUFFER) as port, deaf(port) as client:
        with suppress(ConnectionError):
            for _ in range(50):
                await asyncio.get_running_loop().sock_sendall(client, HEALTH.replace(b"health", b"metrics"))
                await asyncio.sleep(0.005)
        await until(lambda: dropped(site, Dropped.PIPELINED) == 1)
        await broken(client)


async def test_of_many_requests_at_once_a_few_are_answered_and_more_than_a_few_drop_the_connection() -> None:
    few = MAX_PIPELINED + 1
    async with Site() as site, listening(site) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEALTH * few)
        for _ in range(few):
            await asyncio.wait_for(reader.readuntil(b"}"), 5)
        writer.write(HEALTH * 3000)
        with suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 5)
        assert dropped(site, Dropped.PIPELINED) == 1
        assert metric(site.metrics.text().decode(), 'tandem_http_responses_total{path="/health",status="200"}') <= 2 * few
        writer.close()


async def test_a_request_behind_an_open_post_drops_a_connection_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Site(EchoFleet(stall_at=99)) as site, listening(site, send_buffer=BUFFER) as port, deaf(port) as client:
        await asyncio.get_running_loop().sock_sendall(client, question(LARGE))
        await until(
            lambda: all(len(record.token_ids) == 99 for record in site.core.requests.records()) and len(site.core.requests)
        )
        await asyncio.get_running_loop().sock_sendall(client, HEALTH)
        await until(lambda: dropped(site, Dropped.PIPELINED) == 1)
        await until(lambda: not len(site.core.requests))
        await broken(client)


@pytest.mark.parametrize("endless", [b"GET /" + b"a" * HEAD_BYTES, HEALTH[:-2] + b"x: y\r\n" * HEAD_BYTES, b"\r\n" * HEAD_BYTES])
async def test_a_head_without_end_is_refused_and_counted(endless: bytes) -> None:
    async with Site() as site, listening(site) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEALTH)
        await asyncio.wait_for(reader.readuntil(b"}"), 5)
        for first in range(0, len(endless), HEAD_BYTES // 2):
            writer.write(endless[first : first + HEAD_BYTES // 2])
        head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        error = json.loads(body)["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, None)
        assert str(HEAD_BYTES) in error["message"]
        assert dropped(site, Dropped.LONG_HEAD) == 1
        writer.close()


async def test_a_head_without_end_behind_an_open_answer_and_trailers_without_end_drop_the_connection() -> None:
    chunked = ASKS + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    async with Site(EchoFleet(stall_at=0)) as site, listening(site) as port:
        for number, opened in enumerate((question(completion()) + b"GET / HTTP/1.1\r\n", chunked), 1):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(opened + b"x: y\r\n" * HEAD_BYTES)
            with pytest.raises(ConnectionError):
                while await asyncio.wait_for(reader.read(1), 5):
                    pass
                raise ConnectionError
            assert dropped(site, Dropped.LONG_HEAD) == number
            writer.close()


async def test_a_head_of_the_longest_length_and_a_long_body_are_served() -> None:
    longest = HEALTH[:-2] + b"x: " + b"y" * (HEAD_BYTES - len(HEALTH) - 5) + b"\r\n\r\n"
    long_body = question(completion("x", user="u" * 3 * HEAD_BYTES))
    async with Site(max_body_bytes=10 * HEAD_BYTES) as site, listening(site) as port:
        for asked in (longest, long_body, longest, HEALTH * 3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(asked)
            assert (await asyncio.wait_for(reader.readline(), 5)) == b"HTTP/1.1 200 OK\r\n"
            writer.close()
        assert len(longest) == HEAD_BYTES


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_of_http_1_0_gets_no_chunks_and_the_end_of_the_connection_ends_the_answer(stream: bool) -> None:
    async with Site() as site, listening(site) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(question(completion("hello", stream=stream), "1.0"))
        head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"transfer-encoding" not in head
        if stream:
            events = body.decode().split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2]]
        else:
            texts = [json.loads(body)["choices"][0]["text"]]
        assert "".join(texts) == "hello"
        writer.close()


class Talkative(EchoFleet):
    """Its answers are one token with this text."""

    text = "0123456789abcdef" * PIECE_BYTES

    def _answer(self, message: Generate) -> list[TextDelta]:
        return [TextDelta(message.key, 0, (1,), self.text, Finished(reason="stop"))]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_of_a_long_answer_a_little_waits_to_be_read_and_the_time_to_read_begins_again_with_each_piece(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    waiting, paused = list[int](), _Protocol.pause_writing

    def pause_writing(protocol: _Protocol) -> None:
        waiting.append(protocol.transport.get_write_buffer_size())
        paused(protocol)
        assert protocol._unread is not None

    monkeypatch.setattr(_Protocol, "pause_writing", pause_writing)
    async with Site(Talkative()) as site, listening(site, send_buffer=BUFFER) as port, deaf(port) as client:
        await asyncio.get_running_loop().sock_sendall(client, question(completion(), version))
        await until(lambda: len(waiting) > 0)
        assert len(site.api.admission.places) == 1, "the request stays open until most is read"
        reader, writer = await asyncio.open_connection(sock=client)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split()[1]) for line in head.splitlines() if line.startswith(b"content-length"))
        body = await reader.readexactly(length)
        assert json.loads(body)["choices"][0]["text"] == Talkative.text
        assert len(waiting) > 2 and max(waiting) <= 3 * PIECE_BYTES
        writer.close()


async def test_nothing_is_left_of_a_connection_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    known, made = weakref.WeakSet[_Protocol](), _Protocol.connection_made

    def connection_made(protocol: _Protocol, transport: asyncio.Transport) -> None:
        known.add(protocol)
        made(protocol, transport)

    def is_gone() -> bool:
        gc.collect(1)
        return not known

    monkeypatch.setattr(_Protocol, "connection_made", connection_made)
    closes = HEALTH[:-2] + b"Connection: close\r\n\r\n"
    async with Site() as site, listening(site) as port:
        for asked in (closes, HEALTH.replace(b"1.1", b"1.0"), b"\0\r\n", b"\r\n" * HEAD_BYTES, HEALTH):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(asked)
            assert await asyncio.wait_for(reader.readuntil(b"}" if b"GET" in asked else b"\r\n\r\n"), 5)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()  # a reset
            await until(is_gone)


async def test_a_request_that_offers_an_upgrade_is_answered_as_if_it_did_not() -> None:
    text = json.dumps(completion("hello")).encode()
    line = ASKS
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    sized = line + b"Content-Length: %d\r\n" % len(text)
    hidden = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(
        HEALTH
    )
    async with Site() as site, listening(site) as port:
        for head, body, status in (
            (sized, text, 200),
            (line + b"Transfer-Encoding: chunked\r\n", b"%x\r\n" % len(text) + text + b"\r\n0\r\n\r\n", 200),
            (hidden, HEALTH, 404),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for parts in ((head + offer + b"\r\n" + body,), (head + offer + b"\r\n", body)):
                for part in parts:
                    writer.write(part)
                    await asyncio.sleep(0.01)
                answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
                assert answer.startswith(b"HTTP/1.1 %d " % status)
                length = next(int(line.split()[1]) for line in answer.splitlines() if line.startswith(b"content-length"))
                said = json.loads(await reader.readexactly(length))
                assert status == 404 or said["choices"][0]["text"] == "hello"
            writer.write(sized + b"Connection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n" + text)
            rest = await asyncio.wait_for(reader.read(), 5)
            assert rest.count(b"HTTP/1.1 ") == 1 and b'"text":"hello"' in rest, "nothing in between was answered"
            writer.close()


async def test_a_body_in_single_bytes_goes_on_as_one_piece_for_each_read(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, on_body = list[int](), HttpToolsProtocol.on_body

    def counted(protocol: HttpToolsProtocol, body: bytes) -> None:
        taken.append(len(body))
        on_body(protocol, body)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", counted)
    text = json.dumps(completion("hello")).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    async with Site() as site, listening(site) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASKS + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + HEALTH[:9])
        assert b'"text":"hello"' in await asyncio.wait_for(reader.readuntil(b"}}}"), 5)
        writer.write(HEALTH[9:])
        assert b'"ok"' in await asyncio.wait_for(reader.readuntil(b"}"), 5)
        writer.close()
    assert sum(taken) == len(text) and len(taken) < 4


async def test_a_tunnel_is_refused() -> None:
    async with Site() as site, listening(site) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"CONNECT router:80 HTTP/1.1\r\nHost: localhost\r\n\r\n" + HEALTH)
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1
        writer.close()


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
