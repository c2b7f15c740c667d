"""How an `Engine` leaves answers that are not complete. Its fleet is a socket that never ends one."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.errors import ConfigError
from common.processes.router_client import RequestFailed
from launch import engine as engine_module
from launch.engine import Engine
from tests.launch.waiting import PATIENCE_S

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
EVENT = b'data: {"text": "' + b"x" * 100_000 + b'"}\n\n'


class Endless:
    """Implements what `Engine` needs of `LocalFleet`. Each connection gets `sends` events, and then nothing. left: a client has
    closed its connection."""

    def __init__(self, *flags: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked, self.left, self.stopped = threading.Semaphore(0), threading.Semaphore(0), False
        self.sends, self.sent = 1, 0

    def start(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        self.stopped = True
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while not connection.recv(65_536).endswith(b"}"):
                pass
            connection.sendall(HEAD)
            self.asked.release()
            for _ in range(self.sends):
                connection.sendall(EVENT)
                self.sent += 1
            connection.recv(1)
        self.left.release()


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endless]:
    fleet = Endless()
    monkeypatch.setattr(engine_module, "LocalFleet", lambda *flags: fleet)
    yield fleet
    fleet.stop()


def test_a_stream_that_is_left_while_it_is_silent_ends_its_request(fleet: Endless) -> None:
    async def leave() -> None:
        stream = await engine.async_generate("hi", stream=True)
        assert not isinstance(stream, dict | list)
        assert "text" in await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()
        assert await asyncio.to_thread(fleet.left.acquire, timeout=PATIENCE_S)

    with Engine(grammar="off") as engine:
        asyncio.run(leave())


def test_events_are_not_read_before_they_are_asked_for(fleet: Endless) -> None:
    async def take_one() -> None:
        stream = await engine.async_generate("hi", stream=True)
        assert not isinstance(stream, dict | list)
        await anext(stream)
        seen = -1
        while seen != fleet.sent:  # until what lies between the two is full
            seen = fleet.sent
            await asyncio.sleep(0.3)

    fleet.sends = 1_000
    with Engine(grammar="off") as engine:
        asyncio.run(take_one())
        assert fleet.sent < 500


def test_a_shutdown_waits_for_no_answer(fleet: Endless) -> None:
    with ThreadPoolExecutor(1) as pool:
        with Engine(grammar="off") as engine:
            answers = pool.submit(engine.generate, ["a", "b"])
            assert all(fleet.asked.acquire(timeout=PATIENCE_S) for _ in range(2))
        assert fleet.stopped
        with pytest.raises(RequestFailed):
            answers.result(PATIENCE_S)
        with pytest.raises(RequestFailed, match="is closed"):
            engine.generate("a")


def test_a_router_that_the_engine_could_not_ask_is_refused_by_flag() -> None:
    with pytest.raises(ConfigError, match="api_keys"):
        Engine(api_keys="file")
    with pytest.raises(ConfigError, match="tls_cert"):
        Engine(tls_cert="file")
