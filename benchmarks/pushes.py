"""What `launch bench engine` measures of pushes: pages that a transfer thread moves to another process of this host, as instances
move them, beside a copy of the same runs within one process.

Owns the pools, the pages of each push, and the process that is pushed to: `python -m benchmarks.pushes PLAN`. It ends when its
parent does.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, product, starmap
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from bench.report import Spread
from benchmarks.engine import EngineTask
from benchmarks.engine_figures import Figure, HostPush
from common.config import TransportName
from common.errors import TransferError
from common.ids import ROUTER, AttemptId, Incarnation, InstanceId, Int32Array, RequestId, Ticket
from common.messages import InstanceInfo, ModelIdentity, PoolDescriptor
from common.messages.transfers import Allow, Connect, Expect, LinkChanged, Push, PushDone, PushFailed
from common.pages.layout import KVLayout, MemoryRegion
from common.processes.child import Broken, ChildEnded, JsonLine, Parent, Respondent, stop_children
from engine.backends import device_of
from kv_transfer.backends import make_transport
from kv_transfer.planner import PageSlice, plan_runs
from kv_transfer.transfer_loop import TransferLoop, TransferThread

START_S, PUSH_S, STOP_S = 120.0, 60.0, 5.0
"""A process that takes longer to start, or a push to end, has failed."""
WRITE_LEASE_S = 86_400.0
TARGET, LIFE = InstanceId("target"), Incarnation("1")
NO_REQUEST = AttemptId(RequestId("bench"), 0, ROUTER)
LEAST_PUSHES, ROUNDS, ROUND_S, QUICK_S = 3, 3, 0.2, 0.02
UNIT_BYTES = 2**18
"""The size of the pools' pages: a larger page is several in a row."""
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=UNIT_BYTES // 2, page_size=1, dtype="uint8")
POOL_BYTES, QUICK_POOL_BYTES = 2**31, 2**22
PushOnce: TypeAlias = Callable[[], None]


