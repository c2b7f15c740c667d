"""A server double: it answers completions with tokens at known delays, and does nothing else.

Owns its sockets and timers. As a process (`python -m tests.bench.serve.double`) it writes its port to stdout, and answers until
it is stopped. It speaks just enough HTTP for clients that send one request after another on a connection.
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field

import uvloop

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WORD, END = (b'{"index":0,"text":" word","finish_reason":%b}' % ending for ending in (b"null", b'"length"'))
LAST = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Delays:
    """ttft_s: from a request to its first token. itl_s: between events. event_tokens: in each event. usage: whether events say
    how many tokens there were so far."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    event_tokens: int = 1
    usage: bool = True


@dataclass(frozen=True, slots=True)
class Done:
    """What the double did: its times to the first token and its gaps, which are late when its timers are."""

    ttfts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


class Double(asyncio.Protocol):
    """One connection."""

    def __init__(self, delays: Delays, done: Done) -> None:
        self._delays, self._done, self._loop = delays, done, asyncio.get_running_loop()
        self._wrote_s = 0.0
        self._data = b""
        self._transport: asyncio.Transport | None = None
        self._due_s, self._sent, self._asked = 0.0, 0, 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, mark, body = self._data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if mark and len(body) >= length:
            self._data = b""
            if head.startswith(b"GET"):
                page = asdict(self._done) if head.startswith(b"GET /times ") else {"data": [{"id": "demo"}]}
                data = json.dumps(page).encode()
                self._write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
                return
            self._asked, self._sent, self._wrote_s = json.loads(body)["max_tokens"], 0, time.perf_counter()
            self._due_s = self._loop.time() + self._delays.ttft_s
            self._write(HEAD)
            self._loop.call_later(self._delays.ttft_s, self._step)

    def _step(self) -> None:
        now_s = time.perf_counter()
        (self._done.gaps_s if self._sent else self._done.ttfts_s).append(now_s - self._wrote_s)
        self._wrote_s = now_s
        self._sent = min(self._asked, self._sent + self._delays.event_tokens)
        ends = self._sent == self._asked
        event = chunk(END if ends else WORD, self._sent, usage=self._delays.usage)
        self._write(event + chunk(b"", self._sent) + b"e\r\ndata: [DONE]\n\n\r\n" + LAST if ends else event)
        if not ends and self._transport is not None:
            self._due_s += self._delays.itl_s
            self._loop.call_later(max(0.0, self._due_s - self._loop.time()), self._step)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def chunk(choices: bytes, tokens: int, *, usage: bool = True) -> bytes:
    """An event as a chunk of HTTP. tokens: the usage so far. Written by hand: it must cost less than the client's reading."""
    counts = b'{"prompt_tokens":8,"completion_tokens":%d,"total_tokens":%d}' % (tokens, 8 + tokens) if usage else b"null"
    data = b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"demo","choices":[%b],"usage":%b}\n\n'
    whole = data % (choices, counts)
    return b"%x\r\n%b\r\n" % (len(whole), whole)


async def serve(delays: Delays) -> None:
    loop = asyncio.get_running_loop()
    done = Done()
    server = await loop.create_server(lambda: Double(delays, done), "127.0.0.1", 0, backlog=1024)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ttft-s", type=float, default=0.1)
    parser.add_argument("--itl-s", type=float, default=0.01)
    parser.add_argument("--event-tokens", type=int, default=1)
    flags = parser.parse_args()
    uvloop.run(serve(Delays(flags.ttft_s, flags.itl_s, flags.event_tokens)))


if __name__ == "__main__":
    main()
