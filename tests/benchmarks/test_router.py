"""`python -m benchmarks.router` with fleets that run, and what its load generator makes of bad answers."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import router
from benchmarks.router import RouterLoad, carry_out, open_streams

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


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nno instance is live", "no instance is live"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"text":" one"}\n\ndata: [DONE]\n\n0\r\n\r\n', "2 tokens are missing"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"text":" one"}\n\n', "connection was lost"),
    ],
)
async def test_an_answer_that_is_refused_cut_or_too_short_is_a_failure_with_its_reason(answer: bytes, reason: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        loaded = await carry_out(RouterLoad(url=url, requests=2, parallel=2, tokens=3, pids=()))
    assert loaded.failed == 2 and all(reason in each for each in loaded.reasons)


async def test_the_rate_of_opening_counts_the_time_in_which_connections_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams, pause_s = 4, 0.05
    waiting: list[asyncio.StreamWriter] = []
    loop = asyncio.get_running_loop()
    connect = loop.create_connection

    async def slow(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(pause_s)
        return await connect(*args, **kwargs)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(b'HTTP/1.1 200 OK\r\n\r\ndata: {"text":" one"}\n\n')
        waiting.append(writer)
        if len(waiting) == streams:
            await asyncio.sleep(pause_s)
            for each in waiting:
                each.write(b'data: {"text":" two"}\n\n0\r\n\r\n')

    monkeypatch.setattr(router, "CONNECTING", 1)
    monkeypatch.setattr(loop, "create_connection", slow)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        loaded = await carry_out(RouterLoad(url=url, requests=streams, parallel=streams, tokens=2, pids=(os.getpid(),)))
        for each in waiting:
            each.close()
    assert loaded.failed == 0, loaded.reasons
    assert 0 < open_streams(loaded, streams).opened_per_s <= 1 / pause_s
