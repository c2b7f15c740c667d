"""The router as a process: the router itself, and the detokenizers that are its children; and a detokenizer as a process.

Owns the composition and the order of start and stop. Does not know requests or text: `router` and `common.text` do.

    start   each detokenizer binds and reports its inbox ─► the router binds HTTP and control ─► they learn the latter
    stop    the router drains: HTTP intake closes, open answers end ─► (told to stop completely) ─► the detokenizers stop

A detokenizer that dies is started again (`launch/supervisor.py`). The router learns where the new one is, because only the router
knows what the old one was told.
"""

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from common.access import Access, Trust, read_access, read_again, read_trust
from common.addresses import LOOPBACK, bind_address, host_for_peers, new_router_name, reachable
from common.config import AccessConfig, LogConfig, ModelConfig, RouterConfig, SecurityConfig
from common.errors import ConfigError, TandemError
from common.options import to_flags
from common.processes.child import IntakeClosed, Progress, Ready, Reported, stop_children
from launch.child import (
    BAD_FLAG,
    ChildProcess,
    CloseIntake,
    KeepInstances,
    LaunchOrder,
    MeetRouter,
    MeetRouters,
    RoleEvent,
    RoleProcess,
    SpareWanted,
    launch_command,
)
from launch.fleet_page import trusting
from launch.supervisor import GivenUp, SupervisedChild, Supervisor

if TYPE_CHECKING:
    from router.process import Serving  # its module imports what is heavy

DETOKENIZER = "detokenizer"
DETOKENIZER_START_S = 120.0
DETOKENIZER_STOP_S = 5.0
GC_THRESHOLDS = 20_000, 20, 20
"""For `gc.set_threshold`. A turn of mail makes thousands of objects that end with it."""

_log = logging.getLogger(__name__)


class DetokenizerFailed(TandemError):
    """The detokenizer did not start. The router cannot work without it."""


async def serve(
    process: ChildProcess,
    config: RouterConfig,
    model: ModelConfig,
    log: LogConfig,
    security: SecurityConfig,
    access_config: AccessConfig,
) -> None:
    """Serve until told to stop."""
    trust, access = read_trust(security), read_access(access_config)
    if access_config.api_keys or access_config.control_key:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _read_keys_again, access, access_config)
    duties = _Duties(process, access_config.tls_cert)
    router = new_router_name()
    flags = to_flags(config, model, log, security)
    detokenizers = [
        KeptDetokenizer(
            DETOKENIZER if config.detokenizers == 1 else f"{DETOKENIZER}-{shard}",
            launch_command(DETOKENIZER, ["--of", router, "--shard", str(shard), *flags]),
            process.progress,
            duties.give_up,
        )
        for shard in range(config.detokenizers)
    ]

    def ready(serving: "Serving") -> None:
        for shard, detokenizer in enumerate(detokenizers):
            detokenizer.meet(reachable(serving.control, LOOPBACK), partial(serving.detokenizer_moved, shard))
        duties.serving = serving
        serving.scaling.starts = lambda role: process.report(SpareWanted(role=role))
        own = {"own": serving.own_url} if config.share_port == "on" else {}
        grpc = {"grpc": serving.grpc_url} if serving.grpc_url else {}
        control = reachable(serving.control, host_for_peers())
        _settle_memory()
        process.report(Ready(addresses={"http": serving.url, **grpc, **own, "control": control}))

    try:
        process.progress("loading the tokenizer")
        from common.ids import InstanceId
        from router.process import serve as serve_router  # imported while the detokenizer loads

        inboxes = await asyncio.gather(*(detokenizer.first_inbox(duties.stop) for detokenizer in detokenizers))
        known = [inbox for inbox in inboxes if inbox is not None]
        if len(known) == len(detokenizers):
            await serve_router(
                config, model, InstanceId(router), known, ready, duties.intake_closes, duties.at_once, trust, access
            )
            process.check_hurry()
        for detokenizer in detokenizers:
            detokenizer.check()
        process.report(IntakeClosed())
        await duties.stop.wait()
    finally:
        process.on_stop(lambda: None)
        process.on_order(lambda order: None)
        await asyncio.gather(*(detokenizer.stop() for detokenizer in detokenizers))


def _read_keys_again(access: Access, config: AccessConfig) -> None:
    try:
        read_again(access, config)
        _log.info("the keys of the HTTP API were read again")
    except ConfigError as error:
        _log.error("the keys of the HTTP API stay as they were: %s", error)


def _settle_memory() -> None:
    """What was made until now stays, so the garbage collector need not see it again. Most of what comes later is freed without
    the collector: it looks less often, because it stops the loop for longer the more requests and instances there are."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


class _Duties:
    """The orders to this process, as events of its loop. Made on the loop's thread. cert: of the HTTP API of all routers."""

    def __init__(self, process: ChildProcess, cert: str) -> None:
        self.intake_closes = asyncio.Event()
        self.at_once = asyncio.Event()
        self.stop = asyncio.Event()
        self.serving: Serving | None = None
        """The router, once it is ready."""
        self._process, self._tls = process, trusting(cert)
        loop = asyncio.get_running_loop()
        process.on_stop(lambda: loop.call_soon_threadsafe(self.end))
        process.on_order(lambda order: loop.call_soon_threadsafe(self._obey, order))

    def end(self) -> None:
        """Drain and stop. When it is told again: at once."""
        self.intake_closes.set()
        self.stop.set()
        if self._process.hurried:
            self.at_once.set()

    def give_up(self) -> None:
        """Stop, and end the open requests at once: they cannot go on."""
        self.at_once.set()
        self.end()

    def _obey(self, order: LaunchOrder) -> None:
        """What the router is told while it serves comes after it has reported its own addresses."""
        if isinstance(order, CloseIntake):
            self.intake_closes.set()
        elif self.serving is not None and isinstance(order, MeetRouters):
            self.serving.meet_others(order.urls, self._tls)
        elif self.serving is not None and isinstance(order, KeepInstances):
            self.serving.scaling.keeps(order.names, order.spare)


