"""What a change of weights takes: a stream runs while a fleet of this machine gets new weights, in mode recompute.

Owns the rounds and their figures. What is measured is a prefill and a decode instance with their router. A bare copy of the same
bytes, in the same round, is the yardstick. Run it as `python -m benchmarks.updates`.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch.distributed
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.report import Goal, say, spread_of
from benchmarks.command import Column, Invocation, start, table_of
from benchmarks.engine import SHAPES
from benchmarks.random_model import write_checkpoint
from common.addresses import LOOPBACK, free_port
from common.options import option, require, require_at_least
from launch.engine import SHARED_MEMORY, Engine

QUICK: dict[str, Any] = {"shape": "Qwen3-30M", "rounds": 2}
PROMPT = list(range(3, 11))
"""Few tokens: they are computed anew with the new weights, and what many take is the time of a prefill."""
BEFORE = 8
"""So many tokens the stream has before its weights change."""
PATIENCE_S = 300.0
GROUP, BUCKET_BYTES = "bench", 2**28
MOST_COPIES = 1.5
RULE = "from the last tensor to the first new token: at most 1.5 copies of the bytes"
STEADY = "Ratios are taken in one round, from the same bytes."


@dataclass(frozen=True, kw_only=True)
class UpdateBench:
    """What is measured."""

    shape: str = option("Qwen3-0.6B", f"random weights in the shape of one of {', '.join(SHAPES)}")
    dtype: str = option("float32", "dtype of the checkpoint and of the fleet")
    rounds: int = option(3, "changes of each kind, in turns")
    threads: int = option(2, "cores of each instance")

    def __post_init__(self) -> None:
        require(self.shape in SHAPES, "shape", f"one of {', '.join(SHAPES)}", self.shape)
        require(self.dtype in ("float32", "bfloat16", "float16"), "dtype", "float32, bfloat16 or float16", self.dtype)
        require_at_least(self, rounds=1, threads=1)


class UpdateFigures(msgspec.Struct, kw_only=True):
    """One change."""

    kind: Annotated[str, Column("weights from")]
    copy_s: Annotated[float, Column("a bare copy, ms", ",.1f", 1e3)]
    """The same bytes, from where the weights are into memory that was touched before."""
    whole_s: Annotated[float, Column("begin → first new token, ms", ",.0f", 1e3)]
    last_s: Annotated[float, Column("last tensor → first new token, ms", ",.0f", 1e3)]
    """From when all tensors were where the fleet reads them, or sent."""
    pause_s: Annotated[float, Column("pause of the stream, ms", ",.1f", 1e3)]
    """From its last token of the old weights to its first one of the new."""
    prefill_s: Annotated[float, Column("another prompt's first token, ms", ",.0f", 1e3)]
    """It has as many tokens as the stream had when it was paused, which the new weights compute anew before the first new one."""

    @property
    def copies(self) -> float:
        """From the last tensor to the first new token, in copies of the bytes."""
        return self.last_s / self.copy_s


class WatchedStream:
    """A stream, and when each of its tokens came under which weights."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self.events: list[tuple[float, int, str]] = []
        """Time, tokens so far, and the version of the last one."""
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}
        self._answer: Iterator[dict[str, Any]] = engine.generate(PROMPT, sampling, stream=True)
        self._changed = threading.Condition()
        self._is_left = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for(self, what: Callable[[tuple[float, int, str]], bool]) -> float:
        """When the first event came of which this is so. Raises StopIteration when the stream ended before."""
        with self._changed:
            self._changed.wait_for(lambda: any(map(what, self.events)) or not self._thread.is_alive(), PATIENCE_S)
        return next(event[0] for event in self.events if what(event))

    def leave(self) -> None:
        self._is_left = True
        self._thread.join(PATIENCE_S)

    def _read(self) -> None:
        for answer in self._answer:
            with self._changed:
                about = answer["meta_info"]
                self.events.append((time.monotonic(), len(answer["output_ids"]), about.get("weight_version", "")))
                self._changed.notify_all()
            if self._is_left:
                break


def _bare_copy_s(file: Path) -> float:
    given = load_file(file)  # mapped: read where it is
    kept = [torch.zeros_like(tensor) for tensor in given.values()]
    begun = time.monotonic()
    for mine, theirs in zip(kept, given.values(), strict=True):
        mine.copy_(theirs)
    return time.monotonic() - begun


def init_custom_process_group(init: dict[str, Any]) -> Any:
    """Rank 0's side of a group with a fleet. init: the body of POST /init_weights_update_group. It is the recipe that SGLang,
    slime and verl share: a rendezvous of torch, a prefix with the group's name, and torch's own helper. Blocks until all have
    met."""
    from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import _new_process_group_helper, _world

    timeout, world_size, name = timedelta(seconds=init["timeout_s"]), init["world_size"], init["group_name"]
    where = f"tcp://{init['master_address']}:{init['master_port']}"
    store, rank, world_size = next(rendezvous(where, 0, world_size, timeout=timeout))
    store.set_timeout(timeout)
    store = PrefixStore(name, store)
    group, _ = _new_process_group_helper(world_size, rank, [], init["backend"], store, group_name=name, timeout=timeout)
    _world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    return group


