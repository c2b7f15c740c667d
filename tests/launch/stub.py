"""Stub processes for tests of `launch`: they report, take orders and stop as real ones do, and can be told to misbehave.

Owns no behaviour of the product but its child's half (`launch.child`). Each stub notes what happens to it in the file $STUB_LOG.
$STUB_<NAME> tells the stub of that name how to misbehave:

    slow        never gets ready
    broken      complains and ends before it is ready
    mortal      ends on its own, in order, soon after it was ready
    unfit       can never run again after its first life
    stubborn    does not stop when asked to, nor when asked again
    busy        does not stop when asked to, but says goodbye when there is no time left
    leisurely   takes a second and a half to stop
    parent      leaves a process in its group behind
    babbler     reports a line that is none
    asks        a router that asks for a decode instance whenever it hears of a spare one

$STUB_SPARE is the number of spare instances. $STUB_ORPHAN_S replaces the product's patience with an orphan. With
$STUB_JUMP_TO_DEADLINE, the clock of `launch local` jumps to the startup deadline when prefill-0 is ready and decode-0 is not.
"""

import contextlib
import http.server
import json
import logging
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.config import InstanceConfig, RouterConfig
from common.errors import ConfigError
from common.processes.child import IntakeClosed, Progress, Ready, stop_children
from launch import child as child_half
from launch import local
from launch.child import ChildProcess, CloseIntake, KeepInstances, LaunchOrder, LaunchReport, RoleProcess, SpareWanted, run_child
from launch.fleet_options import FleetCounts
from launch.local import FleetConfig, LocalPlan, run
from tests.launch.waiting import PATIENCE_S

FOREVER_S = 600.0
"""Longer than any test waits for a stub; an end, should a test forget one."""


def stub_command(role: str, flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "tests.launch.stub", role, *flags]


def note(text: str) -> None:
    with open(os.environ["STUB_LOG"], "a") as log:
        log.write(text + "\n")


class Page(http.server.BaseHTTPRequestHandler):
    """The router's pages: every instance has joined and is linked."""

    def do_GET(self) -> None:
        prefill, decode = (
            [f"{role}-{n}" for n in range(int(os.environ[f"STUB_{role.upper()}S"]))] for role in ("prefill", "decode")
        )
        pages: dict[str, object] = {
            "/cluster": {
                "router": {"unready": [], "degraded": [], "settled": True},
                "instances": [
                    {"id": name, "peers": len(peers), "usable": len(peers)}
                    for names, peers in ((prefill, decode), (decode, prefill))
                    for name in names
                ],
            },
            "/v1/models": {"data": [{"id": "stub"}]},
        }
        body = json.dumps(pages[self.path]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


def child(name: str, flags: Sequence[str], process: ChildProcess) -> None:
    """The life of a stub."""
    how = os.environ.get(f"STUB_{name.upper().replace('-', '_')}", "")
    process.progress("warming up")
    if how == "slow":
        threading.Event().wait(FOREVER_S)
    if how == "broken":
        sys.stderr.write(f"{name} has no water\n")
        raise SystemExit(3)
    if how == "unfit" and f"{name} runs as " in Path(os.environ["STUB_LOG"]).read_text():
        raise ConfigError(f"--water: {name} cannot boil it")
    if how == "parent":
        left = subprocess.Popen(["sleep", str(int(FOREVER_S))])
        note(f"{name} left {left.pid}")
    if how == "babbler":
        os.write(process.parent._report_fd or 0, b"not a report\n")

    def obey(order: LaunchOrder) -> None:
        note(f"{name} order {type(order).__name__}")
        if isinstance(order, KeepInstances):
            note(f"{name} hears of {','.join(order.names)} and {order.spare} more")
            for _ in range(2 if how == "asks" and order.spare else 0):  # the second time too many
                process.report(SpareWanted(role="decode"))
        if isinstance(order, CloseIntake):
            process.report(IntakeClosed())

    process.on_order(obey)
    with serving(name, flags) as addresses:
        note(f"{name} runs as {os.getpid()} with {' '.join(flags)}")
        live(name, how, process, Ready(addresses=addresses))
    note(f"{name} stopped")


def live(name: str, how: str, process: ChildProcess, ready: Ready) -> None:
    """Be ready, until told to stop and a little longer."""
    told = threading.Semaphore(0)

    def stop() -> None:
        if how == "stubborn":
            note(f"{name} will not stop")
        else:
            told.release()

    process.on_stop(stop)
    process.report(ready)
    told.acquire(timeout=0.2 if how == "mortal" else FOREVER_S)
    if how == "leisurely":
        time.sleep(1.5)
    if how == "busy":
        child_half.HURRY_S = FOREVER_S  # it says goodbye however slow the machine is
        note(f"{name} has work to finish")
        told.acquire(timeout=FOREVER_S)
        try:
            process.check_hurry()
        finally:
            note(f"{name} says goodbye")


@contextlib.contextmanager
def serving(name: str, flags: Sequence[str]) -> Iterator[dict[str, str]]:
    """What listens in the stub, by its addresses: the router's pages on the port that it was told."""
    if name != "router":
        yield {"inbox": f"tcp://127.0.0.1:{os.getpid() if name == 'detokenizer' else 1}"}  # another one in each life
        return
    (port,) = (int(flag.removeprefix("--port=")) for flag in flags if flag.startswith("--port="))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"http": f"http://127.0.0.1:{server.server_port}", "control": "tcp://127.0.0.1:2"}
        server.shutdown()


