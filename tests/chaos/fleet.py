"""The fleet as processes: a router and instances of both roles, each of them a child that can be struck and started again.

Owns the processes, their logs and what is wrong about how they end. Does not know requests, nor when somebody is to be struck.

A process that was not struck and ends all the same is started again, so that the run goes on, and is a problem. All of them carry
a mark in their environment, by which whoever is left behind is found, whatever became of its parent.
"""

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.ids import Role
from common.options import option
from common.processes.child import Exited, Ready, Reported
from launch.child import RoleEvent, RoleProcess, launch_command
from tests.rig.shared_memory import FOLDER, abandoned, shared_files

MARK = "TANDEM_CHAOS"
START_S = 120.0
STOP_S = 60.0
"""More than a drain takes, and than closing the transport after it."""
ORPHAN_S = 60.0
"""Ends the wait for processes whose parent was killed. They end when its pipes close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many instances, and what they are told."""

    prefill: int = option(2, "prefill instances")
    decode: int = option(2, "decode instances")
    heartbeat_s: float = option(0.5, "the router's flag")
    dead_after_s: float = option(3.0, "the router's flag")
    drain_timeout_s: float = option(1.5, "the instances' flag")
    kv_memory: str = option("64MiB", "of a rank")
    tp: int = option(1, "ranks of each instance: a fault strikes one of them, and the instance ends whichever it is")
    log_level: str = option("info", "of every process")
    speculative_config: str = option("", "the instances' flag: how they draft tokens")

    def names(self, role: Role) -> list[str]:
        return [f"{role}-{number}" for number in range(self.prefill if role == "prefill" else self.decode)]


