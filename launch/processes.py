"""The child processes of `launch`: how a role is started, and what its process is told and reports.

Owns the command of a role. `common/processes` knows what a child process is.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from common.processes import child
from launch.child import Order, Report

ChildEvent: TypeAlias = child.ChildEvent[Report]


def launch_command(role: str, flags: Sequence[str]) -> list[str]:
    """The command that runs a role of this very code. -P: a folder where it is started shadows none of its packages."""
    return [sys.executable, "-P", "-m", "launch.main", role, *flags]


class RoleProcess(child.Child[Order, Report]):
    """A process that runs a role. What it writes appears on our stderr as well."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        on_event: Callable[[ChildEvent], object],
        environment: Mapping[str, str] | None = None,
        *,
        killed_with_us: bool = False,
        inherited: Sequence[int] = (),
    ) -> None:
        decoder = msgspec.json.Decoder[Report](Report)
        super().__init__(name, command, decoder, on_event, _echo, environment, killed_with_us=killed_with_us, inherited=inherited)


def _echo(line: str) -> None:
    """Our own stderr may be gone; the child must not block on that."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(line)
        sys.stderr.flush()
