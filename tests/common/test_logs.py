"""The log: lines that nobody can forge, and a thread that writes them while nobody waits for it."""

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from common import logs
from common.logs import REQUEST, JsonLines, LogThread, TextLines, with_fields

FORGED = "a\r\n12:00:00.000 ERROR   router launch.child: \x1b[31mhacked\x85\u2028\x00"


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "room", "levelno": logging.INFO, "levelname": "INFO", "msg": message})
    made.__dict__.update(extra)
    return made


def test_no_text_within_a_line_can_look_like_another_line() -> None:
    for made in (record(FORGED), record("said", **with_fields(FORGED, path=FORGED))):
        first, *rest = TextLines("router").format(made).split("\n")
        assert all(line.startswith("    ") for line in rest) and "router room: " in first
        assert not any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 or char == "\u2028" for char in first + "".join(rest))
        line = JsonLines("router").format(made)
        assert line.isascii() and "\n" not in line
    told = json.loads(JsonLines("router").format(record("said", **with_fields(FORGED, path=FORGED, none=None))))
    assert (told["request"], told["path"], told["process"], told["level"]) == (FORGED, FORGED, "router", "info")
    assert "none" not in told


def test_fields_are_quoted_where_they_could_be_read_as_others() -> None:
    fields: dict[str, Any] = {
        "plain": "/v1/a?b:c",
        "spaces": "a b=c",
        "quotes": 'a"b',
        "empty": "",
        "number": 0.123456789,
        "other": "é",
    }
    text = TextLines("router").format(record("said", **with_fields(**fields)))
    assert text.partition("said ")[2] == 'plain=/v1/a?b:c spaces="a b=c" quotes="a\\"b" empty="" number=0.123457 other="\\u00e9"'


def test_a_line_names_the_request_that_the_task_is_about_and_what_went_wrong() -> None:
    token = REQUEST.set("present")
    try:
        raise ValueError("on two\nlines")
    except ValueError:
        made = record("failed", exc_info=sys.exc_info())
    try:
        told = json.loads(JsonLines("router").format(made))
        assert told["request"] == "present" and "ValueError: on two\nlines" in told["exception"]
        assert json.loads(JsonLines("router").format(record("said", **with_fields("other"))))["request"] == "other"
        assert TextLines("router").format(made).count("\n    ") >= 3
    finally:
        REQUEST.reset(token)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_nobody_waits_for_a_reader_that_does_not_read_and_the_log_says_what_is_missing(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "FLUSH_S", 0.2)
    reads, writes = pipe
    log = LogThread(TextLines("router"), writes, most_lines=100)
    begun = time.monotonic()
    for number in range(5_000):
        log.handle(record(f"{number:0200}"))
    log.flush()
    assert time.monotonic() - begun < 5
    dropped = log.dropped
    assert 0 < dropped < 5_000
    received = b""
    os.set_blocking(reads, False)
    until = time.monotonic() + 30
    while log._lines.unfinished_tasks and time.monotonic() < until:
        try:
            received += os.read(reads, 65536)
        except BlockingIOError:
            time.sleep(0.01)
    log.handle(record("the last"))
    log.flush()
    received += os.read(reads, 65536)
    lines = received.decode().splitlines()
    told = [int(count) for count in re.findall(r"(\d+) lines were dropped", received.decode())]
    assert sum(told) == dropped == log.dropped and lines[-1].endswith("the last")
    assert len(lines) == 5_000 - dropped + 1 + len(told)


STUCK = """
import logging, sys, threading
from common.config import LogConfig
from launch.child import configure
configure(LogConfig(log_format="json"), "stuck")
for number in range(3_000):
    logging.getLogger("room").info("x" * 100)
print("done", flush=True)
"""


def test_a_process_whose_log_nobody_reads_ends_in_time_and_one_that_is_read_loses_nothing() -> None:
    command = [sys.executable, "-c", STUCK]
    stuck = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert stuck.wait(60) == 0, "its full pipe neither holds it up nor breaks its end"
    assert stuck.stdout is not None and stuck.stdout.read() == b"done\n"
    stuck.communicate()
    whole = subprocess.run(command, capture_output=True, check=True, timeout=60)
    lines = [json.loads(line) for line in whole.stderr.decode().splitlines()]
    assert len(lines) == 3_000 and {line["process"] for line in lines} == {"stuck"}


ANEW = """
import logging, logging.config, sys
from common.config import LogConfig
from launch.child import ChildProcess, configure
configure(LogConfig(), "leader")
logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
for number in range(3_000):
    logging.getLogger("room").error("x" * 100)
"""


@pytest.mark.parametrize("end", ["sys.exit(1)", "ChildProcess('leader').end_now('rank 1 is gone')"])
def test_the_last_line_is_written_also_where_a_library_has_configured_logging_anew(end: str) -> None:
    script = ANEW + f"logging.getLogger('room').error('rank 1 is gone')\n{end}\n"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.decode().splitlines()[-1].endswith("rank 1 is gone")