def fleet(prefill: int, decode: int) -> int:
    """`launch local` with stubs for children. Notes how long each child may take to stop."""
    config = FleetConfig(
        counts=FleetCounts(prefill=prefill, decode=decode, spare=int(os.environ.get("STUB_SPARE", 0))),
        router=RouterConfig(port=0, control_port=0),
        instance=InstanceConfig(startup_timeout_s=PATIENCE_S, drain_timeout_s=5.0),
    )
    os.environ |= {"STUB_PREFILLS": str(prefill), "STUB_DECODES": str(decode)}

    def stop(children: Sequence[RoleProcess], deadline_s: float) -> list[str]:
        for each in children:
            note(f"{each.name} has {deadline_s:g} s to stop")
        return stop_children(children, deadline_s)

    local.stop_children = stop  # type: ignore[assignment, attr-defined]
    if os.environ.get("STUB_JUMP_TO_DEADLINE"):
        jump_to_deadline({("prefill-0", Ready), ("decode-0", Progress)})
    return run(LocalPlan(config=config), stub_command)


def jump_to_deadline(awaited: set[tuple[str, type[LaunchReport]]]) -> None:
    """Move the clock of `launch local` beyond its deadlines when these children have made these reports."""
    show = local.ChildFleet._show

    def watched(self: local.ChildFleet, child: str, report: LaunchReport) -> None:
        show(self, child, report)
        awaited.discard((child, type(report)))

    local.ChildFleet._show = watched  # type: ignore[method-assign]
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + (0.0 if awaited else PATIENCE_S))
    local.time = clock  # type: ignore[assignment, attr-defined]


def parent() -> int:
    """A parent of one stub that waits to be killed."""
    RoleProcess("decode-0", stub_command("decode", ["--name=decode-0"]), lambda event: None).wait(FOREVER_S)
    return 0


def main(role: str, flags: Sequence[str]) -> int:
    logging.basicConfig(stream=sys.stderr)
    child_half.ORPHAN_S = float(os.environ.get("STUB_ORPHAN_S", child_half.ORPHAN_S))
    if role == "fleet":
        return fleet(int(flags[0]), int(flags[1]))
    if role == "parent":
        return parent()
    names = [flag.removeprefix("--name=") for flag in flags if flag.startswith("--name=")]
    name = names[0] if names else role
    return run_child(name, lambda process: child(name, flags, process))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
