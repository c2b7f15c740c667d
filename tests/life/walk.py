"""The walk: every function of the project that one streamed chat passes, in order, by stage.

    python -m tests.life.walk

Owns a fleet of real parts in this process: the HTTP application, the router, real mailboxes on loopback, a prefill and a decode
instance with the demo model on their engine threads, their transfer threads, and the detokenizer. Only the sockets of HTTP and
the library behind the transport are left out: the application is called directly, and pages move by memmove. The fleet's clock
stands still while the request runs, so nothing that is counted was done for a heartbeat or a deadline.

A function is counted once, however often it is called, in the stage where the request meets it first. Comprehensions and
generator expressions are part of the function that holds them; lambdas, properties and inner functions count.
"""

import asyncio
import inspect
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from common.config import EngineConfig, ModelConfig, RouterConfig
from common.engine.torch_executor import TorchExecutor
from common.ids import DETOKENIZER, ROUTER, Incarnation, InstanceId, Role
from common.instance.limits import InstanceLimits
from common.instance.membership import Membership
from common.instance.worker import InstanceWorker
from common.messages import DecodeInbox, InstanceInfo, PrefillInbox, RankInfo, RouterInbox
from common.text.detokenizer_manager import DetokenizerManager
from common.text.tokenizer_manager import TokenizerManager
from common.wire import Mailbox
from decode.scheduler import DecodeScheduler
from kv_transfer.memory import MemoryNetwork, MemoryTransport
from kv_transfer.transfer_loop import TransferLoop
from kv_transfer.transfer_thread import TransferThread
from prefill.scheduler import PrefillScheduler
from router.app import Api, build_app
from router.core import RouterCore
from router.gateway import Gateway
from router.intake import Intake
from router.metrics import RouterMetrics

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("router", "prefill", "decode", "kv_transfer", "common", "launch")
ANYWHERE = "tcp://127.0.0.1:0"
MODEL = ModelConfig()
ENGINE = EngineConfig(device="cpu", kv_memory="16MiB", context_tokens=1024, max_running=4, chunk_tokens=64, threads=1)
LIMITS = InstanceLimits(chunk_tokens=64, max_waiting=8, request_timeout_s=600.0, drain_timeout_s=30.0)
HANG_S = 120.0
"""The walk takes a few seconds; after this it is stuck."""
EVENTS = 8
"""Tokens of the answer."""
NOT_FUNCTIONS = frozenset({"<module>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"})


@dataclass(frozen=True, slots=True)
class Step:
    """A function on the path."""

    file: str
    line: int
    name: str


@dataclass(slots=True)
class Path_:
    """What has been passed: stage → functions in the order of their first call there."""

    stages: dict[str, list[Step]] = field(default_factory=dict)

    @property
    def functions(self) -> int:
        return sum(map(len, self.stages.values()))

    @property
    def files(self) -> int:
        return len({step.file for steps in self.stages.values() for step in steps})


class Recorder:
    """Watches every call on every thread that was started after it. stage: where the main thread is; other threads have theirs
    by name."""

    def __init__(self) -> None:
        self.path = Path_()
        self.stage = ""
        self.on = False
        self._seen: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if not self.on or event != "call" or code in self._seen:
            return
        self._seen.add(code)
        if code.co_name in NOT_FUNCTIONS or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        try:
            file = Path(code.co_filename).relative_to(ROOT)
        except ValueError:
            return
        if file.parts[0] in ROOMS:
            thread = threading.current_thread()
            stage = self.stage if thread is threading.main_thread() else thread.name
            self.path.stages.setdefault(stage, []).append(Step(str(file), code.co_firstlineno, code.co_qualname))


class WalkedInstance:
    """A whole instance but for its process; its main thread is ours."""

    def __init__(self, role: Role, network: MemoryNetwork, router: str, stack: ExitStack, clock: Callable[[], float]) -> None:
        name = InstanceId(role)
        inbox: Any = PrefillInbox if role == "prefill" else DecodeInbox
        self._clock = clock
        self._mailbox: Mailbox[Any] = stack.enter_context(closing(Mailbox(name, inbox, ANYWHERE)))
        self._mailbox.route(ROUTER, router)
        executor = stack.enter_context(closing(TorchExecutor(MODEL, ENGINE, self._mailbox.wake, lambda text: None)))
        engine = executor.description

        def make_loop() -> TransferLoop:
            return TransferLoop(MemoryTransport(network), "memory", engine.memory, engine.layout, engine.total_pages, clock)

        transfers = stack.enter_context(closing(TransferThread(make_loop, self._mailbox.wake)))
        info = InstanceInfo(
            id=name,
            incarnation=Incarnation(f"{name}-1"),
            role=role,
            inbox=self._mailbox.address,
            ranks=(RankInfo(rank=0, pid=os.getpid(), host="here", device="cpu"),),
            model=engine.model,
            pool=transfers.start(HANG_S),
            max_running=engine.max_rows,
        )
        kind = PrefillScheduler if role == "prefill" else DecodeScheduler
        self.scheduler = kind(name, info.incarnation, engine, LIMITS, None)
        membership = Membership(info, HANG_S, clock())
        self.worker: InstanceWorker[Any] = InstanceWorker(
            membership, self.scheduler, executor, transfers, self._mailbox, pushes=role == "prefill"
        )

    def act(self) -> None:
        self.worker.turn(self._clock())

    @property
    def home(self) -> bool:
        load = self.scheduler.load()
        return load.pages_free == load.pages_total and load.waiting_requests + load.running_requests == 0


