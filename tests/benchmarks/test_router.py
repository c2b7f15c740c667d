"""`python -m benchmarks.router` with fleets that run, and what its load generator makes of bad answers."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from benchmarks.router import LoadResult, LoadRun, RouterLoad

pytestmark = pytest.mark.anyio


def test_a_quick_run_measures_prints_and_writes_what_was_asked_for(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.router", "--quick", "--markdown", "--requests", "24"]
    done = subprocess.run([*command, "--json", str(figures)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("```sh\npython -m benchmarks.router --quick --markdown --requests=24 --json=")
    outcome = json.loads(figures.read_text())
    assert [each["beside"] for each in outcome["first_token"]] == [0, 64]
    assert all(0 < each["p50_ms"] <= each["p99_ms"] for each in outcome["first_token"] if not each["beside"])
    (streams,) = outcome["streams"]
    assert (streams["streams"], streams["failed"], outcome["requests"]["failed"]) == (8, 0, 0)
    assert streams["tokens_per_s"] > 0 and streams["router_us"] > 0
    assert outcome["open"] is None


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WORD = chunk(b'data: {"choices":[{"text":" one","finish_reason":null}]}\n\n')
END = chunk(b'data: {"choices":[{"text":" two","finish_reason":"length"}]}\n\ndata: [DONE]\n\n') + chunk(b"")


async def loaded(answer: Callable[[asyncio.StreamWriter], Awaitable[None]], streams: int, tokens: int) -> LoadResult:
    """The load on a server that answers in this way."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}}")
        await answer(writer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return await LoadRun(RouterLoad(url, requests=streams, parallel=streams, tokens=tokens, pids=(os.getpid(),))).carry_out()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 19\r\n\r\nno instance is live", "no instance is live"),
        (HEAD + WORD + END, "1 tokens are missing"),
        (HEAD + WORD + chunk(b""), "the stream ended before"),
    ],
)
async def test_an_answer_that_is_refused_cut_or_too_short_is_a_failure_with_its_reason(answer: bytes, reason: str) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    result = await loaded(write, streams=2, tokens=3)
    assert result.failed == 2 and all(reason in each for each in result.reasons), result.reasons


async def test_the_steady_time_begins_when_all_streams_are_open_and_opening_takes_until_then() -> None:
    pause_s, open_s = 0.1, 0.3

    async def write(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(pause_s)
        writer.write(HEAD + WORD)
        await asyncio.sleep(open_s)
        writer.write(END)

    result = await loaded(write, streams=4, tokens=2)
    assert result.failed == 0, result.reasons
    assert result.most_open == 4 and result.open_mb > 0
    assert pause_s <= result.opening_s <= result.total.s - result.window.s
    assert 0 < result.window.s < result.total.s and (result.total.events, result.tokens_per_event) == (8, 1)