class Process(RoleProcess):
    """One life of a process. on_end is called on the loop when it has ended. code: the folder of the product that it runs, if
    that is not ours."""

    def __init__(
        self, name: str, role: str, flags: Sequence[str], log: Path, environment: Mapping[str, str], code: Path | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Mapping[str, str]] = loop.create_future()
        """Its addresses, when it does its work."""
        self.ended: asyncio.Future[int] = loop.create_future()
        """Its exit status."""
        self.is_struck = False
        """Whether somebody wants it to end."""
        into_log = ["/bin/sh", "-c", 'exec "$@" >"$0" 2>&1', str(log)]
        of_code = [] if code is None else ["env", f"PYTHONPATH={code}"]
        command = [*into_log, *of_code, *launch_command(role, flags)]
        super().__init__(name, command, lambda event: loop.call_soon_threadsafe(self._take, event), environment)

    def strike(self, number: signal.Signals) -> None:
        """Send it a signal. One that is not SIGSTOP or SIGCONT is to end it."""
        self.is_struck = self.is_struck or number not in (signal.SIGSTOP, signal.SIGCONT)
        self.signal(number)

    def strike_rank(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to one of its ranks, which this process may be itself. It is to end all of them."""
        self.is_struck = True
        with contextlib.suppress(ProcessLookupError):  # its leader has killed it, because it was stopped
            os.kill(pid, number)

    async def end(self, limit_s: float) -> int | None:
        """Its exit status, or None when it does not end in time."""
        done, _ = await asyncio.wait([self.ended], timeout=limit_s)
        return self.ended.result() if done else None

    def kill(self) -> None:
        self.is_struck = True
        super().kill()

    def _take(self, event: RoleEvent) -> None:
        match event:
            case Reported(report=Ready(addresses=addresses)) if not self.ready.done():
                self.ready.set_result(addresses)
            case Exited(status=status):
                self.ended.set_result(status)


class Fleet:
    """Starts, strikes and stops. logs: a folder for what the processes say."""

    def __init__(self, shape: Shape, logs: Path) -> None:
        self.shape = shape
        self.logs = logs
        self.problems: list[str] = []
        """Ends that nobody wanted, and orders that were not obeyed."""
        self._mark = secrets.token_hex(8)
        self.others: tuple[str, ...] = ()
        """More flags of every instance."""
        self.code: dict[str, Path] = {}
        """What a process runs when it is started next, if that is not our own code, by its name."""
        self._lives: dict[str, int] = {}
        self._running: dict[str, Process] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._control = ""
        self._memory_before = shared_files()

    async def start(self) -> str:
        """Start everything. Returns the router's URL; raises TimeoutError."""
        shape = self.shape
        times = [f"--heartbeat-s={shape.heartbeat_s}", f"--dead-after-s={shape.dead_after_s}"]
        addresses = await self._start("router", "router", ["--port=0", "--control-port=0", *times])
        self._control = addresses["control"]
        await self._start_instances()
        return addresses["http"]

    async def _start_instances(self) -> None:
        await asyncio.gather(*(self.start_instance(name) for role in ("prefill", "decode") for name in self.shape.names(role)))

    async def start_instance(self, name: str) -> None:
        """Start an instance, for the first time or again. Returns when it is a member of the fleet. Raises TimeoutError."""
        shape = self.shape
        flags = [
            f"--router={self._control}", f"--name={name}", "--device=cpu", "--dtype=float32", "--threads=1",
            f"--kv-memory={shape.kv_memory}", f"--drain-timeout-s={shape.drain_timeout_s}", f"--tp={shape.tp}",
            "--grammar=off", *self.others,
        ]  # fmt: skip
        if shape.speculative_config:  # A former release may not have this flag.
            flags.append(f"--speculative-config={shape.speculative_config}")
        await self._start(name, name.partition("-")[0], flags)

    def process(self, name: str) -> Process:
        return self._running[name]

    async def _start(self, name: str, role: str, flags: Sequence[str]) -> Mapping[str, str]:
        life = self._lives[name] = self._lives.get(name, -1) + 1
        log = self.logs / f"{name}.{life}.log"
        process = Process(
            name, role, [*flags, f"--log-level={self.shape.log_level}"], log, {MARK: self._mark}, self.code.get(name)
        )
        self._running[name] = process
        watch = asyncio.create_task(self._watch(process))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        either: list[asyncio.Future[Any]] = [process.ready, process.ended]
        await asyncio.wait(either, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if process.ready.done():
            return process.ready.result()
        process.kill()
        raise TimeoutError(f"{name} was not ready within {START_S:g} s, or ended before: see {log}")

    async def _watch(self, process: Process) -> None:
        """Notice when it ends though nobody wants it to, and start it again."""
        status = await asyncio.shield(process.ended)  # others wait for it too, also when this watch is over
        if process.is_struck:
            return
        self.problems.append(f"{process.name} (life {self._lives[process.name]}) ended by itself with status {status}")
        if process.ready.done() and not process.name.startswith("router"):
            try:
                await self.start_instance(process.name)
            except TimeoutError as error:
                self.problems.append(str(error))

    async def stop(self) -> None:
        """Stop all in order: the instances drain, the routers follow. What is wrong about it becomes a problem."""
        routers = [process for name, process in self._running.items() if name.startswith("router")]
        instances = [process for process in self._running.values() if process not in routers]
        for process in self._running.values():
            process.strike(signal.SIGCONT)
        for process in instances:
            process.strike(signal.SIGTERM)
        await asyncio.gather(*map(self.expect_end, instances))
        for process in routers:
            process.strike(signal.SIGTERM)
        await asyncio.gather(*map(self.expect_end, routers))

    async def expect_end(self, process: Process) -> None:
        status = await process.end(STOP_S)
        if status != 0:
            what = f"ended with status {status}" if status is not None else f"did not end within {STOP_S:g} s"
            self.problems.append(f"{process.name} was told to stop, and {what}")

    async def clear(self) -> None:
        """Nothing of it is left, whatever happened before; what had to be killed for that, or is left, is a problem."""
        for task in self._watches:
            task.cancel()
        for process in self._running.values():
            process.kill()
            await process.end(STOP_S)
        clock = asyncio.get_running_loop().time
        until_s = clock() + ORPHAN_S
        while (left := [*map(str, self._marked()), *self._memory_left()]) and clock() < until_s:
            await asyncio.sleep(0.2)
        self.problems += [f"left behind: {what}" for what in left]
        for pid in self._marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _marked(self) -> Iterator[int]:
        """Processes that carry the mark of this fleet."""
        mark = f"{MARK}={self._mark}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)

    def _memory_left(self) -> list[str]:
        return [f"{FOLDER}/{name}" for name in abandoned(self._memory_before)]
