"""The engine's small operations as Triton kernels: what runs on CUDA.

Owns how a call becomes programs: block sizes, warps, outputs. Does not know what a program computes (`triton_source`). The block
sizes follow two rules: a thread moves 16 bytes at a time, and a row that is much shorter than a block shares it with others.
"""

import itertools

import torch
import triton
from torch import Tensor

from engine.gpu import triton_source as source
from engine.ports import ADAPTED_TILE, AdaptedTokens, Fp8Rows, HeadNorm, LowRankStack, PagePlaces, Rotation, Routing, RowSampling
from engine.torch_kernels import Kernels, rows_of

_NORM_ELEMENTS = 1024
"""Elements that a program norms at least, in as many rows as it takes."""
_SILU_COLUMNS = 1024
_COMBINED_COLUMNS = 1024
_PAIRS = 2048
_ROWS = 128
_HEADS = 8
_SLICE = 2048
"""Tokens of the vocabulary for each program: one row of 150,000 is work for half the multiprocessors of an H100."""
_BOUNDS, _FOUND, _WAYS = 16, 512, 8
"""The bounds between which the end of a filter is found, the tokens between two of them that a program looks at in one go, and
the parts of a range that it tells apart in one pass."""
_PAGES = 1024
_RANKS = 16
"""As few rows of an A as the matrix units take: most adapters have no more."""
_LOW_RANK_COLUMNS = 128