class KeptDetokenizer:
    """Keeps one detokenizer alive and introduces it and the router to each other. Made and used on the loop's thread.

    name: of its process, for people. say: tells people. give_up: called when it cannot be kept alive; `check` then raises why.
    """

    def __init__(self, name: str, command: Sequence[str], say: Callable[[str], object], give_up: Callable[[], object]) -> None:
        self._name = name
        self._command = command
        self._say = say
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._supervisor = Supervisor([SupervisedChild(name, DETOKENIZER, drains=False)], self._start, self._tell)
        self._timer: asyncio.TimerHandle | None = None
        self._failure: TandemError | None = None
        self._stopping = False
        self._ready = asyncio.Event()
        self._inbox: str | None = None
        """The present child's inbox, once it is ready."""
        self._router: tuple[str, Callable[[str], object]] | None = None
        """Its control address, and what is called with the inbox of every detokenizer after the first."""
        self._child: RoleProcess
        self._start(name)
        self._router_knows = self._child
        """The child whose inbox the router knows."""

    async def first_inbox(self, stop: asyncio.Event) -> str | None:
        """The first detokenizer's inbox; None when `stop` is set first. Raises DetokenizerFailed at the deadline."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._ready, stop)]
        done, late = await asyncio.wait(waits, timeout=DETOKENIZER_START_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in late:
            wait.cancel()
        if not done:
            raise DetokenizerFailed(f"{self._name} was not ready within {DETOKENIZER_START_S:g} s; {self._child.account()}")
        self._router_knows = self._child
        return self._inbox

    def meet(self, control: str, moved: Callable[[str], object]) -> None:
        """The router serves: from now on tell each of the two where the other is.

        control: the router's address. moved: called with the inbox of every detokenizer after the first.
        """
        self._router = control, moved
        self._introduce()

    def check(self) -> None:
        """Raises DetokenizerFailed, or ConfigError when it does not accept its flags."""
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.to_thread(stop_children, [self._child], DETOKENIZER_STOP_S)

    # --- inside --------------------------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        """Raises OSError."""
        self._child = RoleProcess(name, self._command, lambda event: self._loop.call_soon_threadsafe(self._turn, event))
        self._inbox = None

    def _turn(self, event: RoleEvent | None = None) -> None:
        """Take in an event of the child, if there is one, and do what is due."""
        if self._stopping:
            return
        if isinstance(event, Reported) and isinstance(event.report, Progress):
            self._say(f"{self._name}: {event.report.text}")
        elif isinstance(event, Reported) and isinstance(event.report, Ready):
            self._inbox = event.report.addresses["inbox"]
            self._ready.set()
            self._supervisor.started()
            self._introduce()
        try:
            self._supervisor.turn(event, time.monotonic())
        except GivenUp as error:
            self._failure = (ConfigError if error.exit_status == BAD_FLAG else DetokenizerFailed)(str(error))
            self._give_up()
        if self._timer is not None:
            self._timer.cancel()
        if (deadline := self._supervisor.next_deadline()) is not None:
            self._timer = self._loop.call_later(max(0.0, deadline - time.monotonic()), self._turn)

    def _tell(self, name: str, became: str, account: str, level: int) -> None:
        reason, _, _ = account.partition("\n")
        self._say(f"{name} {became}: {reason}")
        _log.log(level, "%s %s: %s", name, became, account)

    def _introduce(self) -> None:
        """Tell a new detokenizer where the router is, and the router where it is, so that it learns about all open requests."""
        if self._router is None or self._inbox is None:
            return
        control, moved = self._router
        self._child.order(MeetRouter(address=control))
        if self._router_knows is not self._child:
            self._router_knows = self._child
            moved(self._inbox)


def serve_detokenizer(
    process: ChildProcess, config: RouterConfig, model: ModelConfig, router: str, shard: int, trust: Trust
) -> None:
    """The process of a detokenizer, which turns tokens of every instance into text. Serve until told to stop. It listens where
    the router does: instances on other hosts send here."""
    from common.ids import InstanceId
    from common.text.detokenizer_manager import DetokenizerManager
    from router.api.parsing.formats import new_reader_for

    bind = f"tcp://{bind_address(config.host, '--host')}:0"
    readers = partial(new_reader_for, tool_parser=config.tool_parser, reasoning_parser=config.reasoning_parser)
    manager = DetokenizerManager(bind, model.model, InstanceId(router), shard, trust, config.chat_template, readers)

    def obey(order: LaunchOrder) -> None:
        if isinstance(order, MeetRouter):
            manager.meet_router(order.address)

    process.on_order(obey)
    process.on_stop(manager.stop)
    process.report(Ready(addresses={"inbox": reachable(manager.address, host_for_peers())}))
    manager.run()