class BenchTrainer:
    """Rank 0 of a group with the fleet, which sends weights over gloo in buckets while the fleet is paused."""

    def __init__(self, engine: Engine, world_size: int) -> None:
        self._engine, self._calls = engine, ThreadPoolExecutor(1)
        port = free_port(LOOPBACK)
        joined = self._calls.submit(engine.init_weights_update_group, LOOPBACK, port, 1, world_size, GROUP, "gloo")
        where = {"master_address": LOOPBACK, "master_port": port, "world_size": world_size}
        self._group = init_custom_process_group({**where, "group_name": GROUP, "backend": "gloo", "timeout_s": PATIENCE_S})
        joined.result()

    def send(self, tensors: Mapping[str, Tensor], version: str) -> float:
        """When the last tensor was sent."""
        self._engine.pause_generation("in_place")
        bucket, sent_s = dict[str, Tensor](), 0.0
        for number, (name, tensor) in enumerate(tensors.items()):
            bucket[name] = tensor
            if sum(each.nbytes for each in bucket.values()) < BUCKET_BYTES and number < len(tensors) - 1:
                continue
            dtypes = [str(each.dtype).removeprefix("torch.") for each in bucket.values()]
            shapes = [list(each.shape) for each in bucket.values()]
            update = partial(self._engine.update_weights_from_distributed, group_name=GROUP, weight_version=version)
            call = self._calls.submit(update, list(bucket), dtypes, shapes)
            for each in bucket.values():
                torch.distributed.broadcast(each, 0, group=self._group)
            sent_s = time.monotonic()
            call.result()
            bucket = {}
        self._engine.continue_generation()
        return sent_s

    def close(self) -> None:
        self._engine.destroy_weights_update_group(GROUP)
        self._calls.shutdown()


def _change(engine: Engine, kind: str, file: Path, trainer: BenchTrainer, version: str) -> UpdateFigures:
    """The weights are where they are read from before the clock runs."""
    copy_s = _bare_copy_s(file)
    tensors = {name: tensor * 0.98 for name, tensor in load_file(file).items()} if kind == "a group" else {}
    stream = WatchedStream(engine, tokens=2048)
    stream.wait_for(lambda event: event[1] >= BEFORE)
    begun = last = time.monotonic()
    if kind == "shared memory":
        engine.update_weights_from_shared_memory([file.name], weight_version=version)
    elif kind == "disk":
        engine.update_weights_from_disk(str(file.parent), weight_version=version)
    else:
        last = trainer.send(tensors, version)
    first = stream.wait_for(lambda event: event[2] == version)
    stream.wait_for(lambda event: event[0] > first)
    stream.leave()
    times = [event[0] for event in stream.events]
    kept = max(event[1] for event in stream.events if event[0] < first)
    begun_prefill = time.monotonic()
    engine.generate([100 + int(first * 1e3) % 400 + at for at in range(len(PROMPT) + kept)], {"max_new_tokens": 1})
    prefill_s = time.monotonic() - begun_prefill
    return UpdateFigures(
        kind=kind,
        copy_s=copy_s,
        whole_s=first - begun,
        last_s=first - last,
        pause_s=first - max(time for time in times if time < first),
        prefill_s=prefill_s,
    )


def measure(bench: UpdateBench) -> list[UpdateFigures]:
    with tempfile.TemporaryDirectory() as made:
        write_checkpoint(Path(made), bench.shape, bench.dtype)
        file = Path(made) / "model.safetensors"
        shared = SHARED_MEMORY / f"tandem-bench-{Path(made).name}"
        flags: dict[str, str | int] = {
            "threads": bench.threads,
            "dtype": bench.dtype,
            "served_name": "random",
            "kv_memory": "1GiB",
        }
        try:
            save_file({name: tensor * 0.99 for name, tensor in load_file(file).items()}, shared)
            with Engine(made, prefill=1, decode=1, **flags) as engine:
                trainer, found = BenchTrainer(engine, world_size=3), list[UpdateFigures]()
                for number in range(bench.rounds):
                    for kind, source in (("shared memory", shared), ("disk", file), ("a group", shared)):
                        found.append(_change(engine, kind, source, trainer, f"{kind} {number}"))
                        say(f"{kind} {number}: {found[-1].whole_s:.2f} s, {found[-1].copies:.1f} copies")
                trainer.close()
                return found
        finally:
            shared.unlink(missing_ok=True)


def run(invocation: Invocation) -> int:
    bench = invocation.config(UpdateBench, QUICK)
    found = measure(bench)
    goals = []
    for kind in dict.fromkeys(figures.kind for figures in found):
        spread = spread_of(figures.copies for figures in found if figures.kind == kind)
        assert spread is not None
        goals.append(Goal.of(f"{RULE}, from {kind}", spread.median, ".1f", most=MOST_COPIES))
    settings = f"{bench.shape}, {bench.dtype}, a prefill and a decode instance of {bench.threads} threads, mode recompute"
    table = invocation.style.table(table_of(UpdateFigures, found))
    invocation.publish(settings, STEADY, [table], goals, changes=found)
    return 0


EXPLANATION = "Measure what a change of weights takes while a stream runs."

if __name__ == "__main__":
    sys.exit(start("updates", EXPLANATION, run, UpdateBench))
