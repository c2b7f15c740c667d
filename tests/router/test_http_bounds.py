"""What connections can cost the server: clients that do not read, heads without an end, clients of HTTP/1.0, and upgrades.

Also disconnects as TCP tells them, and the server's end. Connections that wait are bounded in number, bytes and time, while
everybody else is served.
"""

import asyncio
import gc
import json
import socket
import struct
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.access import OPEN, Access
from common.config import ModelConfig, RouterConfig
from common.errors import ConfigError
from common.ids import ROUTER
from common.messages import Finished, Generate, TextDelta
from router.api import admission, server
from router.api.server import HEAD_BYTES, MAX_PIPELINED, PIECE_BYTES, _Protocol, listen
from router.metrics import Dropped
from router.process import serve
from tests.common.text.tiny import write_checkpoint
from tests.router.calls import ALICE, BOB, chat, completion, keyed, metric, until
from tests.router.fakes import EchoFleet, Site, listening

pytestmark = pytest.mark.anyio
BUFFER = 4096
ASKS = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
LARGE = completion(["x" * 20] * 2, n=16, max_tokens=100, stream=True, return_token_ids=True)
"""Its answer is larger than all buffers between the server and a client."""


@pytest.fixture
async def port(site: Site) -> AsyncIterator[int]:
    async with listening(site) as port:
        yield port


def head(path: str, body_bytes: int, version: str = "1.1") -> bytes:
    line = f"POST {path} HTTP/{version}\r\nHost: localhost\r\n"
    return f"{line}Content-Type: application/json\r\nContent-Length: {body_bytes}\r\n\r\n".encode()


def question(body: Any, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    text = json.dumps(body).encode()
    return head(path, len(text), version) + text


CHAT = question(chat(stream=True), "/v1/chat/completions")


async def connected(port: int, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection over which this was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    return reader, writer


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


async def test_of_many_requests_at_once_a_few_are_answered_and_more_than_a_few_drop_the_connection(site: Site, port: int) -> None:
    few = MAX_PIPELINED + 1
    reader, writer = await connected(port, HEALTH * few)
    for _ in range(few):
        await asyncio.wait_for(reader.readuntil(b"}"), 5)
    writer.write(HEALTH * 1000)
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
async def test_a_head_without_end_is_refused_and_counted(site: Site, port: int, endless: bytes) -> None:
    reader, writer = await connected(port, HEALTH)
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
            reader, writer = await connected(port, opened + b"x: y\r\n" * HEAD_BYTES)
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
            reader, writer = await connected(port, asked)
            assert (await asyncio.wait_for(reader.readline(), 5)) == b"HTTP/1.1 200 OK\r\n"
            writer.close()
        assert len(longest) == HEAD_BYTES


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_of_http_1_0_gets_no_chunks_and_the_end_of_the_connection_ends_the_answer(
    site: Site, port: int, stream: bool
) -> None:
    reader, writer = await connected(port, question(completion("hello", stream=stream), version="1.0"))
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
        await asyncio.get_running_loop().sock_sendall(client, question(completion(), version=version))
        await until(lambda: len(waiting) > 0)
        assert len(site.api.admission.places) == 1, "the request stays open until most is read"
        reader, writer = await asyncio.open_connection(sock=client)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split()[1]) for line in head.splitlines() if line.startswith(b"content-length"))
        body = await reader.readexactly(length)
        assert json.loads(body)["choices"][0]["text"] == Talkative.text
        assert len(waiting) > 2 and max(waiting) <= 3 * PIECE_BYTES
        writer.close()


