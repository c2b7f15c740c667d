"""Clients that go, clients that read slowly, and clients that wait long, at the ASGI border."""

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from common.config import RouterConfig
from common.messages import Generate
from router.api.sending import EventStream
from tests.router.calls import chat, until
from tests.router.fakes import EchoFleet, Site

pytestmark = pytest.mark.anyio


class RawClient:
    """One HTTP request at the ASGI border, with hands on both channels. request_id: its X-Request-Id. is_whole: its body is there
    from the start; otherwise the last byte comes with `send_rest`. more: headers."""

    def __init__(
        self,
        site: Site,
        request_id: str = "mine",
        *more: tuple[bytes, bytes],
        is_whole: bool = True,
        path: str = "/v1/chat/completions",
        **fields: Any,
    ) -> None:
        body = json.dumps(chat(**{"max_tokens": 50} | fields)).encode()
        self._to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._to_app.put_nowait({"type": "http.request", "body": body[:-1], "more_body": True})
        if is_whole:
            self.send_rest()
        self.sent: list[MutableMapping[str, Any]] = []
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.news = asyncio.Event()
        self.broken = False
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode()), *more],
            "client": ("client", 1),
            "server": ("router", 80),
        }
        self.call = asyncio.create_task(site.app(scope, self._to_app.get, self._send))

    def send_rest(self) -> None:
        """The last byte of the body."""
        self._to_app.put_nowait({"type": "http.request", "body": b"}", "more_body": False})

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        await self.may_send.wait()
        if self.broken:
            raise OSError("the connection is closed")
        self.sent.append(message)
        self.news.set()

    @property
    def answered(self) -> str:
        """The response's body so far."""
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    def leave(self) -> None:
        self._to_app.put_nowait({"type": "http.disconnect"})

    async def gone(self) -> None:
        """The app is done with this request."""
        await asyncio.wait_for(self.call, 5)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_left_before_its_response_starts_cancels_everywhere(stream: bool) -> None:
    async with Site(EchoFleet(stall_at=0)) as site:
        client = RawClient(site, stream=stream, n=2)
        client.leave()  # it waits behind the body, and is read when the request has been dispatched
        await client.gone()
        assert (len(site.fleet.cancelled()), len(site.core.requests)) == (2, 0)
        assert [message["status"] for message in client.sent[:1]] == ([] if stream else [499])


async def test_a_request_whose_response_is_never_sent_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        raise RuntimeError("the framework fails")

    monkeypatch.setattr(EventStream, "__call__", never)
    async with Site(EchoFleet(stall_at=0)) as site:
        client = RawClient(site, stream=True, n=2)
        with pytest.raises(RuntimeError, match="the framework fails"):
            await client.gone()
        assert (len(site.fleet.cancelled()), len(site.core.requests)) == (2, 0)
        assert client.sent[0]["status"] == 500


async def test_an_answer_that_ended_cancels_nothing(site: Site) -> None:
    client = RawClient(site, stream=True)
    await client.gone()
    assert client.sent[-1] == {"type": "http.response.body", "body": b"data: [DONE]\n\n"}
    assert site.fleet.cancelled() == set()


async def test_text_that_waits_for_a_slow_client_is_sent_as_one_piece(site: Site) -> None:
    client = RawClient(site, stream=True)
    client.may_send.clear()
    await until(lambda: isinstance(site.fleet.sent[-1][1], Generate) and len(site.core.requests) == 0)
    client.may_send.set()
    await client.gone()
    text = b"".join(message.get("body", b"") for message in client.sent).decode()
    chunks = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n")[:-2]]
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(deltas) == "hello" * 10
    assert len(deltas) < 10


async def test_an_error_from_a_dead_connection_cancels_quietly() -> None:
    async with Site(EchoFleet(stall_at=3)) as site:
        client = RawClient(site, stream=True)
        client.broken = True
        await client.gone()
        assert len(site.fleet.cancelled()) == 1


def comments(client: RawClient) -> int:
    return sum(message.get("body") == b": keep-alive\n\n" for message in client.sent)


@pytest.mark.parametrize("stall_at", [0, 3])
async def test_a_stream_that_is_silent_gets_comments_also_before_its_first_token(stall_at: int) -> None:
    async with Site(EchoFleet(stall_at=stall_at), RouterConfig(keep_alive_s=0.02)) as site:
        client = RawClient(site, stream=True, timeout=60)
        await until(lambda: comments(client) >= 2)
        first, *rest = client.sent
        assert first["status"] == 200 and dict(first["headers"])[b"content-type"].startswith(b"text/event-stream")
        assert b"".join(message["body"] for message in rest).count(b"data: ") == (0 if stall_at == 0 else stall_at + 1)
        site.gateway.deliver(site.core.tick(site.gateway.clock() + 60.0))
        await client.gone()
        assert b"timeout_error" in client.sent[-2]["body"], "a failure after a comment is an event"


async def test_an_answer_that_is_one_body_gets_no_comments_and_a_stream_none_when_the_flag_is_0() -> None:
    async with Site(EchoFleet(stall_at=0), RouterConfig(keep_alive_s=0.001)) as site:
        whole = RawClient(site, stream=False)
        stream = RawClient(site, stream=True)
        await until(lambda: comments(stream) >= 2)
        assert whole.sent == []
        for client in (whole, stream):
            client.leave()
            await client.gone()
    async with Site(EchoFleet(stall_at=3), RouterConfig(keep_alive_s=0.0)) as site:
        plain = RawClient(site, stream=True)
        await asyncio.wait_for(plain.news.wait(), 5)
        await asyncio.sleep(0.01)
        plain.leave()
        await plain.gone()
        assert comments(plain) == 0
