"""The port of the engine: plans in, sampled tokens out.

Owns no implementation: `torch_executor` (CPU and CUDA), `toy` (its next token depends on every byte of its KV) and `timed`
(computes nothing) do.
"""

from dataclasses import dataclass
from typing import Protocol

from common.engine.grammars import Preparation
from common.engine.plan import Plan, StepResult
from common.errors import TandemError
from common.ids import Int32Array
from common.messages import EngineChoices, ModelIdentity
from common.pages.layout import KVLayout, MemoryRegion
from common.sampling_params import Grammar


class ExecutorFailed(TandemError):
    """A step could not be computed; the instance cannot go on."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What an executor holds. Known when it is loaded, and constant from then on."""

    model: ModelIdentity
    layout: KVLayout
    total_pages: int
    max_rows: int
    memory: MemoryRegion
    eos_token_ids: tuple[int, ...]
    device: str
    choices: EngineChoices = EngineChoices()


class StepHandle(Protocol):
    """A step in flight."""

    @property
    def ends_s(self) -> float | None:
        """When the step ends, if that is known in advance; None: the executor wakes its process's loop then."""

    @property
    def layers_done(self) -> int:
        """How many layers, from the first on, have the KV of the plan's chunks in the pages.

        The executor wakes its process's loop a few times while this grows, not at every layer. It may stay 0 until the step is
        complete."""

    def poll(self) -> StepResult | None:
        """The result once the step is complete (its KV is in the pages), None before. Raises ExecutorFailed."""


class Executor(Protocol):
    """Runs plans in the order of their launch. Launching never blocks. When a step completes, the implementation wakes its
    process's loop by the `wake` callable that it got at construction."""

    @property
    def description(self) -> EngineDescription: ...

    def launch(self, plan: Plan) -> StepHandle: ...

    def prepare(self, grammar: Grammar, owner: str = "") -> Preparation:
        """Begin to make the grammar ready, at this owner's turn (see `Terms`). Never blocks. A row with a grammar is launched
        only when it is ready; the implementation wakes its process's loop then."""

    def digest_pages(self, pages: Int32Array) -> bytes:
        """The CRC-32 of each page's bytes, little-endian uint32. pages: [pages] int32. Blocks; for --verify-pages and tests.

        No step in flight may write these pages."""

    def close(self) -> None:
        """Stop after the steps in flight. Idempotent."""