class TritonKernels(Kernels):
    """What is a kernel here; torch computes the rest. The kernels start on the current CUDA device, which must be
    that of the tensors. Their number and shapes depend on the shapes of tensors alone, so that calls may be captured in a CUDA
    graph."""

    def decode_inputs(
        self, rows: Tensor, last_token: Tensor, length: Tensor, table: Tensor, page_size: int, null: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert table.stride(1) == 1
        token_ids, positions, pages, slots = (torch.empty_like(rows) for _ in range(4))
        if count := len(rows):
            source.decode_inputs[(triton.cdiv(count, _ROWS),)](
                rows,
                last_token,
                length,
                table,
                token_ids,
                positions,
                pages,
                slots,
                count,
                table.stride(0),
                null,
                page_size,
                _ROWS,
            )
        return token_ids, positions, pages, slots

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
        tokens, half = len(positions), len(frequencies)
        cos, sin = (torch.empty((tokens, half), dtype=torch.float32, device=positions.device) for _ in range(2))
        if tokens and half:
            block = triton.next_power_of_2(half)
            source.rotation[(tokens,)](
                positions.contiguous(), frequencies, cos, sin, factor, half, block, num_warps=_warps(block, 1)
            )
        return Rotation(cos, sin)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return out, self._norm(x, weight, eps, residual, out, out)

    def rms_norm_fp8(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Fp8Rows, Tensor]:
        out = _empty_fp8(len(x), x.shape[1], x.device)
        return out, self._norm(x, weight, eps, residual, *out)

    def _norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: Tensor, scales: Tensor) -> Tensor:
        """A program norms at least _NORM_ELEMENTS, and a thread 16 of them. Returns what is normed."""
        x = rows_of(x)
        count, hidden = len(x), x.shape[1]
        total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        block = triton.next_power_of_2(hidden)
        rows = max(1, _NORM_ELEMENTS // block)
        grid, warps = (triton.cdiv(count, rows),), _warps(rows * block, 16)
        if count and residual is None:
            source.rms_norm[grid](x, weight, out, scales, count, x.stride(0), eps, hidden, rows, block, num_warps=warps)
        elif count and residual is not None:
            residual = rows_of(residual)
            source.add_rms_norm[grid](
                x, residual, weight, out, scales, total, count, x.stride(0), residual.stride(0), eps, hidden, rows, block,
                num_warps=warps,
            )  # fmt: skip
        return total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = rows_of(gate_up)
        tokens, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
        if tokens:
            block = min(_SILU_COLUMNS, triton.next_power_of_2(width))
            grid = (tokens, triton.cdiv(width, block))
            source.silu_and_mul[grid](gate_up, out, out, gate_up.stride(0), width, block, num_warps=_warps(block, 8))
        return out

    def silu_and_mul_fp8(self, gate_up: Tensor) -> Fp8Rows:
        gate_up = rows_of(gate_up)
        tokens, width = len(gate_up), gate_up.shape[1] // 2
        out = _empty_fp8(tokens, width, gate_up.device)
        if tokens:
            block = triton.next_power_of_2(width)
            source.silu_and_mul[(tokens, 1)](gate_up, *out, gate_up.stride(0), width, block, num_warps=_warps(block, 16))
        return out

    def quantise(self, x: Tensor) -> Fp8Rows:
        x = rows_of(x)
        rows, width = x.shape
        out = _empty_fp8(rows, width, x.device)
        if rows:
            block = triton.next_power_of_2(width)
            source.quantise[(rows,)](x, *out, x.stride(0), width, block, num_warps=_warps(block, 16))
        return out

    def route(self, logits: Tensor, chosen: int, here: range, *, normalised: bool) -> Routing:
        logits = rows_of(logits)
        (count, experts), device = logits.shape, logits.device
        weights = torch.empty((count, chosen), dtype=torch.float32, device=device)
        of_pairs = torch.empty(count * chosen, dtype=torch.int32, device=device)
        tokens, places = (torch.empty(count * chosen, dtype=torch.int64, device=device) for _ in range(2))
        ends = (torch.empty if count else torch.zeros)(len(here), dtype=torch.int32, device=device)
        if count:
            block = triton.next_power_of_2(experts)
            source.route[(count,)](
                logits, weights, of_pairs, logits.stride(0), here.start, experts, chosen, normalised, block,
                triton.next_power_of_2(chosen), num_warps=_warps(block, 4),
            )  # fmt: skip
            source.sort_pairs[(experts,)](of_pairs, tokens, places, ends, len(tokens), len(here), chosen, _PAIRS, num_warps=16)
        return Routing(weights, tokens, places.view(count, chosen), ends, len(here) == experts)

    def combine(self, rows: Tensor, routing: Routing) -> Tensor:
        rows = rows_of(rows)
        (tokens, chosen), width = routing.places.shape, rows.shape[1]
        out = torch.empty((tokens, width), dtype=rows.dtype, device=rows.device)
        if tokens:
            block = min(_COMBINED_COLUMNS, triton.next_power_of_2(width))
            source.combine[(tokens, triton.cdiv(width, block))](
                rows, routing.weights, routing.places, routing.ends, out, rows.stride(0),
                len(routing.ends), chosen, width, block, num_warps=_warps(block, 8),
            )  # fmt: skip
        return out

    def rotate_and_write(self, heads: Tensor, rotation: Rotation, norm: HeadNorm | None, places: PagePlaces) -> Tensor:
        heads, cos, sin = rows_of(heads), rotation.cos.contiguous(), rotation.sin.contiguous()
        keys, values = places.keys, places.values
        assert keys.stride(3) == values.stride(3) == 1, "a head of a token is one run of elements in a page"
        tokens, all_heads, dim = heads.shape
        kv_heads, half = keys.shape[1], cos.shape[1]
        query_heads = all_heads - 2 * kv_heads
        queries = torch.empty((tokens, query_heads, dim), dtype=heads.dtype, device=heads.device)
        if not tokens:
            return queries
        block_heads = min(_HEADS, triton.next_power_of_2(query_heads))
        blocks = [triton.next_power_of_2(max(size, 1)) for size in (half, dim - 2 * half, dim)]
        grid = (tokens, triton.cdiv(query_heads, block_heads) + 2 * triton.cdiv(kv_heads, block_heads))
        weights = (norm.query, norm.key, norm.eps) if norm is not None else (cos, cos, 0.0)
        strides = (*heads.stride()[:2], half, *keys.stride()[:3], *values.stride()[:3])
        source.rotate_and_write[grid](
            heads, cos, sin, *weights, places.pages, places.slots, queries, keys, values, *strides,
            query_heads, kv_heads, dim, half, norm is not None, block_heads, *blocks,
            num_warps=_warps(block_heads * blocks[2], 16),
        )  # fmt: skip
        return queries

    def sample(self, logits: Tensor, rows: RowSampling | None = None) -> Tensor:
        """The logits are read twice, of rows with top-k or top-p once more for the sums and once for each of both."""
        count, vocab = logits.shape
        if rows is None or not count:
            return super().sample(logits)
        logits, rows = rows_of(logits), RowSampling(*(each.contiguous() for each in rows))
        slices = triton.cdiv(vocab, _SLICE)
        grid, block = (count, slices), triton.next_power_of_2(slices)
        maxima, best = torch.empty((2, count, slices), dtype=torch.float32, device=logits.device)
        firsts, tokens = torch.empty((2, count, slices), dtype=torch.int32, device=logits.device)
        counts = torch.empty((count, _BOUNDS, slices), dtype=torch.int32, device=logits.device)
        masses = torch.empty((count, _BOUNDS, slices), dtype=torch.int64, device=logits.device)
        places = torch.empty((count, vocab), dtype=torch.int64, device=logits.device)
        last, totals, out = torch.empty((3, count), dtype=torch.int64, device=logits.device).unbind()
        filters, sizes = (rows.temperature, rows.top_k, rows.top_p), (vocab, slices, _SLICE, block)
        source.slice_maxima[grid](logits, maxima, firsts, logits.stride(0), vocab, _SLICE, num_warps=8)
        source.slice_sums[grid](
            logits, *filters, maxima, counts, masses, logits.stride(0), *sizes, _BOUNDS, num_warps=8, enable_fp_fusion=False
        )
        for is_by_mass in (False, True):  # one program of both would need more registers than there are
            source.last_places[(count,)](
                logits, *filters, rows.min_logit, maxima, counts, masses, places, last, totals, logits.stride(0), *sizes,
                _BOUNDS, _FOUND, _WAYS, is_by_mass, num_warps=16, enable_fp_fusion=False,
            )  # fmt: skip
        noise = (rows.temperature, rows.seed, rows.position)
        source.slice_samples[grid](
            logits, *noise, maxima, firsts, last, best, tokens, logits.stride(0), *sizes, num_warps=8, enable_fp_fusion=False
        )
        source.best_of_slices[(count,)](best, tokens, out, slices, block, num_warps=1)
        return out

    def add_low_rank(self, out: Tensor, x: Tensor, stack: LowRankStack, tokens: AdaptedTokens) -> None:
        x, tiles, (_, parts, rank, inputs) = rows_of(x), len(tokens.begins), stack.a.shape
        if not tiles:
            return
        inner = torch.empty((tiles * ADAPTED_TILE, parts * rank), dtype=x.dtype, device=x.device)
        of_tiles = (tokens.order, tokens.begins, tokens.counts, tokens.tile_slots, stack.ranks)
        blocks = ADAPTED_TILE, _RANKS, _LOW_RANK_COLUMNS
        grid = (tiles, parts * rank // _RANKS)
        source.shrink[grid](x, stack.a, inner, *of_tiles, x.stride(0), parts, rank, inputs, *blocks, num_warps=4)
        ends = (*stack.ends, *(stack.ends[-1:] * 2))[:3]
        widths = (end - begin for begin, end in itertools.pairwise((0, *stack.ends)))
        grid = (tiles, sum(triton.cdiv(width, _LOW_RANK_COLUMNS) for width in widths))
        source.expand[grid](inner, stack.b, out, *of_tiles, parts, rank, *ends, *blocks, num_warps=4)

    def page_indices(self, table: Tensor, rows: Tensor, indptr: Tensor, out: Tensor) -> None:
        assert table.stride(1) == out.stride(0) == 1
        if len(rows):
            grid = (len(rows), triton.cdiv(table.shape[1], _PAGES))
            source.page_indices[grid](table, rows.contiguous(), indptr.contiguous(), out, table.stride(0), _PAGES)


def _empty_fp8(rows: int, width: int, device: torch.device) -> Fp8Rows:
    values = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=device)
    return Fp8Rows(values, torch.empty((rows, 1), dtype=torch.float32, device=device))


def _warps(elements: int, per_thread: int) -> int:
    return min(32, max(1, elements // (32 * per_thread)))
