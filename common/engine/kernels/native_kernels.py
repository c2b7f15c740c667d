"""The engine's small operations in C: what runs on CPU where there is a compiler.

Owns how a call becomes pointers, counts and threads. Does not know what the C computes (`elementwise.c`) or how it is compiled.
torch computes what the C has no code for, such as float16 or FP8 pages.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.engine.kernels.noise import GREEDY_BELOW
from common.engine.kernels.port import HeadNorm, PagePlaces, Rotation
from common.engine.kernels.torch_kernels import TorchKernels
from common.engine.native.build import load

SOURCE = Path(__file__).with_name("elementwise.c")
_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}
_ALONE_ELEMENTS = 2**14
"""Fewer elements are done sooner by one thread than a second one can be told of them."""
_POINTER, _COUNT, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_ARGUMENTS: dict[str, "list[type[ctypes._SimpleCData[Any]]]"] = {
    "add_rms_norm": [_POINTER] * 5 + [_COUNT] * 4 + [_FLOAT, _INT, _INT],
    "silu_and_mul": [_POINTER] * 2 + [_COUNT] * 3 + [_INT, _INT],
    "rotate_and_write": [_POINTER, _INT],
    "sample": [_POINTER] * 6 + [_COUNT] * 3 + [_FLOAT, _INT],
    "quantise_int8": [_POINTER] * 3 + [_COUNT] * 3 + [_INT] * 3,
}


class _RotateWork(ctypes.Structure):
    """`rotate_work` of the C source."""

    _fields_ = (
        *((name, _POINTER) for name in ("heads", "cos", "sin", "query_norm", "key_norm", "pages", "slots")),
        *((name, _POINTER) for name in ("queries", "keys", "values")),
        *((name, _COUNT) for name in ("tokens", "token_row", "head_row", "query_heads", "kv_heads", "dim", "half")),
        *((name, _COUNT) for name in ("key_page", "key_head", "key_slot", "value_page", "value_head", "value_slot")),
        ("eps", _FLOAT),
        ("is_bf16", _INT),
        ("pages_are_bf16", _INT),
    )


class NativeKernels(TorchKernels):
    """Implements `Kernels`. library: of the C source. threads: tells at each call how many share its work: those of torch, whose
    number follows the cores that other instances lend."""

    def __init__(self, library: ctypes.CDLL, threads: Callable[[], int] = torch.get_num_threads) -> None:
        super().__init__()
        self._threads = threads
        functions = {name: library[name] for name in _ARGUMENTS}  # by index: each call makes a function of its own
        for name, function in functions.items():
            function.argtypes, function.restype = _ARGUMENTS[name], None
        self._norm, self._silu = functions["add_rms_norm"], functions["silu_and_mul"]
        self._rotate, self._sample = functions["rotate_and_write"], functions["sample"]
        self._quantise_int8 = functions["quantise_int8"]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        is_bf16 = _IS_BF16.get(x.dtype)
        if is_bf16 is None or x.dim() != 2 or weight.dtype != x.dtype:
            return super().rms_norm(x, weight, eps)
        x, weight = _rows_of(x), weight.contiguous()
        rows, width = x.shape
        out = x.new_empty(rows, width)
        self._norm(
            x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), None, rows, width, x.stride(0), 0, eps, is_bf16,
            self._threads_for(rows * width),
        )  # fmt: skip
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        is_bf16 = _IS_BF16.get(x.dtype)
        if is_bf16 is None or not residual.dtype == weight.dtype == x.dtype:
            return super().add_rms_norm(x, residual, weight, eps)
        x, residual, weight = _rows_of(x), _rows_of(residual), weight.contiguous()
        rows, width = x.shape
        out, total = x.new_empty(rows, width), x.new_empty(rows, width)
        self._norm(
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(), rows, width, x.stride(0),
            residual.stride(0), eps, is_bf16, self._threads_for(rows * width),
        )  # fmt: skip
        return out, total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        is_bf16 = _IS_BF16.get(gate_up.dtype)
        if is_bf16 is None:
            return super().silu_and_mul(gate_up)
        gate_up = _rows_of(gate_up)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        threads = self._threads_for(rows * width)
        self._silu(gate_up.data_ptr(), out.data_ptr(), rows, width, gate_up.stride(0), is_bf16, threads)
        return out

    def quantise_int8(self, x: Tensor, largest: int) -> tuple[Tensor, Tensor]:
        is_bf16 = _IS_BF16.get(x.dtype)
        if is_bf16 is None:
            return super().quantise_int8(x, largest)
        x = _rows_of(x)
        rows, width = x.shape
        out, scales = x.new_empty(rows, width, dtype=torch.uint8), x.new_empty(rows, 1, dtype=torch.float32)
        threads = self._threads_for(rows * width)
        self._quantise_int8(
            x.data_ptr(), out.data_ptr(), scales.data_ptr(), rows, width, x.stride(0), largest, is_bf16, threads
        )  # fmt: skip
        return out, scales

    def rotate_and_write(self, heads: Tensor, rotation: Rotation, norm: HeadNorm | None, places: PagePlaces) -> Tensor:
        keys, values = places.keys, places.values
        is_bf16, pages_are_bf16 = _IS_BF16.get(heads.dtype), _IS_BF16.get(keys.dtype)
        if (
            is_bf16 is None
            or pages_are_bf16 is None
            or pages_are_bf16 < is_bf16
            or (norm is not None and norm.query.dtype != heads.dtype)
        ):
            return super().rotate_and_write(heads, rotation, norm, places)
        heads, cos, sin = _rows_of(heads), rotation.cos.contiguous(), rotation.sin.contiguous()
        tokens, all_heads, dim = heads.shape
        (*key_strides, key_item), (*value_strides, value_item) = keys.stride(), values.stride()
        assert key_item == value_item == 1, "a head of a token is one run of elements in a page"
        assert cos.dtype == sin.dtype == torch.float32 and places.pages.dtype == places.slots.dtype == torch.int64
        kv_heads = keys.shape[1]
        query_heads = all_heads - 2 * kv_heads
        queries = heads.new_empty(tokens, query_heads, dim)
        weights = (None, None) if norm is None else (norm.query.contiguous(), norm.key.contiguous())
        pages, slots = places.pages.contiguous(), places.slots.contiguous()
        page, head, slot = key_strides
        work = _RotateWork(
            heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), *(None if each is None else each.data_ptr() for each in weights),
            pages.data_ptr(), slots.data_ptr(),
            queries.data_ptr(), keys.data_ptr(), values.data_ptr(),
            tokens, heads.stride(0), heads.stride(1), query_heads, kv_heads, dim, cos.shape[1],
            page, head, slot, *value_strides, 0.0 if norm is None else norm.eps, is_bf16, pages_are_bf16,
        )  # fmt: skip
        self._rotate(ctypes.addressof(work), self._threads_for(tokens * all_heads * dim))
        return queries

    def sample(self, logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
        temperature, seed, position = (each.contiguous() for each in (temperature, seed, position))
        return self._sampled(logits, temperature.data_ptr(), seed.data_ptr(), position.data_ptr())

    def likeliest(self, logits: Tensor) -> Tensor:
        return self._sampled(logits, None, None, None)

    def _sampled(self, logits: Tensor, temperature: int | None, seed: int | None, position: int | None) -> Tensor:
        assert logits.dtype == torch.float32
        logits = _rows_of(logits)
        rows, vocab = logits.shape
        threads = self._threads_for(rows * vocab)
        tokens, scratch = (torch.empty(count, dtype=torch.int64) for count in (rows, rows * (threads + 1)))
        self._sample(
            logits.data_ptr(), temperature, seed, position, scratch.data_ptr(), tokens.data_ptr(), rows, vocab, logits.stride(0),
            GREEDY_BELOW, threads,
        )  # fmt: skip
        return tokens

    def _threads_for(self, elements: int) -> int:
        return 1 if elements < _ALONE_ELEMENTS else self._threads()


def load_native_kernels() -> NativeKernels | None:
    """None where the C cannot be compiled; why is logged."""
    library = load(SOURCE)
    return None if library is None else NativeKernels(library)


def _rows_of(x: Tensor) -> Tensor:
    """x with its last dimension in one run, as C reads it."""
    return x if x.stride(-1) == 1 else x.contiguous()