class PoolPlan(msgspec.Struct, frozen=True):
    """The pool of each of the two processes."""

    transport: TransportName
    device: str
    pool_bytes: int

    def memory(self) -> Tensor:
        """[pool_bytes] uint8. Every page of the system is touched, and nothing of torch's runs there any more. Raises
        TransferError when the memory cannot be had."""
        try:
            memory = torch.ones(self.pool_bytes, dtype=torch.uint8, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise TransferError(f"no pool of {self.pool_bytes} bytes on {self.device}: {str(error).splitlines()[0]}") from error
        _wait_for(memory)
        return memory


class PushShape(NamedTuple):
    """What one push moves: `pages` pages of `page_bytes`, next to each other on both sides or anywhere in the pools."""

    page_bytes: int
    pages: int
    arrangement: str


SHAPES = list(starmap(PushShape, product((UNIT_BYTES, 8 * UNIT_BYTES), (32, 1024), ("contiguous", "scattered"))))
QUICK_SHAPES = list(starmap(PushShape, product((UNIT_BYTES,), (2, 8), ("contiguous", "scattered"))))


class TargetReady(JsonLine, frozen=True):
    """The target is there, with this pool."""

    pool: PoolDescriptor


def measure_pushes(task: EngineTask, say: Callable[[str], object]) -> Iterator[Figure]:
    """Each shape, copied and then pushed: by CUDA IPC on a card, which is what NIXL takes within a host. Raises TransferError."""
    on_card = device_of(task.engine.device).type == "cuda"
    plan = PoolPlan(
        transport="nixl" if on_card else "cma",
        device=task.engine.device if on_card else "cpu",
        pool_bytes=QUICK_POOL_BYTES if task.is_quick else POOL_BYTES,
    )
    yield from measure(plan, QUICK_SHAPES if task.is_quick else SHAPES, QUICK_S if task.is_quick else ROUND_S)


def measure(plan: PoolPlan, shapes: Sequence[PushShape], seconds: float) -> Iterator[HostPush]:
    """seconds: of each shape in each round. Raises TransferError."""
    source, landing = plan.memory(), plan.memory()
    for shape in shapes:
        yield _measured(
            "device copy", shape, [copying(plan, source, landing, *pages) for pages in pages_of(shape, plan)], seconds
        )
    del landing
    command = [sys.executable, "-m", "benchmarks.pushes", msgspec.json.encode(plan).decode()]
    decoder = msgspec.json.Decoder[TargetReady | Broken](TargetReady | Broken)
    target = Respondent("the target", command, decoder)
    try:
        with contextlib.closing(PushingEnd(plan, source)) as end:
            end.connect(_pool_of(target))
            for shape in shapes:
                pushes = [end.push(*pages) for pages in pages_of(shape, plan)]
                yield _measured(f"{plan.transport} thread", shape, pushes, seconds)
    finally:
        stop_children([target], STOP_S)


def pages_of(shape: PushShape, plan: PoolPlan) -> list[tuple[Int32Array, Int32Array]]:
    """The pages of each push of a turn, as units of the pools: (source, target), [units] int32 each. Each push takes others than
    the one before."""
    random = np.random.default_rng([shape.page_bytes, shape.pages])
    total, units = plan.pool_bytes // shape.page_bytes, shape.page_bytes // UNIT_BYTES

    def side() -> Int32Array:
        if shape.arrangement == "contiguous":
            pages = random.integers(total - shape.pages + 1) + np.arange(shape.pages)
        else:
            pages = random.permutation(total)[: shape.pages]
        return (pages[:, None] * units + np.arange(units)).reshape(-1).astype(np.int32)

    in_turn = max(2, min(16, plan.pool_bytes // (shape.page_bytes * shape.pages)))
    return [(side(), side()) for _ in range(in_turn)]


def _measured(way: str, shape: PushShape, pushes: Sequence[PushOnce], seconds: float) -> HostPush:
    for push in pushes:  # the first ones only warm up
        push()
    speed = Spread.of(_gb_per_s(shape, pushes, seconds) for _ in range(ROUNDS))
    return HostPush(way=way, page_bytes=shape.page_bytes, pages=shape.pages, arrangement=shape.arrangement, gb_per_s=speed)


def _gb_per_s(shape: PushShape, pushes: Sequence[PushOnce], seconds: float) -> float:
    began_s, done = time.perf_counter(), 0
    while done < LEAST_PUSHES or time.perf_counter() - began_s < seconds:
        pushes[done % len(pushes)]()
        done += 1
    return done * shape.page_bytes * shape.pages / 1e9 / (time.perf_counter() - began_s)


def copying(plan: PoolPlan, source: Tensor, landing: Tensor, source_pages: Int32Array, target_pages: Int32Array) -> PushOnce:
    """A copy of each run on one stream, and a wait for the stream."""
    runs = plan_runs(source_pages, target_pages, PageSlice(LAYOUT), PageSlice(LAYOUT))
    parts = [(landing[to : to + length], source[at : at + length]) for at, to, length in runs.tolist()]

    def push() -> None:
        for target_run, source_run in parts:
            target_run.copy_(source_run, non_blocking=True)
        _wait_for(landing)

    return push


def _wait_for(memory: Tensor) -> None:
    if memory.is_cuda:
        torch.cuda.current_stream(memory.device).synchronize()


def _pool_of(target: Respondent[TargetReady | Broken]) -> PoolDescriptor:
    """Raises TransferError."""
    try:
        report = target.next_report(START_S)
    except ChildEnded as error:
        raise TransferError(str(error)) from error
    if not isinstance(report, TargetReady):
        raise TransferError(f"the target was not ready within {START_S:g} s" if report is None else report.reason)
    return report.pool


class PushingEnd:
    """A transfer thread over a pool, and one push or connection at a time. Methods raise TransferError."""

    def __init__(self, plan: PoolPlan, memory: Tensor) -> None:
        self._news = threading.Event()
        self._tickets = map(Ticket, count())
        region = MemoryRegion(address=memory.data_ptr(), region_bytes=len(memory), device=str(memory.device))
        total_pages = plan.pool_bytes // UNIT_BYTES

        def make_loop() -> TransferLoop:
            return TransferLoop(make_transport(plan.transport), plan.transport, region, LAYOUT, total_pages, time.monotonic)

        self.thread = TransferThread(make_loop, self._news.set)
        self.pool = self.thread.start(PUSH_S)

    def connect(self, pool: PoolDescriptor) -> None:
        """Get ready to push there."""
        model = ModelIdentity(name="bench", fingerprint="", architecture="", dtype="uint8", vocab_size=1, context_tokens=1)
        owner = InstanceInfo(
            id=TARGET, incarnation=LIFE, role="decode", inbox="", ranks=(), model=model, pools=(pool,), max_running=1
        )
        self.thread.submit(Connect((owner,)))
        self._await(lambda event: isinstance(event, LinkChanged) and event.link.state == "ready")
        self.thread.submit(Allow(TARGET, LIFE, time.monotonic() + WRITE_LEASE_S))

    def push(self, source_pages: Int32Array, target_pages: Int32Array) -> PushOnce:
        """A call that writes our pages into the target's, and returns when every byte is there."""

        def push() -> None:
            self.thread.submit(Push(next(self._tickets), TARGET, LIFE, source_pages, target_pages, NO_REQUEST))
            self._await(lambda event: isinstance(event, PushDone))

        return push

    def close(self) -> None:
        self.thread.close()

    def _await(self, is_awaited: Callable[[object], bool]) -> None:
        until = time.monotonic() + PUSH_S
        while True:
            for event in self.thread.poll():
                match event:
                    case PushFailed():
                        raise TransferError(event.reason)
                    case LinkChanged() if event.link.state == "lost":
                        raise TransferError(event.link.detail)
                if is_awaited(event):
                    return
            if time.monotonic() > until:
                raise TransferError(f"nothing happened for {PUSH_S:g} s")
            self._news.wait(PUSH_S)
            self._news.clear()


def main() -> None:
    """The target: a pool into which the other process writes."""
    parent: Parent[JsonLine] = Parent(msgspec.json.Decoder(JsonLine))
    try:
        plan = msgspec.json.decode(sys.argv[1], type=PoolPlan)
        memory = plan.memory()
        with contextlib.closing(PushingEnd(plan, memory)) as end:
            end.thread.submit(Expect(1))
            parent.report(TargetReady(pool=end.pool))
            while parent.read_orders() is not None:
                pass
    except TransferError as error:
        parent.report(Broken(reason=str(error)))


if __name__ == "__main__":
    main()
