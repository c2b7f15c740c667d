"""What a child process and its parent say to each other: JSON lines on two inherited pipes, and the exit status.

Owns the vocabulary and the two environment variables that name the pipes. Imports nothing heavy, opens nothing.

    parent ── orders ──► child      end of file on this pipe: the parent is gone or wants an orderly stop
    parent ◄── reports ── child     end of file on this pipe: the child is gone
"""

from typing import TypeAlias

import msgspec

REPORT_FD = "TANDEM_REPORT_FD"
ORDER_FD = "TANDEM_ORDER_FD"
MAX_LINE_BYTES = 65_536
BAD_FLAG = 2
"""Exit status of a process that can never run as it was started: it cannot honour a flag or file."""


class Line(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Base of every line; `type` is the class name."""


class Progress(Line, frozen=True):
    """The child is still starting: what it does now."""

    text: str


class Ready(Line, frozen=True):
    """The child does its work now. addresses: where it can be reached, by purpose."""

    addresses: dict[str, str]


class IntakeClosed(Line, frozen=True):
    """The router takes no more requests, and every answer that was open has ended."""


class News(Line, frozen=True):
    """Something that people should know, while the child goes on."""

    text: str


class Broken(Line, frozen=True):
    """The child ends because of this."""

    reason: str


class CloseIntake(Line, frozen=True):
    """To the router: take no more requests, report IntakeClosed, and stay until told to stop."""


class MeetRouter(Line, frozen=True):
    """To the detokenizer: text goes to the router at this control address."""

    address: str


Report: TypeAlias = Progress | Ready | News | IntakeClosed | Broken
Order: TypeAlias = CloseIntake | MeetRouter

_encoder = msgspec.json.Encoder()
_reports: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)
_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)


def encode(line: Report | Order) -> bytes:
    """One line, with its end."""
    return _encoder.encode(line) + b"\n"


def decode_report(line: bytes) -> Report:
    """Raises msgspec.DecodeError."""
    return _reports.decode(line)


def decode_order(line: bytes) -> Order:
    """Raises msgspec.DecodeError."""
    return _orders.decode(line)
