"""The walk: the functions of the project that one streamed chat passes, in order, by stage.

    python -m tests.life.walk

Owns a fleet of real parts in this process: the HTTP application, the router, mailboxes on loopback, a prefill and a decode
instance with the demo model, their engine and transfer threads, and the detokenizer. Only the rims are left out: the application
is called without an HTTP server, and pages move by memmove. The fleet's clock stands still while a request runs, so no heartbeat
and no deadline comes between.

Printed is every function that each of three equal chats called and that an idle fleet does not call. The path counts those that
lead on, which means that they call another function of the project: whoever follows a request must open them. The others (marked
with a dot) answer where they are called. Comprehensions belong to the function that holds them.
"""

import asyncio
import inspect
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Container, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from common.config import EngineConfig, ModelConfig, RouterConfig
from common.ids import DETOKENIZER, ROUTER, Incarnation, InstanceId, Role
from common.instance.membership import Memberships
from common.instance.request import InstanceLimits
from common.instance.worker import InstanceWorker
from common.mail import Mailbox
from common.messages import DecodeInbox, InstanceInfo, PrefillInbox, RankInfo, RouterInbox
from common.text.detokenizer import Detokenizer
from common.text.detokenizer_manager import DetokenizerLoop, DetokenizerManager
from common.text.tokenizer_manager import TokenizerManager
from decode.scheduler import DecodeScheduler
from engine.torch_executor import TorchExecutor
from kv_transfer import transfer_loop
from kv_transfer.pushes import SlicedTransport
from kv_transfer.target_ranks import TargetRanks
from kv_transfer.transfer_loop import TransferLoop, TransferThread
from prefill.scheduler import PrefillScheduler
from router.api.app import Api, build_app
from router.api.intake import Intake
from router.core import Gateway, RouterCore
from router.metrics import RouterMetrics
from tests.kv_transfer.memory import MemoryNetwork, MemoryTransport

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("router", "prefill", "decode", "kv_transfer", "engine", "common", "launch")
ANYWHERE = "tcp://127.0.0.1:0"
MODEL = ModelConfig()
ENGINE = EngineConfig(
    device="cpu", kv_memory="16MiB", context_tokens=1024, max_running=4, chunk_tokens=64, threads=1, grammar="off"
)
LIMITS = InstanceLimits(chunk_tokens=64, max_waiting=8, request_timeout_s=600.0, drain_timeout_s=30.0)
HANG_S = 120.0
"""The walk takes a few seconds; after this it is stuck."""
ANSWER_TOKENS = 8
PAUSE_S = 0.0005
"""Between turns, when the engine and transfer threads get the interpreter: a thread that never waits starves the others."""
IDLE_TURNS = 100
_TURNS = (
    DetokenizerLoop.turn,
    DetokenizerLoop.next_deadline,
    Detokenizer.next_deadline,
    Detokenizer.tick,
    SlicedTransport.begin,
    transfer_loop._pace,
)
THREADS_TURNS = {function.__code__ for function in _TURNS}
"""What the threads of an idle fleet call in each turn."""
COMPREHENSIONS = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"})
STAGES = {"transfer": "the transfer threads", "engine": "the engine threads"}
"""What is done on threads of these names."""


@dataclass(frozen=True, slots=True)
class Step:
    """A function that was passed. leads_on: it called another one of the project."""

    file: str
    line: int
    name: str
    leads_on: bool


@dataclass(frozen=True, slots=True)
class Walk:
    """stages: by stage, the functions in the order of their first call; each is in the stage where it was called first."""

    stages: dict[str, list[Step]]

    @property
    def path(self) -> list[Step]:
        """The functions that lead on."""
        return [step for steps in self.stages.values() for step in steps if step.leads_on]

    @property
    def functions(self) -> int:
        return sum(map(len, self.stages.values()))


