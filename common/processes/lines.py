"""Lines of JSON on the two pipes between a child process and its parent.

Owns the base of every line, its encoding, and the environment variables that name the pipes. Does not know what is said, except
for the reports on a child's start and end, which are the same for all parents.

    parent ── orders ──► child      end of file on this pipe: the parent is gone, or wants the child to stop
    parent ◄── reports ── child     end of file on this pipe: the child is gone
"""

import logging
import os
from typing import Generic, TypeVar

import msgspec

ORDER_FD = "TANDEM_ORDER_FD"
REPORT_FD = "TANDEM_REPORT_FD"
KILLED_WITH = "TANDEM_KILLED_WITH"
"""Names the parent's pid to a child that the kernel is to kill when the parent ends."""
MAX_LINE_BYTES = 64 * 2**20
READ_BYTES = 64 * 1024
"""Read no more at once: larger buffers come and go at the top of the heap, which makes resident memory creep."""

LineT = TypeVar("LineT")
_log = logging.getLogger(__name__)


class JsonLine(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Base of every line. `type` in the JSON is the class name."""


class Progress(JsonLine, frozen=True):
    """The child is still starting. text: what it is doing."""

    text: str


class Ready(JsonLine, frozen=True):
    """The child does its work now. addresses: where it can be reached, by purpose."""

    addresses: dict[str, str]


class IntakeClosed(JsonLine, frozen=True):
    """The router takes no more requests, and every answer that was open has ended."""


class Broken(JsonLine, frozen=True):
    """The child ends for this reason."""

    reason: str


def write_line(fd: int, line: msgspec.Struct) -> None:
    """Raises BrokenPipeError when nobody can read it."""
    data = msgspec.json.encode(line) + b"\n"
    while data:
        data = data[os.write(fd, data) :]


class LineReader(Generic[LineT]):
    """Reads the lines that arrive on a pipe. what: what a line is called in the log, such as "order"."""

    def __init__(self, fd: int, decoder: "msgspec.json.Decoder[LineT]", what: str) -> None:
        self._fd, self._decoder, self._what = fd, decoder, what
        self._unread = b""

    def read(self) -> list[LineT] | None:
        """Wait for bytes and return the lines that they complete; None at the end of the file. Unreadable lines are dropped."""
        data = os.read(self._fd, READ_BYTES)
        if not data:
            return None
        *complete, self._unread = (self._unread + data).split(b"\n")
        if len(self._unread) > MAX_LINE_BYTES:
            self._unread = b""
        lines = []
        for line in complete:
            try:
                lines.append(self._decoder.decode(line))
            except (msgspec.DecodeError, RecursionError) as error:
                _log.error("dropped an unreadable %s: %s", self._what, error)
        return lines
