"""The times of an answer, exactly, and the HTTP client against a server that plays a script: tokens of events, kept connections,
and errors by kind.
"""

import asyncio
import json
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.client import HttpClient, TimedAnswer
from bench.options import ServeOptions, TargetOptions
from bench.serve import ServerRefuses, first_request
from bench.workloads import LoadSession, LoadTurn


def new_answer(due_s: float = 10.0, sent_s: float = 10.25, *, counts_from_due: bool = True) -> TimedAnswer:
    made = TimedAnswer(due_s, requested_tokens=6)
    made.begin(sent_s, counts_from_due=counts_from_due)
    return made


def test_times_of_an_open_load_count_from_when_it_was_due_and_others_from_the_sending() -> None:
    late, closed = new_answer(), new_answer(counts_from_due=False)
    for each in (late, closed):
        each.add(10.5, 1)
        each.add(11.0, 1)
        each.end(11.0)
    assert (late.ttft_s, late.e2el_s, late.queue_s) == (0.5, 1.0, 0.25)
    assert (closed.ttft_s, closed.e2el_s, closed.queue_s) == (0.25, 0.75, 0.25)


def test_a_request_that_was_sent_a_little_early_counts_from_the_sending() -> None:
    early = new_answer(due_s=10.0, sent_s=9.75)
    early.add(10.0, 1)
    assert (early.ttft_s, early.queue_s) == (0.25, 0.0)


def test_several_tokens_in_one_event_are_one_gap_and_gaps_of_zero() -> None:
    made = new_answer()
    made.add(11.0, 2)
    made.add(11.5, 3)
    made.add(11.75, 0)  # an event that only ends the answer
    made.add(12.0, 1)
    made.end(12.5)
    assert list(made.gaps_s) == [0.0, 0.5, 0.0, 0.0, 0.5]
    assert made.output_tokens == made.counted == 6
    assert made.tpot_s == (2.0 - 1.0) / 5


def test_what_the_server_says_at_the_end_corrects_the_number_of_tokens() -> None:
    made = new_answer()
    made.add(11.0, 1)
    made.add(12.0, 1)
    made.output_tokens = 5
    made.end(12.0)
    assert made.output_tokens == 5 and list(made.gaps_s) == [1.0] and made.tpot_s == 0.25


def test_an_answer_of_one_token_has_no_tpot_and_one_of_none_has_failed() -> None:
    one, none = new_answer(), new_answer()
    one.add(11.0, 1)
    one.end(11.0)
    none.add(11.0, 0)
    none.end(11.0)
    assert (one.error, one.tpot_s) == ("", None)
    assert none.error == "empty"


pytestmark = pytest.mark.anyio

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
TEXT = b'data: {"choices": [{"text": " a", "finish_reason": null}]}\n\n'
END = b'data: {"choices": [{"text": " z", "finish_reason": "length"}]}\n\n'


