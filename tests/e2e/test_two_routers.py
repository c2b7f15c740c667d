"""Two routers before one set of instances, as real processes: one dies, and the streams of the other do not notice.

`tests/life` proves what instances do about the requests of the dead one; here the kernel says that it is gone.
"""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.fleet_pages import FleetPages, RunningFleet, not_home, running_fleet
from tests.shared_memory import left_behind, shared_files

FLAGS = ("--routers", "2", "--executor", "timed", "--transport", "cma", "--step-cost", "0.01,0,0", "--kv-memory", "16MiB")
NAMES = ("prefill-0", "decode-0")
TOKENS = 200
EACH = 4
PATIENCE_S = 60.0
_OWN = re.compile(r"^router-\d .*\bown (http://\S+?),", re.MULTILINE)


@dataclass
class Stream:
    """What a client has read so far. finish_reason: None also when the connection ended before the answer did."""

    events: int = 0
    finish_reason: str | None = None


def read(url: str, stream: Stream) -> None:
    body = {"model": "demo", "prompt": "falcon " * 40, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    with (
        contextlib.suppress(httpx.TransportError),
        httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                stream.events += 1
                stream.finish_reason = choice["finish_reason"] or stream.finish_reason


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.05)


def a_router(fleet: RunningFleet) -> int:
    """The process id of one of them."""
    return next(pid for pid in fleet.family() if "router" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"))


def test_one_of_two_routers_is_killed_and_the_streams_of_the_other_finish_unharmed() -> None:
    before = shared_files()
    with running_fleet(*FLAGS) as fleet, ThreadPoolExecutor(2 * EACH) as pool:
        urls = _OWN.findall(fleet.output)
        assert len(set(urls)) == 2
        streams = {url: [Stream() for _ in range(EACH)] for url in urls}
        for one, other in (urls, urls[::-1]):
            name = FleetPages(one).complete("falcon", 3)["id"]
            found = FleetPages(other).get(f"/requests/{name}")
            assert found.status == 200 and found.json()["id"] == name, "a request is found at any router behind the port"
            assert FleetPages(other).get(f"/requests/{name}?here=true").status == 404
        readers = [pool.submit(read, url, stream) for url in urls for stream in streams[url]]
        until(lambda: all(stream.events > 5 for url in urls for stream in streams[url]), "every stream has begun")
        os.kill(a_router(fleet), signal.SIGKILL)
        for reader in readers:
            reader.result()
        (dead,) = [url for url in urls if streams[url][0].finish_reason is None]
        (survivor,) = [url for url in urls if url != dead]
        assert [stream.finish_reason for stream in streams[dead]] == [None] * EACH
        assert [stream.finish_reason for stream in streams[survivor]] == ["length"] * EACH
        pages = FleetPages(survivor)
        until(lambda: not not_home(pages.cluster(), NAMES), "the pages of the dead router's requests are home")
        assert not any(value for _, value in pages.samples("tandem_resumes_total")), "nothing was computed anew"
        until(FleetPages(dead).is_ready, "it is back at its port, and the instances have found it")
        assert FleetPages(dead).complete("falcon", 3)["usage"]["completion_tokens"] == 3
    assert not left_behind(before)
