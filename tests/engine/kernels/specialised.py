"""Stands in for Triton's kernels where there is no card: what Triton would compile for each start, and torch's results.

Owns the record. Triton's own code tells what a start is compiled for: types, whether a pointer is a multiple of 16, and whether a
number is 1 or a multiple of 16.
"""

import inspect
from typing import Any

import pytest
from torch import Tensor

from engine.ports import AdaptedTokens, HeadNorm, LowRankStack, PagePlaces, Rotation, Routing, RowSampling
from engine.torch_kernels import Kernels


class Specialised:
    """Stands in for a kernel. compiled: what it was started for, each once. Computes nothing."""

    def __init__(self, kernel: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        backend = make_backend(GPUTarget("cuda", 90, 32))
        self._bind: Any = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.compiled: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> "Specialised":
        return self

    def __call__(self, *given: object, **options: object) -> None:
        self.compiled.add(f"{self._bind(*given)[1]} {options}")


def stand_in(monkeypatch: pytest.MonkeyPatch, module: Any) -> dict[str, Specialised]:
    """All kernels of a module, by name, while the test runs."""
    from triton.runtime.jit import JITFunction

    kernels = {name: Specialised(value) for name, value in inspect.getmembers(module) if isinstance(value, JITFunction)}
    for name, kernel in kernels.items():
        monkeypatch.setattr(module, name, kernel)
    return kernels


class StartedKernels(Kernels):
    """Starts Triton's kernels, which compute nothing then, and returns what torch computes."""

    def __init__(self) -> None:
        from engine.gpu.triton_kernels import TritonKernels

        super().__init__()
        self._triton = TritonKernels()

    def decode_inputs(
        self, rows: Tensor, last_token: Tensor, length: Tensor, table: Tensor, page_size: int, null: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self._triton.decode_inputs(rows, last_token, length, table, page_size, null)
        return super().decode_inputs(rows, last_token, length, table, page_size, null)

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
        self._triton.rotation(positions, frequencies, factor)
        return super().rotation(positions, frequencies, factor)

    def route(self, logits: Tensor, chosen: int, here: range, *, normalised: bool) -> Routing:
        self._triton.route(logits, chosen, here, normalised=normalised)
        return super().route(logits, chosen, here, normalised=normalised)

    def combine(self, rows: Tensor, routing: Routing) -> Tensor:
        self._triton.combine(rows, routing)
        return super().combine(rows, routing)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._triton.rms_norm(x, weight, eps, residual)
        return super().rms_norm(x, weight, eps, residual)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        self._triton.silu_and_mul(gate_up)
        return super().silu_and_mul(gate_up)

    def rotate_and_write(self, heads: Tensor, rotation: Rotation, norm: HeadNorm | None, places: PagePlaces) -> Tensor:
        self._triton.rotate_and_write(heads, rotation, norm, places)
        return super().rotate_and_write(heads, rotation, norm, places)

    def sample(self, logits: Tensor, rows: RowSampling | None = None) -> Tensor:
        self._triton.sample(logits, rows)
        return super().sample(logits, rows)

    def add_low_rank(self, out: Tensor, x: Tensor, stack: LowRankStack, tokens: AdaptedTokens) -> None:
        self._triton.add_low_rank(out, x, stack, tokens)
        super().add_low_rank(out, x, stack, tokens)

    def page_indices(self, table: Tensor, rows: Tensor, indptr: Tensor, out: Tensor) -> None:
        self._triton.page_indices(table, rows, indptr, out)
        super().page_indices(table, rows, indptr, out)
