"""Instances with several ranks, made of toys: each rank has its pool, its transfer loop and its part of every page.

Owns the ranks and turns their loops. The toys' next token depends on every byte of all ranks. Knows no test.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from common.executor import Chunk, Plan, RowStart
from common.ids import Incarnation, InstanceId, Int32Array
from common.instance.ports import TransferEvent, Transfers
from common.messages import InstanceInfo, ModelIdentity, RankInfo
from common.sampling_params import SamplingParams
from engine.toy import ToyExecutor, ToyRanks
from kv_transfer.target_ranks import RankedTransfers, TargetRanks
from kv_transfer.transfer_loop import TransferLoop
from kv_transfer.transport import Transport

PAGES = 24
WAIT_S = 30.0
SAMPLING = SamplingParams(max_new_tokens=4)


class RankedInstance:
    """transfers: what its scheduler would see."""

    def __init__(self, name: str, ranks: int, kv_heads: int, make_transport: Callable[[], Transport], backend: str) -> None:
        group = ToyRanks(ranks, wake=lambda: None)
        self.toys = [ToyExecutor(PAGES, 2, kv_heads=kv_heads, ranks=group) for _ in range(ranks)]
        self.loops = [
            TransferLoop(
                make_transport(),
                backend,
                toy.description.memory,
                toy.description.layout,
                PAGES,
                time.monotonic,
                first_head=toy.heads.start,
            )
            for toy in self.toys
        ]
        parts = [TargetRanks(loop, rank, ranks, kv_heads) for rank, loop in enumerate(self.loops)]
        self.transfers: Transfers = parts[0] if ranks == 1 else RankedTransfers(parts)
        self.steps = 0
        model: ModelIdentity = self.toys[0].description.model
        self.info = InstanceInfo(
            id=InstanceId(name),
            incarnation=Incarnation(f"{name}-1"),
            role="prefill",
            inbox="tcp://127.0.0.1:1",
            ranks=tuple(RankInfo(rank=rank, pid=1, host="here", device="cpu") for rank in range(ranks)),
            model=model,
            pools=tuple(loop.descriptor for loop in self.loops),
            max_running=2,
        )

    def sample(self, plan: Plan) -> int:
        """The token of a step of one row, which is the same on all ranks."""
        steps = [toy.launch(plan) for toy in self.toys]
        results = [step.poll() for step in steps]
        (token,) = {int(result.tokens[0]) for result in results if result is not None and len(result.tokens)} or {-1}
        assert None not in results
        return token

    def compute(self, prompt: Int32Array, pages: Int32Array, begin: int, end: int) -> int:
        """Compute the prompt from one token to another; the token that follows, if it is the prompt's end."""
        self.steps += 1
        starts = (RowStart(0, pages, SAMPLING),) if begin == 0 else ()
        chunk = Chunk(0, begin, prompt[begin:end], last=end == len(prompt))
        return self.sample(Plan(self.steps, starts=starts, chunks=(chunk,)))

    def decode(self, pages: Int32Array, tokens: int, last: int) -> int:
        """The token after one that follows a prompt whose KV is in these pages."""
        self.steps += 1
        start = RowStart(0, pages, SAMPLING, length=tokens, last_token=last)
        return self.sample(Plan(self.steps, starts=(start,), decode_rows=np.zeros(1, dtype=np.int32)))

    def close(self) -> None:
        self.transfers.close()


def turn_until(instances: Sequence[RankedInstance], events: list[TransferEvent], number: int) -> None:
    """Turn all loops until the first instance's transfers have reported so many events."""
    ends_s = time.monotonic() + WAIT_S
    while len(events) < number:
        assert time.monotonic() < ends_s, f"only {events}"
        for instance in instances:
            for loop in instance.loops:
                loop.step()
        events += instances[0].transfers.poll()
