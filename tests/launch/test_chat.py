"""`launch chat` and the client below it, against a server that sends what it is told to."""

import contextlib
import io
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock

import pytest

from common.errors import ConfigError
from common.processes.router_client import RequestFailed, RouterClient
from launch import chat
from launch.chat import ChatFlags, Timing, read_api_key


@dataclass
class Double:
    """answers: (status, body) to POSTs, in order. asked: the bodies that came, and authorizations: the headers."""

    url: str = ""
    answers: list[tuple[int, bytes]] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)


@pytest.fixture
def double() -> Iterator[Double]:
    made = Double()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, json.dumps({"data": [{"id": "served"}]}).encode())

        def do_POST(self) -> None:
            made.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            made.authorizations.append(self.headers["Authorization"])
            self._send(*made.answers.pop(0))

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def text(content: str, kind: str = "content") -> bytes:
    return event({"choices": [{"delta": {kind: content}}], "usage": None})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
DONE = b": keep-alive\n\ndata: [DONE]\n\n"
REFUSED = json.dumps({"error": {"message": "too many requests are open"}}).encode()


def talk(double: Double, typed: str, **plan: Any) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), mock.patch.object(sys, "stdin", io.StringIO(typed)):
        assert chat.run(ChatFlags(url=double.url, **plan), "") == 0
    return out.getvalue()


def test_an_answer_is_written_as_it_comes_and_the_next_message_has_it_before_it(double: Double) -> None:
    double.answers += [(200, text("hm", "reasoning_content") + text("He") + text("llo") + USAGE + DONE), (200, text("!") + DONE)]
    written = talk(double, "hi\nand?\n", system="Be short.", max_tokens=5)
    assert "hmHello\n[7 + 3 tokens, first token after" in written
    first, second = double.asked
    assert first["messages"] == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}]
    assert second["messages"][2:] == [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "and?"}]
    assert first["model"] == "served" and first["max_tokens"] == 5


def test_reset_begins_anew_and_exit_leaves(double: Double) -> None:
    double.answers += [(200, text("a") + DONE)] * 2
    talk(double, "one\n/reset\n\n/unknown\ntwo\n/exit\nthree\n")
    assert [body["messages"] for body in double.asked] == [[{"role": "user", "content": word}] for word in ("one", "two")]


def test_a_refused_message_is_no_part_of_the_conversation(double: Double) -> None:
    double.answers += [(429, REFUSED), (200, text("a") + event({"error": {"message": "lost"}})), (200, text("b") + DONE)]
    written = talk(double, "one\ntwo\nthree\n")
    assert "[too many requests are open]" in written and "a\n[lost]" in written
    assert [message["content"] for message in double.asked[2]["messages"]] == ["two", "a", "three"]


def test_the_timing_line_counts_the_tokens_after_the_first() -> None:
    assert Timing(10.0, 10.25, 11.25, prompt_tokens=4, answer_tokens=21).line() == (
        "[4 + 21 tokens, first token after 250 ms, 20.0 tokens/s]"
    )
    assert Timing(10.0, None, 10.5).line() == "[no text in 0.50 s]"


def test_a_key_is_sent_and_read_from_a_file_or_the_environment(
    double: Double, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    double.answers.append((200, b"{}"))
    RouterClient(double.url, "secret").post("/x", {})
    assert double.authorizations == ["Bearer secret"]
    (tmp_path / "key").write_text("from-file\n")
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    assert (read_api_key(str(tmp_path / "key")), read_api_key("")) == ("from-file", "from-environment")
    (tmp_path / "no-text").write_bytes(b"\xff\x00")
    for name in ("none", "no-text"):
        with pytest.raises(ConfigError, match="api-key-file"):
            read_api_key(str(tmp_path / name))


@pytest.mark.parametrize("key", ["alice SECRET\nbob OTHER", "SECRET\x00", "SECR\u00c9T"])
def test_a_key_that_cannot_be_sent_is_refused_and_never_shown(key: str) -> None:
    with pytest.raises(RequestFailed, match="visible ASCII") as refused:
        RouterClient("http://127.0.0.1:9", key)
    assert "SECR" not in str(refused.value)


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "http://127.0.0.1:abc", "http://[::1", "ftp://host"])
def test_what_is_no_url_is_named(url: str) -> None:
    with pytest.raises(RequestFailed, match="write it as http://"):
        RouterClient(url)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9", "http://router..local:8000", f"http://{'a' * 64}:8000", "http://127.0.0.1:9/ä"]
)
def test_a_router_that_does_not_answer_is_named(url: str) -> None:
    with pytest.raises(RequestFailed, match="does not answer"):
        RouterClient(url).get("/v1/models")


def test_an_answer_that_breaks_off_is_an_error(double: Double) -> None:
    double.answers += [(200, text("a")), (200, b"no json")]
    client = RouterClient(double.url)
    events = client.stream("/v1/chat/completions", {})
    assert next(events)["choices"]
    with pytest.raises(RequestFailed, match="broke off"):
        next(events)
    with pytest.raises(RequestFailed, match="not JSON"):
        client.post("/generate", {})
