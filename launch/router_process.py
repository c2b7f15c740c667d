"""The router as a process: the router itself, and the detokenizer that is its child.

Owns the composition and the order of start and stop. Does not know requests: `router` does.

    start   the detokenizer binds its inbox and reports it ─► the router binds HTTP and control ─► the detokenizer learns the latter
    stop    HTTP intake closes, open answers end ─► (told to stop altogether) ─► the detokenizer stops
"""

import asyncio
import logging
from collections.abc import Callable

from common.config import LogConfig, ModelConfig, RouterConfig
from common.errors import Unavailable
from launch import environment, logs
from launch.addresses import host_for_peers, reachable
from launch.child import ChildProcess, run_child
from launch.flags import to_flags
from launch.processes import Child, ChildEvent, Exited, Reported, launch_command, stop_children
from launch.reports import CloseIntake, IntakeClosed, MeetRouter, Order, Progress, Ready

DETOKENIZER_START_S = 120.0
DETOKENIZER_STOP_S = 5.0

_log = logging.getLogger(__name__)


def run(config: RouterConfig, model: ModelConfig, log: LogConfig) -> int:
    """Serve until told to stop. Returns the exit status."""
    environment.prepare(threads=1)
    logs.configure(log, "router")

    def body(process: ChildProcess) -> None:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_RouterProcess(process, config, model, log).run())

    return run_child("router", body)


class _RouterProcess:
    """What happens in the loop. Everything but the two callbacks of other threads runs on the loop's thread."""

    def __init__(self, process: ChildProcess, config: RouterConfig, model: ModelConfig, log: LogConfig) -> None:
        self._process = process
        self._config = config
        self._model = model
        self._detokenizer_flags = to_flags(config, model, log)
        self._loop = asyncio.get_event_loop_policy()
        self._close_intake = asyncio.Event()
        self._stop = asyncio.Event()
        self._detokenizer_ready: asyncio.Future[str]
