"""The toy executor: the next token depends on every byte of the row's KV, so a misplaced page changes the answer.

Owns its memory and the steps in flight. Computes no model: the KV of a slot is a hash of token, position and place, and the next
token is a digest over the slots of the row, in order. numpy only. For tests and simulation: when a step completes is the caller's
to say.
"""

import zlib
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from common.engine.executor import EngineDescription
from common.engine.plan import Plan, RowStart, StepResult
from common.ids import Int32Array
from common.messages import ModelIdentity
from common.pages.layout import KVLayout, MemoryRegion

TOY_VOCAB = 1000
FIRST_TOKEN = 10
"""Sampled tokens are FIRST_TOKEN or more: smaller ones are free for ends of sequence."""


class ToyStep:
    """A step in flight: its forward runs when it completes, not before."""

    ends_s: float | None = None

    def __init__(self, run: Callable[[], StepResult]) -> None:
        self._run = run
        self._result: StepResult | None = None

    def complete(self) -> None:
        self._result = self._run()

    def poll(self) -> StepResult | None:
        return self._result


class ToyExecutor:
    """Implements `common.engine.executor.Executor`. manual: steps complete only by `complete`, else at launch."""

    def __init__(
        self,
        total_pages: int,
        max_rows: int,
        page_size: int = 4,
        context_tokens: int = 256,
        eos_token_ids: tuple[int, ...] = (),
        manual: bool = False,
    ) -> None:
        layout = KVLayout(layers=2, kv_heads=2, head_dim=4, page_size=page_size, dtype="uint8")
        self.pages: NDArray[np.uint8] = np.zeros((total_pages, 2, 2, 2, page_size, 4), dtype=np.uint8)
        """[pages, layer, key or value, head, token, dim]"""
        self._manual = manual
        self._rows: dict[int, RowStart] = {}
        self._length = np.zeros(max_rows, dtype=np.int64)
        self._last = np.zeros(max_rows, dtype=np.int32)
        self._in_flight: deque[ToyStep] = deque()
        address = self.pages.ctypes.data
        self._description = EngineDescription(
            model=ModelIdentity(
                name="toy",
                fingerprint="toy",
                architecture="toy",
                dtype="uint8",
                vocab_size=TOY_VOCAB,
                context_tokens=context_tokens,
            ),
            layout=layout,
            total_pages=total_pages,
            max_rows=max_rows,
            memory=MemoryRegion(address=address, region_bytes=self.pages.nbytes, device="cpu"),
            eos_token_ids=eos_token_ids,
            device="cpu",
        )

    @property
    def description(self) -> EngineDescription:
        return self._description

    def launch(self, plan: Plan) -> ToyStep:
        step = ToyStep(lambda: self._forward(plan))
        if self._manual:
            self._in_flight.append(step)
        else:
            step.complete()
        return step

    def complete(self, steps: int = 1) -> None:
        """Let the oldest steps in flight complete, in the order of their launch."""
        for _ in range(min(steps, len(self._in_flight))):
            self._in_flight.popleft().complete()

    def close(self) -> None:
        self._in_flight.clear()

    def _forward(self, plan: Plan) -> StepResult:
        for start in plan.starts:
            self._rows[start.row] = start
            self._length[start.row] = start.length
            self._last[start.row] = -1 if start.last_token is None else start.last_token
        sampled: list[int] = []
        for chunk in plan.chunks:
            assert self._length[chunk.row] == chunk.start, "chunks of a prompt come in order"
            self._write(chunk.row, chunk.token_ids)
            if chunk.last:
                sampled.append(self._sample(chunk.row))
        for row in plan.decode_rows.tolist():
            self._write(row, self._last[row : row + 1])
            sampled.append(self._sample(row))
        return StepResult(plan, np.array(sampled, dtype=np.int32), 0.0)

    def _write(self, row: int, tokens: Int32Array) -> None:
        """The KV of `tokens` at the row's next positions."""
        positions = np.arange(self._length[row], self._length[row] + len(tokens))
        pages = self._rows[row].pages
        page_size = self._description.layout.page_size
        assert positions[-1] < len(pages) * page_size, f"row {row} outgrows its pages"
        place = np.arange(2 * 2 * 2 * 4).reshape(2, 2, 2, 4)
        values = tokens.astype(np.int64)[:, None, None, None, None] * 31 + positions[:, None, None, None, None] * 17
        kv = ((values + 1) * (place + 7) % 251).astype(np.uint8)
        self.pages[pages[positions // page_size], :, :, :, positions % page_size, :] = kv
        self._length[row] += len(tokens)

    def _sample(self, row: int) -> int:
        positions = np.arange(self._length[row])
        page_size = self._description.layout.page_size
        kv = self.pages[self._rows[row].pages[positions // page_size], :, :, :, positions % page_size, :]
        token = FIRST_TOKEN + zlib.crc32(np.ascontiguousarray(kv).tobytes()) % (TOY_VOCAB - FIRST_TOKEN)
        self._last[row] = token
        return token