class Recorder:
    """Watches every call on the threads that start after it. Nothing is recorded outside of `calls`."""

    def __init__(self) -> None:
        self.main_stage = ""
        """Where the main thread is. Other threads are stages of their own."""
        self._stages: dict[CodeType, str] | None = None
        self._callers: set[CodeType] = set()
        self._known: dict[CodeType, bool] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        stages, code = self._stages, frame.f_code
        if stages is None or event != "call" or not self._is_function(code):
            return
        caller = frame.f_back
        while caller is not None and not self._is_function(caller.f_code):
            caller = caller.f_back
        if caller is not None and caller.f_code is not code:
            self._callers.add(caller.f_code)
        if code not in stages:
            thread = threading.current_thread()
            name = thread.name.rstrip("_0123456789")
            stages[code] = self.main_stage if thread is threading.main_thread() else STAGES.get(name, name)

    @contextmanager
    def calls(self, stage: str) -> Iterator[dict[CodeType, str]]:
        """What is called inside, each function with its stage, in order. stage: where the main thread begins."""
        recorded: dict[CodeType, str] = {}
        self.main_stage, self._stages = stage, recorded
        yield recorded
        self._stages = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not recorded."""
        stages, self._stages = self._stages, None
        yield
        self._stages = stages

    def walk(self, chats: Sequence[dict[CodeType, str]], idle: Container[CodeType]) -> Walk:
        """What every chat called and an idle fleet does not call."""
        stages: dict[str, list[Step]] = {}
        for code, stage in chats[-1].items():
            if code not in idle and all(code in chat for chat in chats):
                file = str(Path(code.co_filename).relative_to(ROOT))
                step = Step(file, code.co_firstlineno, code.co_qualname, code in self._callers)
                stages.setdefault(stage, []).append(step)
        return Walk(stages)

    def _is_function(self, code: CodeType) -> bool:
        known = self._known.get(code)
        if known is None:
            file = Path(code.co_filename)
            ours = file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in ROOMS
            is_class_body = not code.co_flags & inspect.CO_OPTIMIZED
            known = self._known[code] = ours and not is_class_body and code.co_name not in COMPREHENSIONS
        return known


class WalkedInstance:
    """A whole instance but for its process; its main thread is ours."""

    def __init__(self, role: Role, network: MemoryNetwork, router: str, stack: ExitStack, clock: Callable[[], float]) -> None:
        name = InstanceId(role)
        inbox: Any = PrefillInbox if role == "prefill" else DecodeInbox
        self._clock = clock
        self._mailbox: Mailbox[Any] = stack.enter_context(closing(Mailbox(name, inbox, ANYWHERE)))
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
            pools=(transfers.start(HANG_S),),
            max_running=engine.max_rows,
        )
        kind = PrefillScheduler if role == "prefill" else DecodeScheduler
        memberships = Memberships(info, [router], HANG_S, clock())
        self.worker: InstanceWorker = InstanceWorker(
            memberships,
            lambda life, former: kind(life, engine, LIMITS, former=former),
            executor,
            TargetRanks(transfers, 0, 1, engine.model.kv_heads),
            self._mailbox,
        )

    def act(self) -> None:
        self.worker.turn(self._clock())

    @property
    def is_home(self) -> bool:
        load = self.worker.scheduler.report().load
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
        self.core = RouterCore(ROUTER, [self.detokenizer.address], config, metrics, tokenizer.vocab_size)
        self.gateway = stack.enter_context(closing(Gateway(self.core, mailbox, self.clock)))
        intake = stack.enter_context(closing(Intake(self.core, tokenizer, tokenizer.model_name, config)))
        api = Api(self.gateway, intake, metrics, tokenizer.model_name, config)
        self.app = build_app(api, metrics)
        self.router_address = mailbox.address
        self.detokenizer.meet_router(self.router_address)
        stack.callback(self.detokenizer.stop)
        threading.Thread(target=self.detokenizer.run, name="the detokenizer", daemon=True).start()
        network = MemoryNetwork()
        self.instances = {role: WalkedInstance(role, network, mailbox.address, stack, self.clock) for role in _ROLES}

    def clock(self) -> float:
        return self._now

    async def turn(self) -> None:
        """Let each part act once."""
        for stage, act in self._parts():
            before, self._recorder.main_stage = self._recorder.main_stage, stage
            act()
            self._recorder.main_stage = before
        await asyncio.sleep(PAUSE_S)

    async def join(self) -> None:
        """Let time pass until both instances can serve; then it stands still."""
        while self.core.unready() or self.core.degraded() or len(list(self.core.fleet.members())) < len(_ROLES):
            self._now += 0.01
            await self.turn()
        # The detokenizer's clock and the gateway's timer are real: no heartbeat and no tick comes between.
        self.detokenizer._loop._next_beat_s = math.inf
        assert self.gateway._timer is not None
        self.gateway._timer.cancel()
        self.gateway._timer_at = -math.inf

    async def chat(self, text: str) -> str:
        """A streamed chat, until everything has come home. Returns the answer."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
        response = asyncio.ensure_future(self._post("/v1/chat/completions", {"model": "demo", **body}))
        while not self._has_request():  # nobody else has anything to do before the request is dispatched
            await asyncio.sleep(0)
        while not (response.done() and self._is_home()):
            await self.turn()
        return await response

    def _has_request(self) -> bool:
        with self._recorder.paused():
            return len(self.core.requests) > 0

    def _is_home(self) -> bool:
        with self._recorder.paused():
            return all(instance.is_home for instance in self.instances.values())

    def _parts(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "the router: text to the client", self.gateway.pump
        for role, instance in self.instances.items():
            yield f"the {role} instance", instance.act

    async def _post(self, path: str, body: object) -> str:
        """Call the application as an HTTP server does. Returns the text of the stream."""
        received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        received.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        sent: list[MutableMapping[str, Any]] = []

        async def send(message: MutableMapping[str, Any]) -> None:
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
    """The threads that start meanwhile; this one follows when everything is loaded."""
    threading.setprofile(recorder)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def _walk() -> Walk:
    recorder = Recorder()
    with _watching(recorder), ExitStack() as stack:
        fleet = Fleet(recorder, stack)
        sys.setprofile(recorder)
        async with asyncio.timeout(HANG_S):
            await fleet.join()
            facts = " ".join(f"key{number} is value{number}." for number in range(40))
            await fleet.chat("first " + facts)  # from then on, what is done once in a process's life is done
            with recorder.calls("idle") as idle:
                for _ in range(IDLE_TURNS):
                    fleet.detokenizer.meet_router(fleet.router_address)  # wakes it, as its heartbeats do
                    await fleet.turn()
                while not idle.keys() >= THREADS_TURNS:
                    await fleet.turn()
            chats = []
            for word in ("one ", "two ", "three "):
                with recorder.calls("the router: request in") as calls:
                    await fleet.chat(word + facts)
                chats.append(calls)
        counters = {role: instance.worker.scheduler.report().counters for role, instance in fleet.instances.items()}
    assert counters["prefill"].handoffs == 4 and counters["decode"].prompt_tokens_computed == 0, counters
    return recorder.walk(chats, idle)


def walk() -> Walk:
    """The path of one streamed chat through a prefill and a decode instance."""
    return asyncio.run(_walk())


def main() -> None:
    walked = walk()
    for stage, steps in walked.stages.items():
        print(f"\n{stage}")
        for step in steps:
            print(f"  {' ' if step.leads_on else '.'} {step.file}:{step.line} {step.name}")
    path = walked.path
    print(f"\n{len(path)} functions in {len({step.file for step in path})} files lead on, of {walked.functions}")


if __name__ == "__main__":
    main()