async def test_nothing_is_left_of_a_connection_that_has_ended(site: Site, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    known, made = weakref.WeakSet[_Protocol](), _Protocol.connection_made

    def connection_made(protocol: _Protocol, transport: asyncio.Transport) -> None:
        known.add(protocol)
        made(protocol, transport)

    def is_gone() -> bool:
        gc.collect(1)
        return not known

    monkeypatch.setattr(_Protocol, "connection_made", connection_made)
    closes = HEALTH[:-2] + b"Connection: close\r\n\r\n"
    for asked in (closes, HEALTH.replace(b"1.1", b"1.0"), b"\0\r\n", b"\r\n" * HEAD_BYTES, HEALTH):
        reader, writer = await connected(port, asked)
        assert await asyncio.wait_for(reader.readuntil(b"}" if b"GET" in asked else b"\r\n\r\n"), 5)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()  # a reset
        await until(is_gone)


async def test_a_request_that_offers_an_upgrade_is_answered_as_if_it_did_not(site: Site, port: int) -> None:
    text = json.dumps(completion("hello")).encode()
    line = ASKS
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    sized = line + b"Content-Length: %d\r\n" % len(text)
    hidden = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(
        HEALTH
    )
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


async def test_a_body_in_single_bytes_goes_on_as_one_piece_for_each_read(
    site: Site, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, on_body = list[int](), HttpToolsProtocol.on_body

    def counted(protocol: HttpToolsProtocol, body: bytes) -> None:
        taken.append(len(body))
        on_body(protocol, body)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", counted)
    text = json.dumps(completion("hello")).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    reader, writer = await connected(port, ASKS + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + HEALTH[:9])
    assert b'"text":"hello"' in await asyncio.wait_for(reader.readuntil(b"}}}"), 5)
    writer.write(HEALTH[9:])
    assert b'"ok"' in await asyncio.wait_for(reader.readuntil(b"}"), 5)
    writer.close()
    assert sum(taken) == len(text) and len(taken) < 4


async def test_a_tunnel_is_refused(site: Site, port: int) -> None:
    reader, writer = await connected(port, b"CONNECT router:80 HTTP/1.1\r\nHost: localhost\r\n\r\n" + HEALTH)
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1
    writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_connection_that_is_closed_cancels_its_request(stream: bool) -> None:
    async with Site(EchoFleet(stall_at=2)) as site, listening(site) as port:
        reader, writer = await connected(port, question(chat(stream=stream, max_tokens=None), "/v1/chat/completions"))
        if stream:
            await asyncio.wait_for(reader.readuntil(b'"content":"e"'), 5)
        await until(lambda: len(site.core.requests) > 0)
        writer.close()
        await until(lambda: not len(site.core.requests))
        assert len(site.fleet.cancelled()) == 1


async def test_a_server_that_stops_lets_an_open_answer_end(site: Site) -> None:
    async with listening(site) as port:
        reader, writer = await connected(port, question(chat(stream=True, max_tokens=None), "/v1/chat/completions"))
        await asyncio.wait_for(reader.readuntil(b"data: "), 5)
    rest = await asyncio.wait_for(reader.read(), 5)
    assert b"data: [DONE]" in rest
    writer.close()


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="--port"):
        listen("127.0.0.1", taken.getsockname()[1])


async def test_a_host_name_of_another_host_is_refused_by_name(tmp_path: Path) -> None:
    model, event = ModelConfig(model=str(write_checkpoint(tmp_path))), asyncio.Event()
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        await serve(RouterConfig(host="192.0.2.1"), model, ROUTER, ["tcp://127.0.0.1:0"], lambda serving: None, event, event)


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server ends the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 5)
    except ConnectionError:
        return b""


async def answered(port: int, question: bytes = HEALTH, end: bytes = b"") -> bytes:
    """What a client gets that asks as it should. end: of the answer."""
    reader, writer = await connected(port, question)
    answer = await asyncio.wait_for(reader.readuntil(end or (b"0\r\n\r\n" if b"POST" in question else b"}")), 5)
    writer.close()
    return answer


SHORT_S = 0.05


@pytest.mark.parametrize("first", [b"", HEALTH], ids=["at its beginning", "behind an answer"])
@pytest.mark.parametrize("dribble", [b"", b"GET /health HTTP/1.1\r\n", b"\r\n", b"G"])
async def test_a_connection_whose_request_does_not_arrive_is_dropped_and_counted(
    site: Site, port: int, monkeypatch: pytest.MonkeyPatch, first: bytes, dribble: bytes
) -> None:
    if first and not dribble:
        return  # it rests
    monkeypatch.setattr(server, "HEAD_S", SHORT_S)
    reader, writer = await connected(port, first)
    if first:
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"}"), 5)
    writer.write(dribble)
    assert await ended(reader) == b""
    assert dropped(site, Dropped.NO_HEAD) == 1
    writer.close()


async def test_an_open_answer_and_a_resting_connection_outlive_the_time_of_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_S", SHORT_S)
    async with Site(EchoFleet(stall_at=2)) as site, listening(site) as port:
        streaming, stream = await asyncio.open_connection("127.0.0.1", port)
        stream.write(CHAT)
        await asyncio.wait_for(streaming.readuntil(b'"content":"e"'), 5)
        resting, rest = await asyncio.open_connection("127.0.0.1", port)
        rest.write(HEALTH)
        await asyncio.wait_for(resting.readuntil(b"}"), 5)
        _, silent = await asyncio.open_connection("127.0.0.1", port)
        while not dropped(site, Dropped.NO_HEAD):
            await asyncio.sleep(SHORT_S)
        rest.write(HEALTH)
        assert b"200 OK" in await asyncio.wait_for(resting.readuntil(b"}"), 5)
        assert len(site.core.requests) == 1
        for writer in (stream, rest, silent):
            writer.close()


