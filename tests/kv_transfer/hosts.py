"""Two hosts: two network namespaces, a member in each of them, and the link between, which a test slows, cuts and heals.

Owns the link's state and the members' processes. Knows no test. What members are told goes over pipes and never over the link.
"""

import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tests.kv_transfer.agent_process import Plan
from tests.kv_transfer.agents import Kind, open_files, running_threads
from tests.kv_transfer.local_agent import WAIT_S
from tests.kv_transfer.members import Member
from tests.rig.forks import forked
from tests.rig.namespaces import Spot, await_links

COMMAND_S = 60.0
LOOK_S = 0.02
"""How often something is looked at that does not announce itself."""
REST_S = 0.5


@dataclass(frozen=True, slots=True)
class Cable:
    """The link from one namespace to the other."""

    near: Spot
    far: Spot

    def slow(self, megabits_per_s: int) -> None:
        """No more than so much goes to the far end."""
        bucket = ("tbf", "rate", f"{megabits_per_s}mbit", "burst", "128kb", "latency", "50ms")
        _shape(self.near, "replace", *bucket)

    def drop(self) -> None:
        """Every packet is lost, in both directions: none fits into so small a bucket. The links stay up, so nobody is told."""
        for end in (self.near, self.far):
            _shape(end, "replace", "tbf", "rate", "8bit", "burst", "10", "latency", "1ms")

    def cut(self) -> None:
        """Silently: nothing arrives on either side, and nobody is told."""
        _run("ip", "-n", self.far.name, "link", "set", self.far.link, "down")

    def heal(self) -> None:
        """As it was at first. Returns when it carries something."""
        _run("ip", "-n", self.far.name, "link", "set", self.far.link, "up")
        for end in (self.near, self.far):
            if "tbf" in _run(*end.prefix, "tc", "qdisc", "show", "dev", end.link):
                _shape(end, "delete")
        await_links((self.near, self.far))


Held: TypeAlias = tuple[int, int, int, int]
"""The open files of the source and of the target, and their threads."""


class TwoHosts:
    """A source in the near namespace and a target in the far one, of the same size."""

    def __init__(self, cable: Cable, kind: Kind, total_pages: int, page_bytes: int, folder: Path) -> None:
        self.cable = cable
        is_forked = kind.transport == "torch"
        """NIXL looks at /sys, which is that of the namespace only where `ip netns exec` has mounted it."""
        members = []
        for seed, (name, spot) in enumerate({"source": cable.near, "target": cable.far}.items(), 1):
            plan = Plan(
                is_threaded=True,
                transport=kind.transport,
                host=spot.host,
                namespace=spot.name if is_forked else "",
                total_pages=total_pages,
                page_bytes=page_bytes,
                silence_s=kind.silence_s,
                seed=seed,
            )
            with forked() if is_forked else nullcontext():
                members.append(Member(name, 1, plan, kind, folder, () if is_forked else spot.prefix))
        self.source, self.target = members

    def start(self) -> None:
        """Wait until both are there."""
        self.source.started()
        self.target.started()

    def connect(self) -> None:
        """Make the link anew, whatever has become of the former one and of the cable."""
        self.disconnect()
        self.cable.heal()
        self.source.connect([self.target])
        self.source.await_link(self.target, "ready")

    def disconnect(self) -> None:
        self.source.connect([])

    def held(self) -> Held:
        source, target = self.source.pid, self.target.pid
        return open_files(source), open_files(target), running_threads(source), running_threads(target)

    def held_at_rest(self) -> Held:
        """When it has not changed for a while."""
        seen = [self.held()]

        def is_still() -> bool:
            seen.append(self.held())
            return seen[-1] == seen[-2]

        assert await_true(is_still, every_s=REST_S), f"files and threads come and go: {seen}"
        return seen[-1]

    def kill(self) -> None:
        self.source.kill()
        self.target.kill()


def await_true(is_so: Callable[[], bool], timeout_s: float = WAIT_S, every_s: float = LOOK_S) -> bool:
    """Look again and again. False when it is not so within that time."""
    until = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > until:
            return False
        time.sleep(every_s)
    return True


def is_within(held: Held, limit: Held) -> bool:
    """Neither of them has more of anything."""
    return all(number <= most for number, most in zip(held, limit, strict=True))


def processes_in(namespace: Spot) -> list[str]:
    return _run("ip", "netns", "pids", namespace.name).split()


def _shape(end: Spot, verb: str, *words: str) -> None:
    _run(*end.prefix, "tc", "qdisc", verb, "dev", end.link, "root", *words)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr or done.stdout}"
    return done.stdout
