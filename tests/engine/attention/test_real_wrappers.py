"""The backend over FlashInfer's own wrappers, whose Python runs without CUDA once their kernels are replaced.

Owns the replacements: kernels that compute from what the compiled ones would be given, by their positions in FlashInfer 0.6.4 to
0.7.2. So what the wrappers make of our arguments is FlashInfer's own code, and only the kernels are not.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from common.pages.layout import KVDtype
from engine.gpu.flashinfer import AttentionNeeds, FlashInferAttention, PrefillKernels, _Largest
from engine.ports import LayerAttention
from engine.torch_kernels import Kernels
from tests.engine.attention.flashinfer_double import attended
from tests.engine.attention.steps import Shape, Step

LAYERS = (LayerAttention(0.1), LayerAttention(0.1, window=7, softcap=3.0))
CAUSAL, HND = 1, 1
"""As FlashInfer's MaskMode and TensorLayout count."""


class CompiledModule:
    """A compiled module of FlashInfer. `plan` is given three arrays on the host, or one for kernels without tensor cores."""

    def __init__(self, *arguments: object) -> None:
        self._host_arrays = 1 if len(arguments) == 9 else 3

    def plan(self, *arguments: Any) -> list[int]:
        for array in arguments[3 : 3 + self._host_arrays]:
            assert array.device.type == "cpu" and array.dtype == torch.int32
        return [0]

    def paged_run(self, *arguments: Any) -> None:
        """The kernel of chunks, and of decode rows on tensor cores."""
        query, keys, values, queries, indptr, indices, last, out, _, mask, layout, window_left = arguments[3:15]
        softcap, scale = arguments[22:24]
        assert layout == HND
        given = attended(query, keys, values, queries, indptr, indices, last, mask == CAUSAL, window_left, softcap or None, scale)
        out.copy_(given)

    def run(self, *arguments: Any) -> None:
        """The kernel of decode rows on CUDA cores."""
        query, keys, values, indptr, indices, last, out, _, layout, window_left = arguments[3:13]
        softcap, scale = arguments[15:17]
        assert layout == HND
        queries = torch.arange(len(query) + 1, dtype=torch.int32)
        out.copy_(attended(query, keys, values, queries, indptr, indices, last, False, window_left, softcap or None, scale))


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer-python is not installed")
    for name in ("flashinfer.decode", "flashinfer.prefill"):
        module = importlib.import_module(name)
        for made in ("get_batch_prefill_module", "get_batch_decode_module"):
            monkeypatch.setattr(module, made, CompiledModule, raising=made == "get_batch_prefill_module")
        monkeypatch.setattr(module, "device_support_pdl", lambda device: False)
    empty: Callable[..., Tensor] = torch.empty

    def pageable(*size: Any, pin_memory: bool = False, **named: Any) -> Tensor:
        return empty(*size, **named)

    monkeypatch.setattr(torch, "empty", pageable)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return importlib.import_module("flashinfer")


@pytest.mark.parametrize(
    ("heads", "kv_dtype", "prefill"), [(4, "float16", "fa3"), (8, "float16", "fa3"), (4, "float8_e4m3fn", "fa2")]
)
def test_flashinfers_own_wrappers_give_their_kernels_what_the_layers_ask(
    flashinfer: Any, heads: int, kv_dtype: KVDtype, prefill: PrefillKernels
) -> None:
    shape = Shape(heads, 2, 64, 5, LAYERS, torch.float16, kv_dtype)
    step = Step(shape, [(0, 7), (9, 6), (3, 1)], [4, 23, 40])
    asked = AttentionNeeds(step.memory, heads, LAYERS, torch.float16, max_rows=4, pages_per_row=shape.width, prefill=prefill)
    attention = FlashInferAttention(asked, Kernels(), flashinfer)
    attention.load_kernels()
    for _ in range(2):
        attention.plan(step.tokens)
    for layer in range(len(LAYERS)):
        assert step.error(layer, attention.run(layer, step.query)) < 2e-3
    graph = attention.for_graph(4)
    for seed, lengths in enumerate(([40, 1, 23, 5], [6, 7], [3])):
        later = Step(shape, [], lengths, memory=step.memory, padding=4 - len(lengths), seed=seed)
        graph.plan(later.tokens)
        for layer in range(len(LAYERS)):
            assert later.error(layer, graph.run(layer, later.query)) < 2e-3


def test_a_plan_of_many_rows_makes_no_tensor_for_each_of_them(flashinfer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's `max` over a tensor does, and takes longer than all else that is planned on the host."""
    shape = Shape(8, 2, 64, 5, LAYERS, torch.float16, "float16")
    step = Step(shape, [(0, 7)] * 2, [4, 23, 40, 7, 9, 31])
    asked = AttentionNeeds(step.memory, 8, LAYERS, torch.float16, max_rows=16, pages_per_row=shape.width, prefill="fa2")
    attention = FlashInferAttention(asked, Kernels(), flashinfer)
    given = list[tuple[Tensor, ...]]()
    plan = CompiledModule.plan

    def noted(self: CompiledModule, *arguments: Any) -> list[int]:
        given.append(arguments[3:6])
        return plan(self, *arguments)

    def refused(self: Tensor) -> Iterator[Tensor]:
        assert len(self) < 6
        return iter(self.unbind(0))

    monkeypatch.setattr(CompiledModule, "plan", noted)
    monkeypatch.setattr(Tensor, "__iter__", refused)
    attention.plan(step.tokens)
    *_, (queries, indptr, lengths) = given
    assert queries.tolist() == [*range(7)] and lengths.tolist() == step.tokens.host_lengths.tolist()
    assert indptr.diff().tolist() == [-(-length // shape.page_size) for length in lengths.tolist()]
    with pytest.raises(AssertionError):
        max(torch.zeros(6))


def test_the_lengths_that_are_planned_with_reach_compiled_code_as_any_tensor() -> None:
    tvm_ffi = pytest.importorskip("tvm_ffi")
    lengths = torch.arange(1, 7, dtype=torch.int32).as_subclass(_Largest)
    assert max(lengths.cpu()).item() == 6
    received = tvm_ffi.convert(lambda numbers: numbers)(lengths)
    assert received.data_ptr() == lengths.data_ptr() and received.tolist() == [1, 2, 3, 4, 5, 6]
