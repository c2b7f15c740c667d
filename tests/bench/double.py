"""A server double: it answers completions with tokens at known delays, and does nothing else.

Owns its sockets and its schedule. As a process (`python -m tests.bench.double`) it writes its port to stdout, and answers
until it is stopped. It speaks just enough HTTP for clients that send one request after another on a connection. It waits for the
next time with `select`, whose timeouts are microseconds: the timers of event loops have a resolution of a millisecond.
"""

import argparse
import heapq
import itertools
import json
import select
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WORD, END = (b'{"index":0,"text":" word","finish_reason":%b}' % ending for ending in (b"null", b'"length"'))
LAST = b"0\r\n\r\n"
LOOK_S = 0.05
"""How often it looks whether it is to stop, with nothing to do."""


@dataclass(frozen=True, slots=True)
class Delays:
    """ttft_s: from a request to its first token. itl_s: between events. event_tokens: in each event. usage: whether events say
    how many tokens there were so far."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    event_tokens: int = 1
    usage: bool = True


@dataclass(slots=True, eq=False)
class _Answer:
    """One connection, and what it answers now. sent, asked: tokens."""

    connection: socket.socket
    data: bytes = b""
    sent: int = 0
    asked: int = 0


class Double:
    """port: where it listens."""

    def __init__(self, delays: Delays) -> None:
        self._delays = delays
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self._answers: dict[int, _Answer] = {}
        self._due: list[tuple[float, int, _Answer]] = []
        self._order = itertools.count()

    def serve(self, over: threading.Event) -> None:
        """Until it is over."""
        while not over.is_set():
            wait_s = self._due[0][0] - time.perf_counter() if self._due else LOOK_S
            if wait_s > 0:
                select.select((self._poll,), (), (), min(wait_s, LOOK_S))  # the timeouts of epoll are milliseconds
            for descriptor, _ in self._poll.poll(0):
                self._read(descriptor)
            while self._due and self._due[0][0] <= time.perf_counter():
                due_s, _, answer = heapq.heappop(self._due)
                self._step(answer, due_s)
        for answer in self._answers.values():
            answer.connection.close()
        self._poll.close()
        self._listener.close()

    def _read(self, descriptor: int) -> None:
        if descriptor == self._listener.fileno():
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._answers[connection.fileno()] = _Answer(connection)
            self._poll.register(connection, select.EPOLLIN)
            return
        answer = self._answers[descriptor]
        try:
            data = answer.connection.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self._drop(answer)
            return
        answer.data += data
        head, mark, body = answer.data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if mark and len(body) >= length:
            answer.data = b""
            self._asked(answer, head, body)

    def _asked(self, answer: _Answer, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET"):
            data = json.dumps({"data": [{"id": "demo"}]}).encode()
            self._write(answer, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
            return
        now_s = time.perf_counter()
        answer.asked, answer.sent = json.loads(body)["max_tokens"], 0
        heapq.heappush(self._due, (now_s + self._delays.ttft_s, next(self._order), answer))
        self._write(answer, HEAD)

    def _step(self, answer: _Answer, due_s: float) -> None:
        """Send the event that is due."""
        if answer.connection.fileno() < 0:
            return
        late_s = time.perf_counter() - due_s
        answer.sent = min(answer.asked, answer.sent + self._delays.event_tokens)
        ends = answer.sent == answer.asked
        event = chunk(END if ends else WORD, answer.sent, usage=self._delays.usage)
        if not ends:
            # Small delays are made up for; after a long one the answer goes on from there.
            next_s = due_s + self._delays.itl_s + (late_s if late_s > self._delays.itl_s else 0.0)
            heapq.heappush(self._due, (next_s, next(self._order), answer))
        self._write(answer, event + chunk(b"", answer.sent) + b"e\r\ndata: [DONE]\n\n\r\n" + LAST if ends else event)

    def _write(self, answer: _Answer, data: bytes) -> None:
        try:
            answer.connection.sendall(data)
        except OSError:
            self._drop(answer)

    def _drop(self, answer: _Answer) -> None:
        del self._answers[answer.connection.fileno()]
        self._poll.unregister(answer.connection)
        answer.connection.close()


def chunk(choices: bytes, tokens: int, *, usage: bool = True) -> bytes:
    """An event as a chunk of HTTP. tokens: the usage so far. Written by hand: it must cost less than the client's reading."""
    counts = b'{"prompt_tokens":8,"completion_tokens":%d,"total_tokens":%d}' % (tokens, 8 + tokens) if usage else b"null"
    data = b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"demo","choices":[%b],"usage":%b}\n\n'
    whole = data % (choices, counts)
    return b"%x\r\n%b\r\n" % (len(whole), whole)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in asdict(Delays(ttft_s=0.1, itl_s=0.01)).items():
        if not isinstance(value, bool):
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    double = Double(Delays(**vars(parser.parse_args())))
    sys.stdout.write(f"{double.port}\n")
    sys.stdout.flush()
    double.serve(threading.Event())


if __name__ == "__main__":
    main()
