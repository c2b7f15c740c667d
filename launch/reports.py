"""What the processes of `launch` and their parents say to each other, and what an exit status means.

Owns the vocabulary. Imports nothing heavy, opens nothing.
"""

from typing import TypeAlias

from common.processes.lines import Broken, IntakeClosed, JsonLine, Progress, Ready

__all__ = [
    "BAD_FLAG", "Broken", "CloseIntake", "IntakeClosed", "MeetRouter", "MeetRouters", "News", "Order", "Progress", "Ready",
    "Report",
]  # fmt: skip

BAD_FLAG = 2
"""Exit status of a process that can never run as it was started: it cannot honour a flag or a file."""


class News(JsonLine, frozen=True):
    """Something that people should know, while the child goes on."""

    text: str


class CloseIntake(JsonLine, frozen=True):
    """To the router: drain, report IntakeClosed, and stay until told to stop."""


class MeetRouter(JsonLine, frozen=True):
    """To the detokenizer: send text to the router at this control address."""

    address: str


class MeetRouters(JsonLine, frozen=True):
    """To a router: these are the HTTP addresses of its own of the others at the same port."""

    urls: tuple[str, ...]


Report: TypeAlias = Progress | Ready | News | IntakeClosed | Broken
Order: TypeAlias = CloseIntake | MeetRouter | MeetRouters
