"""Two network namespaces with a pair of virtual links between them: the nearest to two hosts that one host has.

Owns the namespaces while they exist. Does not know what runs in them.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator

from common.errors import TransferError
from launch.bench.pair import Spot, Spots

HOSTS = ("10.213.77.1", "10.213.77.2")
_COMMAND_S = 20.0


@contextlib.contextmanager
def two_namespaces() -> Iterator[Spots]:
    """What is in each of them can reach the other. Raises TransferError where that is not allowed."""
    names = [f"tandem-{os.getpid()}-{number}" for number in (1, 2)]
    links = [f"tandem{number}" for number in (1, 2)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        for name, link, host in zip(names, links, HOSTS, strict=True):
            _ip("-n", name, "address", "add", f"{host}/30", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        first, second = (Spot(("ip", "netns", "exec", name), host) for name, host in zip(names, HOSTS, strict=True))
        yield first, second
    finally:
        for name in names:
            with contextlib.suppress(TransferError):  # it was not made, and then that is said already
                _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except OSError as error:
        raise TransferError(f"network namespaces cannot be made: {error}") from error
    if done.returncode != 0:
        raise TransferError(f"network namespaces cannot be made: {done.stderr.strip() or done.stdout.strip()}")
