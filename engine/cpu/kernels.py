"""The engine's small operations in C: what runs on CPU where there is a compiler.

Owns how a call becomes pointers, counts and threads. Does not know what the C computes (`elementwise.c`, `low_rank.c` and
`sampling.c`) or how it is compiled. torch computes what the C has no code for, such as float16 or FP8 pages.
"""

import ctypes
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from engine.cpu.build import NativeFunction, load
from engine.ports import ADAPTED_TILE, AdaptedTokens, HeadNorm, LowRankStack, PagePlaces, Rotation, RowSampling
from engine.torch_kernels import GREEDY_BELOW, Kernels, rows_of

SOURCE, LOW_RANK_SOURCE, SAMPLING_SOURCE = (
    Path(__file__).with_name(name) for name in ("elementwise.c", "low_rank.c", "sampling.c")
)
_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}


class NativeKernels(Kernels):
    """What the C has code for. library: of the C source."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._decode_inputs = NativeFunction(
            library,
            "decode_inputs",
            "rows last_token length table token_ids positions pages slots",
            "count table_row page_size null",
        )
        self._embed = NativeFunction(library, "embed", "table ids out", "count rows bytes")
        self._rotation = NativeFunction(library, "rotation", "positions frequencies cos sin", "tokens half", "factor")
        norm_counts = "rows width x_row residual_row"
        self._norm = NativeFunction(library, "add_rms_norm", "x residual weight out total", norm_counts, "eps", "is_bf16")
        self._silu = NativeFunction(library, "silu_and_mul", "gate_up out", "rows width row", ints="is_bf16")
        self._rotate = NativeFunction(
            library,
            "rotate_and_write",
            "heads cos sin query_norm key_norm pages slots queries keys values",
            "tokens token_row head_row query_heads kv_heads dim half key_page key_head key_slot value_page value_head value_slot",
            "eps",
            "is_bf16 pages_are_bf16",
        )
        self._quantise = NativeFunction(library, "quantise_int8", "x out scales", "rows width row", ints="largest is_bf16")

    def decode_inputs(
        self, rows: Tensor, last_token: Tensor, length: Tensor, table: Tensor, page_size: int, null: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert {rows.dtype, last_token.dtype, length.dtype} == {torch.int64} and table.dtype == torch.int32
        assert rows.is_contiguous() and last_token.is_contiguous() and length.is_contiguous() and table.stride(1) == 1
        token_ids, positions, pages, slots = rows.new_empty(4, rows.shape[0]).unbind()
        self._decode_inputs(
            rows, last_token, length, table, token_ids, positions, pages, slots, rows.shape[0], table.stride(0), page_size, null
        )
        return token_ids, positions, pages, slots

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        assert token_ids.dtype == torch.int64 and table.is_contiguous()
        token_ids, (rows, width) = token_ids.contiguous(), table.shape
        out = table.new_empty(token_ids.shape[0], width)
        self._embed(table, token_ids, out, token_ids.shape[0], rows, width * table.itemsize)
        return out

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
        assert positions.dtype == torch.int64 and frequencies.dtype == torch.float32
        tokens, half = positions.shape[0], frequencies.shape[0]
        cos, sin = frequencies.new_empty(tokens, half), frequencies.new_empty(tokens, half)
        self._rotation(positions.contiguous(), frequencies.contiguous(), cos, sin, tokens, half, factor)
        return Rotation(cos, sin)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        is_bf16 = _IS_BF16.get(x.dtype)
        if is_bf16 is None or x.dim() != 2 or weight.dtype != x.dtype or (residual is not None and residual.dtype != x.dtype):
            return super().rms_norm(x, weight, eps, residual)
        x, residual = rows_of(x), None if residual is None else rows_of(residual)
        rows, width = x.shape
        out, total = x.new_empty(rows, width), None if residual is None else x.new_empty(rows, width)
        residual_row = 0 if residual is None else residual.stride(0)
        self._norm(x, residual, weight.contiguous(), out, total, rows, width, x.stride(0), residual_row, eps, is_bf16)
        return out, x if total is None else total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        is_bf16 = _IS_BF16.get(gate_up.dtype)
        if is_bf16 is None:
            return super().silu_and_mul(gate_up)
        gate_up = rows_of(gate_up)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        self._silu(gate_up, out, rows, width, gate_up.stride(0), is_bf16)
        return out

    def quantise_int8(self, x: Tensor, largest: int) -> tuple[Tensor, Tensor]:
        is_bf16 = _IS_BF16.get(x.dtype)
        if is_bf16 is None:
            return super().quantise_int8(x, largest)
        x = rows_of(x)
        rows, width = x.shape
        out, scales = x.new_empty(rows, width, dtype=torch.uint8), x.new_empty(rows, 1, dtype=torch.float32)
        self._quantise(x, out, scales, rows, width, x.stride(0), largest, is_bf16)
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
        heads, cos, sin = rows_of(heads), rotation.cos.contiguous(), rotation.sin.contiguous()
        tokens, all_heads, dim = heads.shape
        (*key_strides, key_item), (*value_strides, value_item) = keys.stride(), values.stride()
        assert key_item == value_item == 1, "a head of a token is one run of elements in a page"
        assert cos.dtype == sin.dtype == torch.float32 and places.pages.dtype == places.slots.dtype == torch.int64
        kv_heads = keys.shape[1]
        query_heads = all_heads - 2 * kv_heads
        queries = heads.new_empty(tokens, query_heads, dim)
        weights = (None, None) if norm is None else (norm.query.contiguous(), norm.key.contiguous())
        self._rotate(
            heads, cos, sin, *weights, places.pages.contiguous(), places.slots.contiguous(), queries, keys, values,
            tokens, heads.stride(0), heads.stride(1), query_heads, kv_heads, dim, cos.shape[1], *key_strides, *value_strides,
            0.0 if norm is None else norm.eps, is_bf16, pages_are_bf16,
        )  # fmt: skip
        return queries

    def sample(self, logits: Tensor, rows: RowSampling | None = None) -> Tensor:
        if self._sample is None:
            return super().sample(logits, rows)
        given = [None] * len(RowSampling._fields) if rows is None else [each.contiguous() for each in rows]
        logits = rows_of(logits.float())
        count, vocab = logits.shape
        parts = torch.get_num_threads()
        found, best, last, tokens = (torch.empty(size, dtype=torch.int64) for size in (count * parts, count, count, count))
        places = torch.empty(0 if rows is None else parts * vocab, dtype=torch.int64)
        self._sample(logits, *given, found, best, last, places, tokens, count, vocab, logits.stride(0), parts, GREEDY_BELOW)
        return tokens

    @cached_property
    def _sample(self) -> NativeFunction | None:
        """None, and the log says why, where there is no library."""
        library = load(SAMPLING_SOURCE)
        pointers = f"logits {' '.join(RowSampling._fields)} found best last places tokens"
        return None if library is None else NativeFunction(library, "sample", pointers, "rows vocab row parts", "greedy_below")

    def add_low_rank(self, out: Tensor, x: Tensor, stack: LowRankStack, tokens: AdaptedTokens) -> None:
        add, (_, parts, rank, inputs) = self._add_low_rank, stack.a.shape
        if add is None or stack.a.dtype != torch.float32:
            super().add_low_rank(out, x, stack, tokens)
            return
        wide, x = out.float(), rows_of(x.float())  # out itself where it is float32
        assert wide.is_contiguous() and stack.a.is_contiguous() and stack.b.is_contiguous() and rank % 4 == 0
        tiles, outputs = tokens.begins.shape[0], wide.shape[1]
        inner = wide.new_empty(tiles * ADAPTED_TILE, parts * rank)
        add(
            x, stack.a, stack.b, wide, inner, tokens.order, tokens.begins, tokens.counts, tokens.tile_slots, stack.ranks,
            stack.part_ends, tiles, inputs, outputs, parts, rank, x.stride(0), ADAPTED_TILE,
        )  # fmt: skip
        if wide is not out:
            out.copy_(wide)

    @cached_property
    def _add_low_rank(self) -> NativeFunction | None:
        """Loaded at the first call, because most instances have no adapters. None, and the log says why, where it cannot be."""
        library = load(LOW_RANK_SOURCE)
        pointers = "x a b out inner order begins counts slots ranks ends"
        counts = "tiles inputs outputs parts rank x_row tile_tokens"
        return None if library is None else NativeFunction(library, "add_low_rank", pointers, counts)


def load_native_kernels() -> NativeKernels | None:
    """None where the C cannot be compiled; why is logged."""
    library = load(SOURCE)
    return None if library is None else NativeKernels(library)