def usage(tokens: int, choices: list[dict[str, Any]], cached: int | None = None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": 7, "completion_tokens": tokens, "prompt_tokens_details": details}
    return b"data: %b\n\n" % json.dumps({"choices": choices, "usage": counts}).encode()


def chunked(*parts: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@asynccontextmanager
async def client_of(
    script: Script, timeout_s: float = 60.0, tls: ssl.SSLContext | None = None, *, verify: bool = True
) -> AsyncIterator[HttpClient]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        client = HttpClient(url, "/v1/completions", {"X-A": "b"}, timeout_s, verify=verify, keeps_text=True)
        try:
            yield client
        finally:
            client.close()


def says(*pieces: bytes) -> Script:
    """To each request these bytes, piece by piece."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"}")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.002)

    return script


async def ask(client: HttpClient) -> TimedAnswer:
    answer = TimedAnswer(0.0, requested_tokens=4)
    answer.begin(0.0)
    await asyncio.wait_for(client.ask(answer, b"{}"), 60)
    return answer


async def test_events_that_say_how_many_tokens_there_were_are_counted_by_that_however_their_bytes_are_cut() -> None:
    first = usage(0, [{"delta": {"role": "assistant", "content": ""}}])
    choice = {"delta": {"content": "ab"}, "finish_reason": None}
    stream = chunked(first, usage(3, [choice]), usage(4, [choice | {"finish_reason": "stop"}]), usage(4, [], cached=5), DONE)
    for size in (7, len(stream)):
        async with client_of(says(*(stream[at : at + size] for at in range(0, len(stream), size)))) as client:
            answer = await ask(client)
        assert (answer.error, answer.output_tokens, answer.prompt_tokens, answer.cached_tokens) == ("", 4, 7, 5), size
        assert list(answer.gaps_s)[:2] == [0.0, 0.0] and len(answer.gaps_s) == 3 and answer.text == "abab"


async def test_an_event_without_usage_or_with_one_of_0_is_one_token_and_the_last_usage_corrects_the_total() -> None:
    zero = usage(0, [{"text": " a"}])
    async with client_of(says(chunked(TEXT, b": still here\n\n", zero + END, usage(9, []), DONE))) as client:
        answer = await ask(client)
    assert (answer.counted, answer.output_tokens, len(answer.gaps_s), answer.text) == (3, 9, 2, " a a z")


async def test_thoughts_and_calls_of_tools_are_tokens_too_and_an_error_that_is_null_is_none() -> None:
    deltas = ({"role": "assistant", "tool_calls": None}, {"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]})
    events = [b"data: %b\n\n" % json.dumps({"choices": [{"delta": delta}], "error": None}).encode() for delta in deltas]
    async with client_of(says(chunked(*events, DONE))) as client:
        answer = await ask(client)
    assert (answer.error, answer.counted) == ("", 2)


async def test_a_connection_is_used_again_and_one_that_the_server_closed_meanwhile_is_replaced() -> None:
    connections: list[int] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        for _ in range(2):
            head = await reader.readuntil(b"}")
            assert b"X-A: b\r\n" in head and b"Content-Length: 2\r\n" in head
            connections[-1] += 1
            writer.write(chunked(END, DONE))
        await reader.readuntil(b"}")  # the third is read, and the connection closed without an answer

    async with client_of(script) as client:
        answers = [await ask(client) for _ in range(3)]
    assert [answer.error for answer in answers] == [""] * 3 and connections == [2, 1]


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (b"HTTP/1.1 429 Busy\r\nContent-Length: 4\r\n\r\nwait", "4xx", "HTTP 429: wait"),
        (b"HTTP/1.1 503 Gone\r\nContent-Length: 0\r\n\r\n", "5xx", "HTTP 503"),
        (chunked(TEXT, b'data: {"error": {"message": "lost"}}\n\n'), "error", "lost"),
        (chunked(TEXT), "broken", "before the answer did"),
        (HEAD + b"5\r\ndat", "broken", "closed"),
        (chunked(b"data: {nonsense\n\n"), "broken", "cannot be read"),
        (b"SSH-2.0\r\n", "broken", "no HTTP"),
        (chunked(DONE), "empty", "no token"),
    ],
)
async def test_what_is_no_whole_answer_is_an_error_of_its_kind(answer: bytes, kind: str, message: str) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(answer)

    async with client_of(script) as client:
        failed = await ask(client)
    assert failed.error == kind and message in failed.message


async def test_a_server_that_is_not_there_or_does_not_end_is_an_error_of_its_kind() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        await reader.read()
        await reader.read()

    async with client_of(silent, timeout_s=0.05) as client:
        assert (await ask(client)).error == "timeout"
    assert (await ask(client)).error == "refused", "the server has gone"


@pytest.mark.parametrize(("refused", "usage"), [([], "continuous"), ([b"continuous"], "last"), ([b"stream_options"], "none")])
async def test_the_first_request_learns_what_the_server_can_be_asked_to_tell_of_tokens(refused: list[bytes], usage: str) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0]))
            is_refused = any(word in body for word in refused)
            writer.write(b"HTTP/1.1 400 Bad\r\nContent-Length: 2\r\n\r\nno" if is_refused else chunked(END, DONE))

    bench = ServeOptions(target=TargetOptions(model="m"))
    async with client_of(script) as client:
        assert await first_request(bench, "m", client, LoadSession((LoadTurn("a", 1),))) == usage
    with pytest.raises(ServerRefuses, match="refused"):
        await first_request(bench, "m", client, LoadSession((LoadTurn("a", 1),)))


async def test_https_is_spoken_with_servers_that_are_trusted_and_with_others_only_when_told_to(tmp_path: Path) -> None:
    cert, key = str(tmp_path / "cert"), str(tmp_path / "key")
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=x"]
    subprocess.run([*new, "-keyout", key, "-out", cert], check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    async with client_of(says(chunked(END, DONE)), tls=tls, verify=False) as client:
        assert (await ask(client)).error == ""
    async with client_of(says(chunked(END, DONE)), tls=tls) as client:
        answer = await ask(client)
    assert answer.error == "refused" and "certificate" in answer.message
