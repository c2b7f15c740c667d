"""Two network namespaces with a pair of virtual links between them: the nearest to two hosts that one host has.

Owns the namespaces while they exist. Does not know what runs in them.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from common.errors import TransferError
from launch.bench.pair import Spot

HOSTS = ("10.213.77.1", "10.213.77.2")
_COMMAND_S = 20.0


@dataclass(frozen=True, slots=True)
class Namespace(Spot):
    """A spot of its own. link: the name of its end of the link."""

    name: str
    link: str

    @classmethod
    def named(cls, name: str, host: str, link: str) -> "Namespace":
        return cls(("ip", "netns", "exec", name), host, name, link)


@contextlib.contextmanager
def two_namespaces() -> Iterator[tuple[Namespace, Namespace]]:
    """What is in each of them can reach the other. Raises TransferError where that is not allowed."""
    first, second = spots = (
        Namespace.named(f"tandem-{os.getpid()}-1", HOSTS[0], "tandem1"),
        Namespace.named(f"tandem-{os.getpid()}-2", HOSTS[1], "tandem2"),
    )
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
        yield spots
    finally:
        for spot in spots:
            with contextlib.suppress(TransferError):  # it was not made, and then that is said already
                _ip("netns", "delete", spot.name)


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except OSError as error:
        raise TransferError(f"network namespaces cannot be made: {error}") from error
    if done.returncode != 0:
        raise TransferError(f"network namespaces cannot be made: {done.stderr.strip() or done.stdout.strip()}")