async def test_when_too_many_wait_the_one_that_waits_for_longest_makes_room_and_one_with_a_key_after_all_others() -> None:
    async with Site() as site, listening(site, most_waiting=2) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        for reader, _ in idle[:3]:
            assert await ended(reader) == b""
        assert b"[DONE]" in await answered(port, CHAT), "who asks at once is served"
        assert dropped(site, Dropped.TOO_MANY) == 4
        for _, writer in idle:
            writer.close()
    async with Site(access=keyed()) as site, listening(site, most_waiting=2) as port:
        asked = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {BOB}\r\n\r\n".encode()
        reader, writer = await connected(port, asked)
        assert b'"object"' in await asyncio.wait_for(reader.readuntil(b"}]}"), 5)
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        assert await ended(idle[3][0]) == b""
        writer.write(asked)
        assert b" 200 OK" in await asyncio.wait_for(reader.readline(), 5)
        for _, opened in [*idle, (reader, writer)]:
            opened.close()


def unfinished(body_bytes: int) -> bytes:
    """A request whose body lacks its last byte."""
    return head("/v1/chat/completions", body_bytes + 1) + b" " * body_bytes


async def test_bodies_that_do_not_come_take_neither_pages_nor_places_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "SPARE_CONNECTIONS", 0)
    async with Site(EchoFleet(stall_at=2), RouterConfig(max_requests=1)) as site, listening(site) as port:
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        for _, writer in clients[1:]:
            writer.write(unfinished(0))
        await until(lambda: len(site.core.requests.clients) == 5)
        for page in (b"health", b"ready", b"metrics"):
            assert b" 200 OK" in await answered(port, HEALTH.replace(b"health", page))
        clients[0][1].write(CHAT)
        await asyncio.wait_for(clients[0][0].readuntil(b'"content":"e"'), 5)
        assert b"1 HTTP requests open" in await answered(port, CHAT, b"}}")
        assert b" 200 OK" in await answered(port)
        for _, writer in clients:
            writer.close()


@pytest.mark.parametrize(
    ("access", "most", "keys", "gone"),
    [(OPEN, 2, (ALICE,) * 5, (0, 1, 2)), (keyed(), 3, (BOB, *(ALICE,) * 4), (1, 2))],
    ids=["the oldest", "the oldest of the key with the most"],
)
async def test_of_too_many_bodies_that_do_not_come_some_are_dropped(
    access: Access, most: int, keys: tuple[str, ...], gone: tuple[int, ...]
) -> None:
    async with Site(access=access) as site, listening(site, most_waiting=most) as port:
        clients = []
        for key in keys:
            head = f"Host: localhost\r\nAuthorization: Bearer {key}\r\n".encode()
            clients.append(await connected(port, unfinished(0).replace(b"Host: localhost\r\n", head)))
            await until(lambda: len(site.core.requests.clients) == min(len(clients), most))
        for number in gone:
            assert await ended(clients[number][0]) == b""
        assert dropped(site, Dropped.MANY_BODIES) == len(gone)
        reader, writer = clients[min({*range(5)} - {*gone})]
        writer.write(b"}")
        assert b" 400 " in await asyncio.wait_for(reader.readline(), 5), "that body is read"
        for _, writer in clients:
            writer.close()


async def test_of_too_many_bytes_of_bodies_those_that_are_held_for_longest_are_dropped() -> None:
    async with Site() as site, listening(site, most_body_bytes=100_000) as port:
        clients = []
        for size in (10, 60_000, 30_000, 30_000):
            clients.append(await asyncio.open_connection("127.0.0.1", port))
            clients[-1][1].write(unfinished(size) if size > 10 else CHAT[:-10])
            await until(lambda: len(site.core.requests.clients) == min(len(clients), 3))
            await asyncio.sleep(0.01)
        assert await ended(clients[1][0]) == b""
        assert dropped(site, Dropped.LARGE_BODIES) == 1
        clients[0][1].write(CHAT[-10:])
        assert b"[DONE]" in await asyncio.wait_for(clients[0][0].readuntil(b"[DONE]"), 5)
        for _, writer in clients:
            writer.close()
