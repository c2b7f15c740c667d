"""Two network namespaces joined by a pair of virtual links: the closest that one host comes to two hosts.

Owns the namespaces while they exist. Does not know what runs in them.
"""

import contextlib
import ctypes
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from common.errors import TransferError

HOSTS = ("10.213.77.1", "10.213.77.2")
_COMMAND_S = 20.0
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a process is."""

    prefix: Sequence[str]
    """What its command is run by, such as `ip netns exec NAME`."""
    host: str
    """The address to listen on."""
    name: str = ""
    """That of a namespace."""
    link: str = ""
    """The name of its end of the link to the other one."""


@contextlib.contextmanager
def two_namespaces() -> Iterator[tuple[Spot, Spot]]:
    """What is in each of them can reach the other. Raises TransferError where that is not allowed."""

    def numbered(number: int) -> Spot:
        name = f"tandem-{os.getpid()}-{number}"
        return Spot(("ip", "netns", "exec", name), HOSTS[number - 1], name, f"tandem{number}")

    first, second = spots = numbered(1), numbered(2)
    try:
        for spot in spots:
            _ip("netns", "add", spot.name)
        _ip(
            *("link", "add", first.link, "netns", first.name),
            *("type", "veth", "peer", "name", second.link, "netns", second.name),
        )
        for spot in spots:
            _ip("-n", spot.name, "address", "add", f"{spot.host}/30", "dev", spot.link)
            _ip("-n", spot.name, "link", "set", spot.link, "up")
            _ip("-n", spot.name, "link", "set", "lo", "up")
        await_links(spots)
        yield spots
    finally:
        for spot in spots:
            with contextlib.suppress(TransferError):  # it was not made, and the reason is raised already
                _ip("netns", "delete", spot.name)


def await_links(spots: Iterable[Spot]) -> None:
    """Wait until every link is up: the system takes a moment to say so, and until then libraries do not see it. Raises
    TransferError."""
    until = time.monotonic() + _COMMAND_S
    for spot in spots:
        while "state UP" not in _ip("-n", spot.name, "link", "show", spot.link):
            if time.monotonic() > until:
                raise TransferError(f"the link of namespace {spot.name} does not come up")
            time.sleep(_LOOK_S)


def enter(name: str) -> None:
    """From now on this thread is in the namespace, and so are threads and processes that it starts. Raises OSError."""
    with open(f"/run/netns/{name}") as there:
        _enter(there.fileno())


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """This thread is in the namespace meanwhile. Raises OSError."""
    with open("/proc/thread-self/ns/net") as home:
        enter(name)
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*words: str) -> str:
    """What the command prints."""
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except OSError as error:
        raise TransferError(f"network namespaces cannot be made: {error}") from error
    if done.returncode != 0:
        raise TransferError(f"network namespaces cannot be made: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
