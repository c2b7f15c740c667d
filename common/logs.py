"""The log of a process: how its lines are written, and who writes them.

Owns both forms of a line, and the thread that writes them to a stream: whoever logs never waits for whoever reads the stream.
Lines that wait are bounded; those beyond are counted, and the log itself says how many are missing. Does not know what is logged.

No text within a line can look like another line. As text, what follows a line break is indented, and other control characters
are escaped; fields, which may hold what a client sent, are quoted where they hold more than visible ASCII. JSON escapes both.
"""

import atexit
import json
import logging
import os
import queue
import re
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import QueueHandler
from typing import Any

REQUEST: ContextVar[str] = ContextVar("request", default="")
"""The id of the request that the present task is about: lines that are logged meanwhile name it. "": of none."""
STDERR = 2
MOST_LINES = 8_192
"""So many lines may wait to be written."""
FLUSH_S = 1.0
"""How long the end of a process waits for lines to be written."""
_PLAIN = re.compile(r"[!#-<>-~]+")
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}
_CONTROLS |= {ord("\n"): "\n    ", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def with_fields(request: str = "", **fields: Any) -> dict[str, Any]:
    """For `extra` of a call of a logger. request: in place of the present one. fields: written as they are named, None not at
    all."""
    return {"request": request, "fields": fields}


def _said(record: logging.LogRecord) -> Mapping[str, Any]:
    """What a line names beside its message."""
    told = record.__dict__
    request = told.get("request") or REQUEST.get()
    named = {"request": request} if request else {}
    return named | {name: value for name, value in told.get("fields", {}).items() if value is not None}


class TextLines(logging.Formatter):
    """For people. name: of the process."""

    def __init__(self, name: str) -> None:
        form = f"%(asctime)s.%(msecs)03d %(levelname)-7s {name.replace('%', '%%')} %(name)s: %(message)s"
        super().__init__(form, datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = (f" {name}={_quoted(value)}" for name, value in _said(record).items())
        return super().formatMessage(record) + "".join(fields)

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).translate(_CONTROLS)


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class JsonLines(logging.Formatter):
    """For programs: an object with `time` (RFC 3339, UTC), `level`, `process`, `logger` and `message`, and what else is known."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "process": self._name, "logger": record.name}
        line |= {"message": record.getMessage(), **_said(record)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class LogThread(QueueHandler):
    """Has lines written to an open file by a thread of its own. form: how they are written.

    The thread writes below `sys.stderr`, whose lock a write that hangs would hold when the interpreter ends.
    """

    def __init__(self, form: logging.Formatter, fd: int = STDERR, most_lines: int = MOST_LINES) -> None:
        self._lines: queue.Queue[logging.LogRecord] = queue.Queue(most_lines)
        super().__init__(self._lines)
        self.setFormatter(form)
        self.dropped = 0
        """Lines for which there was no room."""
        self._fd = fd
        threading.Thread(target=self._write, name="log", daemon=True).start()
        atexit.register(self.flush)  # a library that configures logging takes us from what `logging.shutdown` flushes

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Wait until what was logged is written, for FLUSH_S at most."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, FLUSH_S)

    def _write(self) -> None:
        told = 0
        while True:
            text = f"{self._lines.get().getMessage()}\n"
            if self.dropped > told:
                missing, told = self.dropped - told, self.dropped
                lost = logging.LogRecord(__name__, logging.WARNING, "", 0, "%d lines were dropped", (missing,), None)
                text = f"{self.format(lost)}\n{text}"
            data = text.encode(errors="backslashreplace")
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:  # nobody reads it any more
                self.dropped += 1
            self._lines.task_done()


def lines_dropped() -> int:
    """Lines of this process that nobody has got."""
    return sum(each.dropped for each in _threads())


def flush() -> None:
    """Wait until what was logged is written, for FLUSH_S at most: for a process that ends without its `atexit` functions."""
    for each in _threads():
        each.flush()


def _threads() -> list[LogThread]:
    return [each for each in logging.getLogger().handlers if isinstance(each, LogThread)]
