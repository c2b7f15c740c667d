"""The router as a process: the router itself, and the detokenizer that is its child.

Owns the composition and the order of start and stop. Does not know requests: `router` does.

    start   the detokenizer binds and reports its inbox ─► the router binds HTTP and control ─► the detokenizer learns the latter
    stop    HTTP intake closes, open answers end ─► (told to stop altogether) ─► the detokenizer stops
"""

import asyncio

import uvloop

from common.config import LogConfig, ModelConfig, RouterConfig
from common.errors import TandemError
from launch.addresses import LOOPBACK, host_for_peers, reachable
from launch.child import ChildProcess
from launch.flags import to_flags
from launch.processes import Child, ChildEvent, Exited, launch_command, stop_children
from launch.reports import CloseIntake, IntakeClosed, MeetRouter, Order, Progress, Ready

DETOKENIZER_START_S = 120.0
DETOKENIZER_STOP_S = 5.0


class DetokenizerFailed(TandemError):
    """The detokenizer did not start, or died: the router cannot go on without it."""


def serve(process: ChildProcess, config: RouterConfig, model: ModelConfig, log: LogConfig) -> None:
    """Serve until told to stop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(process, config, model, log))


async def _run(process: ChildProcess, config: RouterConfig, model: ModelConfig, log: LogConfig) -> None:
    duties = _Duties(process, asyncio.get_running_loop())
    detokenizer = Child("detokenizer", launch_command("detokenizer", to_flags(config, model, log)), duties.from_child)

    def ready(url: str, control: str) -> None:
        detokenizer.order(MeetRouter(address=reachable(control, LOOPBACK)))
        process.report(Ready(addresses={"http": url, "control": reachable(control, host_for_peers())}))

    try:
        process.progress("loading the tokenizer")
        from router.process import serve as serve_router  # while the detokenizer loads as well

        inbox = await duties.detokenizer_inbox(detokenizer)
        if inbox is not None:
            await serve_router(config, model, inbox, ready, duties.intake_closes)
        if duties.detokenizer_ended:
            raise DetokenizerFailed(f"the detokenizer ended: {detokenizer.account()}")
        process.report(IntakeClosed())
        await duties.stop.wait()
    finally:
        process.on_stop(lambda: None)
        process.on_order(lambda order: None)
        await asyncio.to_thread(stop_children, [detokenizer], DETOKENIZER_STOP_S)


class _Duties:
    """What this process was told, as events of its loop. Made on the loop's thread."""

    def __init__(self, process: ChildProcess, loop: asyncio.AbstractEventLoop) -> None:
        self.intake_closes = asyncio.Event()
        self.stop = asyncio.Event()
        self.detokenizer_ended = False
        self._process = process
        self._loop = loop
        self._inbox: asyncio.Future[str | None] = loop.create_future()
        process.on_stop(lambda: loop.call_soon_threadsafe(self._end))
        process.on_order(lambda order: loop.call_soon_threadsafe(self._obey, order))

    def from_child(self, event: ChildEvent) -> None:
        """News of the detokenizer; on a thread of the child."""
        self._loop.call_soon_threadsafe(self._learn, event)

    async def detokenizer_inbox(self, child: Child) -> str | None:
        """The address it reported; None when it or this process ended before. Raises DetokenizerFailed at the deadline."""
        try:
            return await asyncio.wait_for(self._inbox, DETOKENIZER_START_S)
        except TimeoutError:
            reason = f"the detokenizer was not ready within {DETOKENIZER_START_S:g} s; {child.account()}"
            raise DetokenizerFailed(reason) from None

    def _learn(self, event: ChildEvent) -> None:
        if isinstance(event, Exited):
            self.detokenizer_ended = not self.stop.is_set()
            self._end()
        elif isinstance(event.report, Progress):
            self._process.progress(f"detokenizer: {event.report.text}")
        elif isinstance(event.report, Ready) and not self._inbox.done():
            self._inbox.set_result(event.report.addresses["inbox"])

    def _obey(self, order: Order) -> None:
        if isinstance(order, CloseIntake):
            self.intake_closes.set()

    def _end(self) -> None:
        self.intake_closes.set()
        self.stop.set()
        if not self._inbox.done():
            self._inbox.set_result(None)