class Fleet:
    """Router, detokenizer and two instances, which take turns on this thread."""

    def __init__(self, recorder: Recorder, stack: ExitStack) -> None:
        self._recorder = recorder
        self._now = 1000.0
        self.detokenizer = DetokenizerManager(ANYWHERE, MODEL.model)
        tokenizer = TokenizerManager(MODEL.model)
        mailbox: Mailbox[RouterInbox] = stack.enter_context(closing(Mailbox(ROUTER, RouterInbox, ANYWHERE)))
        mailbox.route(DETOKENIZER, self.detokenizer.address)
        config, metrics = RouterConfig(), RouterMetrics()
        self.core = RouterCore(Incarnation("router-1"), self.detokenizer.address, config, metrics, tokenizer.vocab_size)
        self.gateway = stack.enter_context(closing(Gateway(self.core, mailbox, self.clock)))
        intake = stack.enter_context(closing(Intake(self.core, tokenizer, tokenizer.model_name, config)))
        self.app = build_app(Api(self.gateway, intake, metrics, tokenizer.model_name, None), metrics, config.max_requests)
        self.detokenizer.meet_router(mailbox.address)
        stack.callback(self.detokenizer.stop)
        threading.Thread(target=self.detokenizer.run, name="the detokenizer", daemon=True).start()
        network = MemoryNetwork()
        self.instances = {role: WalkedInstance(role, network, mailbox.address, stack, self.clock) for role in _ROLES}

    def clock(self) -> float:
        return self._now

    async def turn(self) -> None:
        """Let each part act once."""
        for stage, act in self._parts():
            before, self._recorder.stage = self._recorder.stage, stage
            act()
            self._recorder.stage = before
        await asyncio.sleep(0)

    async def join(self) -> None:
        """Let time pass until a request can be served; then it stands still."""
        while self.core.unready():
            self._now += 0.01
            await self.turn()
        self.detokenizer._next_beat_s = math.inf  # its clock is the real one: no heartbeat comes between

    async def chat(self, text: str) -> str:
        """A streamed chat, until everything has come home. Returns the answer."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": EVENTS, "temperature": 0, "stream": True}
        response = asyncio.ensure_future(self._post("/v1/chat/completions", {"model": "demo", **body}))
        while not (response.done() and all(instance.home for instance in self.instances.values())):
            await self.turn()
        return await response

    def _parts(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "the router: text to the client", self.gateway.pump
        for role, instance in self.instances.items():
            yield f"the {role} instance", instance.act

    async def _post(self, path: str, body: object) -> str:
        """Call the application as an HTTP server does. Returns the text of the stream."""
        received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        received.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
        place = {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": []}
        await self.app({**scope, **place, "server": ("here", 80), "client": ("here", 1)}, received.get, send)
        assert sent[0]["status"] == 200, sent
        events = b"".join(message.get("body", b"") for message in sent).decode().split("\n\n")
        assert events[-2] == "data: [DONE]", events
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


_ROLES: tuple[Role, ...] = ("prefill", "decode")


@contextmanager
def _watching(recorder: Recorder) -> Iterator[None]:
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def _walk() -> Path_:
    recorder = Recorder()
    with _watching(recorder), ExitStack() as stack:
        fleet = Fleet(recorder, stack)
        async with asyncio.timeout(HANG_S):
            await fleet.join()
            words = " ".join(f"key{number} is value{number}." for number in range(40))
            await fleet.chat("warm " + words)  # what is done once in a process's life is done
            recorder.stage, recorder.on = "the router: request in", True
            answer = await fleet.chat("look " + words)
            recorder.on = False
        counters = {role: instance.scheduler.counters() for role, instance in fleet.instances.items()}
    assert answer and counters["prefill"].handoffs == 2 and counters["decode"].pages_received > 0, (answer, counters)
    return recorder.path


def walk() -> Path_:
    """The path of one streamed chat."""
    return asyncio.run(_walk())


def main() -> None:
    path = walk()
    for stage, steps in path.stages.items():
        print(f"\n{stage}: {len(steps)}")
        for step in steps:
            print(f"    {step.file}:{step.line} {step.name}")
    print(f"\n{path.functions} functions in {path.files} files")


if __name__ == "__main__":
    main()
