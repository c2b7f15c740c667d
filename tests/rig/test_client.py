"""The client of the rig notices everything that is wrong with a stream."""

import asyncio
import json
from typing import Any

import pytest

from tests.rig.client import Answer, Client, Request

REQUEST = Request.completion("a", 2)


def chunk(token_ids: list[int], finish_reason: str | None = None, **fields: Any) -> str:
    choice = {"index": 0, "text": "a" * len(token_ids), "finish_reason": finish_reason, "token_ids": token_ids}
    return "data: " + json.dumps({"choices": [choice], **fields}) + "\n\n"


USAGE = 'data: {"choices": [], "usage": {"total_tokens": 3}}\n\n'
DONE = "data: [DONE]\n\n"
WHOLE = chunk([5]) + chunk([6]) + chunk([], "length") + USAGE + DONE


def answer_to(body: str, *, length: int = 0, status: str = "200 OK") -> Answer:
    """What the client makes of a response. length: that it announces, if it is not the body's."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status}\r\ncontent-type: text/event-stream\r\ncontent-length: {length or len(body)}\r\n\r\n"
        writer.write((head + body).encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def ask() -> Answer:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with Client(f"http://127.0.0.1:{port}", "demo") as client:
                return await client.ask(REQUEST)

    return asyncio.run(ask())


def test_a_whole_stream_is_read_without_complaint() -> None:
    answer = answer_to(WHOLE)
    assert not answer.errors and answer.is_done and answer.usage == {"total_tokens": 3}
    (choice,) = answer.choices
    assert (choice.token_ids, choice.text, choice.finish_reason) == ([5, 6], "aa", "length")
    assert [gap.is_first for gap in answer.gaps()[0]] == [True, False]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (WHOLE.removesuffix(DONE), "no [DONE]"),
        (WHOLE.replace(USAGE, ""), "no usage"),
        (chunk([5]) + USAGE + DONE, "choice 0 has no finish_reason"),
        (chunk([5]) + 'data: {"error": {"message": "lost"}}\n\n', "error event"),
        (chunk([5], "length") + chunk([6], "length") + USAGE + DONE, "goes on after its ending"),
        (WHOLE + chunk([7]), "an event after [DONE]"),
        ("nonsense\n\n" + WHOLE, "a line that is no event"),
    ],
)
def test_what_lacks_or_does_not_belong_is_an_error(body: str, complaint: str) -> None:
    assert complaint in " ".join(answer_to(body).errors)


def test_a_stream_that_breaks_off_is_an_error() -> None:
    assert "broke off" in " ".join(answer_to(chunk([5]), length=10_000).errors)


def test_a_status_other_than_200_is_an_error() -> None:
    assert answer_to("busy", status="503 Service Unavailable").errors == ["HTTP 503: busy"]
