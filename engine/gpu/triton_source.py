"""The Triton source of the kernels: what one program of each computes. It runs on CUDA, and in Triton's interpreter on CPU.

Owns the arithmetic on the device, which rounds where `torch_kernels` rounds. Does not know how many programs are started
(`triton_kernels`). Python never runs these functions itself: Triton compiles them, so their arguments have Triton's types.

A tensor argument is a pointer to its first element. Strides are in elements; those that are missing are 1.

Triton compiles a kernel anew for a number that is 1 or a multiple of 16, and for a pointer that is a multiple of 16. Where that
depends on how many rows a step has, it is told not to look: a first such step would wait for the compiler.
"""

import triton
import triton.language as tl

from engine.gpu.triton_sampling import best_of_slices as best_of_slices
from engine.gpu.triton_sampling import last_places as last_places
from engine.gpu.triton_sampling import slice_maxima as slice_maxima
from engine.gpu.triton_sampling import slice_samples as slice_samples
from engine.gpu.triton_sampling import slice_sums as slice_sums
from engine.torch_kernels import FP8_LARGEST, SMALLEST_ROW

_FP8_LARGEST = tl.constexpr(FP8_LARGEST)
_SMALLEST_ROW = tl.constexpr(SMALLEST_ROW)
_LEAST = tl.constexpr(-3.0e38)
"""A logit of the router below this, or NaN, counts as this."""


@triton.jit
def _rounded(x, pointer):
    """float32 x as the pointer's dtype holds it, in float32 again."""
    return x.to(pointer.dtype.element_ty).to(tl.float32)


@triton.jit
def _write(pointer, x, inside):
    """FP8 saturates; NaN stays NaN."""
    if pointer.dtype.element_ty == tl.float8e4nv:
        x = tl.where(x > _FP8_LARGEST, _FP8_LARGEST, tl.where(x < -_FP8_LARGEST, -_FP8_LARGEST, x))
    tl.store(pointer, x.to(pointer.dtype.element_ty), inside)


@triton.jit
def _write_quantised(x, out, scales, row, is_there, inside):
    """Rows of float32 in FP8. x: [rows, columns], 0 outside. row, is_there: [rows, 1]."""
    scale = tl.maximum(tl.max(tl.abs(x), axis=1)[:, None], _SMALLEST_ROW) * (1.0 / _FP8_LARGEST)
    tl.store(scales + row, scale, is_there)
    _write(out, tl.div_rn(x, tl.zeros_like(x) + scale), inside)


@triton.jit(do_not_specialize=["rows"])
def rms_norm(x, weight, out, scales, rows, x_row, eps, HIDDEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A program norms ROWS rows. x: [rows, HIDDEN], x_row apart. out: of x's dtype, or FP8, with scales."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < HIDDEN)
    wide = tl.load(x + row * x_row + column, inside, other=0.0).to(tl.float32)
    _norm(wide, weight, out, scales, row, column, row < rows, eps, HIDDEN)


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm(
    x, residual, weight, out, scales, total, rows, x_row, residual_row, eps,
    HIDDEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `rms_norm`, of x + residual, which it also writes to `total`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < HIDDEN)
    wide = tl.load(x + row * x_row + column, inside, other=0.0).to(tl.float32)
    wide += tl.load(residual + row * residual_row + column, inside, other=0.0).to(tl.float32)
    at = total + row * HIDDEN + column
    tl.store(at, wide.to(total.dtype.element_ty), inside)
    _norm(_rounded(wide, total), weight, out, scales, row, column, row < rows, eps, HIDDEN)


@triton.jit
def _norm(wide, weight, out, scales, row, column, is_there, eps, HIDDEN: tl.constexpr):
    inside = is_there & (column < HIDDEN)
    factor = tl.load(weight + column, column < HIDDEN, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=1) / HIDDEN + eps)[:, None]
    normed = _rounded(normed, weight) * factor
    out += row * HIDDEN + column
    if out.dtype.element_ty == tl.float8e4nv:
        _write_quantised(_rounded(normed, weight), out, scales, row, is_there, inside)
    else:
        _write(out, normed, inside)


@triton.jit
def silu_and_mul(gate_up, out, scales, gate_up_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A program computes BLOCK columns of a row; all of them where out is FP8, with scales."""
    row = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < WIDTH
    gate = tl.load(gate_up + row * gate_up_row + column, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_row + WIDTH + column, inside, other=0.0).to(tl.float32)
    activated = _rounded(gate * tl.sigmoid(gate), gate_up) * up
    out += row * WIDTH + column
    if out.dtype.element_ty == tl.float8e4nv:
        _write_quantised(_rounded(activated, gate_up), out, scales, row, row >= 0, inside)
    else:
        _write(out, activated, inside)


@triton.jit
def quantise(x, out, scales, x_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A program takes a row."""
    row = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < WIDTH
    wide = tl.load(x + row * x_row + column, inside, other=0.0).to(tl.float32)
    _write_quantised(wide, out + row * WIDTH + column, scales, row, row >= 0, inside)


@triton.jit
def rotate_and_write(
    heads, cos, sin, query_norm, key_norm, eps, pages, slots, queries, keys, values,
    heads_token, heads_head, angle_token, key_page, key_head, key_slot, value_page, value_head, value_slot,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """A program takes HEADS heads of one token: queries, keys or values. HALF: half of the rotated part of a head.

    heads: [tokens, QUERY_HEADS + 2 * KV_HEADS, DIM]. cos, sin: [tokens, HALF]. queries: [tokens, QUERY_HEADS, DIM], contiguous.
    keys, values: [pages, KV_HEADS, slots, DIM].
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    query_groups = (QUERY_HEADS + HEADS - 1) // HEADS
    kv_groups = (KV_HEADS + HEADS - 1) // HEADS
    heads += token * heads_token
    cos += token * angle_token
    sin += token * angle_token
    if group < query_groups:
        _rotate(
            heads, heads_head, group, query_norm, cos, sin, queries + token * QUERY_HEADS * DIM, DIM, eps,
            QUERY_HEADS, DIM, HALF, NORM, HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        page, slot = tl.load(pages + token).to(tl.int64), tl.load(slots + token).to(tl.int64)
        heads += QUERY_HEADS * heads_head
        group -= query_groups
        if group < kv_groups:
            _rotate(
                heads, heads_head, group, key_norm, cos, sin, keys + page * key_page + slot * key_slot, key_head, eps,
                KV_HEADS, DIM, HALF, NORM, HEADS, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
        else:
            head = (group - kv_groups) * HEADS + tl.arange(0, HEADS)[:, None]
            column = tl.arange(0, BLOCK_DIM)[None, :]
            inside = (head < KV_HEADS) & (column < DIM)
            value = tl.load(heads + (KV_HEADS + head) * heads_head + column, inside, other=0.0)
            _write(values + page * value_page + slot * value_slot + head * value_head + column, value.to(tl.float32), inside)


@triton.jit
def _rotate(
    source, source_head, group, weight, cos, sin, target, target_head, eps,
    COUNT: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and write the heads of a group. source and target: of COUNT heads of one token."""
    REST: tl.constexpr = DIM - 2 * HALF
    head = group * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < COUNT) & (column < HALF)
    source += head * source_head
    target += head * target_head
    first = tl.load(source + column, inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + column, inside, other=0.0).to(tl.float32)
    beyond = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    inside_rest = (head < COUNT) & (beyond < DIM)
    rest = tl.load(source + beyond, inside_rest, other=0.0).to(tl.float32) if REST > 0 else tl.zeros((HEADS, 1), tl.float32)
    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1) + tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        half = column < HALF
        first = _rounded(_rounded(first * scale, weight) * tl.load(weight + column, half, other=0.0), weight)
        second = _rounded(_rounded(second * scale, weight) * tl.load(weight + HALF + column, half, other=0.0), weight)
        if REST > 0:
            rest = _rounded(rest * scale, weight) * tl.load(weight + beyond, beyond < DIM, other=0.0)
    c = tl.load(cos + column, column < HALF, other=0.0)
    s = tl.load(sin + column, column < HALF, other=0.0)
    _write(target + column, _rounded(first * c - second * s, source), inside)
    _write(target + HALF + column, _rounded(second * c + first * s, source), inside)
    if REST > 0:
        _write(target + beyond, _rounded(rest, source), inside_rest)


@triton.jit
def route(
    logits, weights, experts, logits_row, first,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, NORMALISED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_CHOSEN: tl.constexpr,
):  # fmt: skip
    """A program chooses the experts of a token, the largest logit first, of equal ones the first expert.

    weights, experts: [tokens, CHOSEN]. first: the expert that is number 0 in experts; those before it come behind the last one.
    """
    token = tl.program_id(0).to(tl.int64)
    expert, turn = tl.arange(0, BLOCK), tl.arange(0, BLOCK_CHOSEN)
    given = tl.load(logits + token * logits_row + expert, expert < EXPERTS, other=float("-inf")).to(tl.float32)
    scores = tl.exp(given - tl.max(given, 0))
    scores /= tl.sum(scores, 0)
    # An expert with NaN is still before those that are chosen already, or are none: each comes once.
    rank = tl.where(expert < EXPERTS, tl.where(given > _LEAST, given, _LEAST), float("-inf"))
    chosen, of_chosen = tl.zeros((BLOCK_CHOSEN,), tl.int32), tl.zeros((BLOCK_CHOSEN,), tl.float32)
    for each in tl.static_range(CHOSEN):
        best = tl.argmax(rank, 0, tie_break_left=True)
        chosen = tl.where(turn == each, best, chosen)
        of_chosen = tl.where(turn == each, tl.sum(tl.where(expert == best, scores, 0.0), 0), of_chosen)
        rank = tl.where(expert == best, float("-inf"), rank)
    if NORMALISED:
        of_chosen /= tl.sum(of_chosen, 0)
    at = token * CHOSEN + turn
    tl.store(weights + at, of_chosen, turn < CHOSEN)
    tl.store(experts + at, (chosen + EXPERTS - first) % EXPERTS, turn < CHOSEN)


@triton.jit(do_not_specialize=["pairs"])
def sort_pairs(experts, tokens, places, ends, pairs, HERE: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """A program finds the places of one expert's pairs: behind those of the experts before it, and in their own order. It looks
    at all pairs twice, which are few, and so nothing depends on which program is the first.

    experts: [pairs] int32, as `route` leaves it.
    """
    expert, pair = tl.program_id(0), tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, pairs, BLOCK):
        before += (tl.load(experts + begin + pair, begin + pair < pairs, other=expert) < expert).to(tl.int32)
    place = tl.sum(before, 0)
    for begin in range(0, pairs, BLOCK):
        at = begin + pair
        is_own = tl.load(experts + at, at < pairs, other=-1) == expert
        counted = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(tokens + place + counted - 1, (at // CHOSEN).to(tl.int64), is_own)
        tl.store(places + at, (place + counted - 1).to(tl.int64), is_own)
        place += tl.sum(is_own.to(tl.int32), 0)
    if expert < HERE:
        tl.store(ends + expert, place)


@triton.jit
def combine(
    rows, weights, places, ends, out, row,
    HERE: tl.constexpr, CHOSEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program sums BLOCK columns of what its experts made of a token, always in the same order. rows: `row` apart."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(ends + HERE - 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for each in tl.static_range(CHOSEN):
        place = tl.load(places + token * CHOSEN + each)
        values = tl.load(rows + place * row + column, (column < WIDTH) & (place < end), other=0.0).to(tl.float32)
        total += values * tl.load(weights + token * CHOSEN + each)
    _write(out + token * WIDTH + column, total, column < WIDTH)


@triton.jit(do_not_specialize=["count"])
def decode_inputs(
    rows, last_token, length, table, token_ids, positions, pages, slots, count, table_row, null,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK rows. All of them that are `null` write the 0 that they read."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, inside, other=0)
    position = tl.load(length + row, inside, other=0)
    tl.store(length + row, tl.where(row == null, 0, position + 1), inside)
    tl.store(token_ids + at, tl.load(last_token + row, inside, other=0), inside)
    tl.store(positions + at, position, inside)
    tl.store(pages + at, tl.load(table + row * table_row + position // PAGE_SIZE, inside, other=0).to(tl.int64), inside)
    tl.store(slots + at, position % PAGE_SIZE, inside)


@triton.jit
def rotation(positions, frequencies, cos, sin, factor, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """A program takes a token. An angle may be a million: float64 finds how far it is from a multiple of a quarter turn, and
    Cephes' polynomials are for what is left. Triton's own cosine takes memory for larger ones."""
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < HALF
    angle = (tl.load(positions + token).to(tl.float32) * tl.load(frequencies + column, inside, other=0.0)).to(tl.float64)
    quarters = tl.floor(angle * 0.6366197723675814 + 0.5)
    x = (angle - quarters * 1.5707963267948966).to(tl.float32)
    square = x * x
    s = x + x * square * (-1.6666654611e-1 + square * (8.3321608736e-3 - square * 1.9515295891e-4))
    c = 1.0 - 0.5 * square
    c += square * square * (4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5))
    quarter = quarters.to(tl.int64) & 3
    is_odd, is_back = (quarter & 1) == 1, quarter >= 2
    cosine, sine = tl.where(is_odd, -s, c), tl.where(is_odd, c, s)
    tl.store(cos + token * HALF + column, tl.where(is_back, -cosine, cosine) * factor, inside)
    tl.store(sin + token * HALF + column, tl.where(is_back, -sine, sine) * factor, inside)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def page_indices(table, rows, indptr, out, table_row, BLOCK: tl.constexpr):
    """A program copies up to BLOCK pages of a row. Programs beyond the row's last page have nothing to do."""
    entry, part = tl.program_id(0), tl.program_id(1)
    begin = tl.load(indptr + entry)
    count = tl.load(indptr + entry + 1) - begin
    if part * BLOCK < count:
        at = part * BLOCK + tl.arange(0, BLOCK)
        table += tl.load(rows + entry).to(tl.int64) * table_row
        tl.store(out + begin + at, tl.load(table + at, at < count, other=0), at < count)


@triton.jit
def shrink(
    x, a, inner, order, begins, counts, slots, ranks, x_row,
    PARTS: tl.constexpr, RANK: tl.constexpr, INPUTS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program multiplies a tile of tokens by ROWS rows of one part's A. See `LowRankStack` and `AdaptedTokens`.

    x: [tokens, INPUTS], x_row apart. a: [slots, PARTS, RANK, INPUTS]. inner: [tiles * TILE, PARTS * RANK]; it stays as it is
    beyond the rank of the tile's adapter.
    """
    tile = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS
    count, slot = tl.load(counts + tile), tl.load(slots + tile)
    if (count > 0) & (row % RANK < tl.load(ranks + slot)):
        token = tl.arange(0, TILE)
        is_there = token < count
        places = tl.load(order + tl.load(begins + tile) + token, is_there, other=0)
        rows = row + tl.arange(0, ROWS)
        of_tokens = x + places[:, None] * x_row
        of_rows = a + (slot * PARTS * RANK + rows)[None, :] * INPUTS
        total = tl.zeros((TILE, ROWS), tl.float32)
        for begin in range(0, INPUTS, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            inside = column < INPUTS
            values = tl.load(of_tokens + column[None, :], is_there[:, None] & inside[None, :], other=0.0)
            weight = tl.load(of_rows + column[:, None], inside[:, None], other=0.0)
            total = tl.dot(values, weight, total, input_precision="ieee")
        at = inner + (tile * TILE + token)[:, None] * (PARTS * RANK) + rows[None, :]
        tl.store(at, total.to(inner.dtype.element_ty))


@triton.jit
def expand(
    inner, b, out, order, begins, counts, slots, ranks,
    PARTS: tl.constexpr, RANK: tl.constexpr, FIRST_END: tl.constexpr, SECOND_END: tl.constexpr, OUTPUTS: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program adds up to BLOCK outputs of one part, for a tile of tokens. FIRST_END, SECOND_END: where the outputs of the first
    part end, and those of the second; OUTPUTS where there is none.

    inner: as `shrink` leaves it. b: [slots, RANK, OUTPUTS]. out: [tokens, OUTPUTS].
    """
    tile = tl.program_id(0).to(tl.int64)
    count, slot = tl.load(counts + tile), tl.load(slots + tile)
    if count > 0:
        block = tl.program_id(1)
        second: tl.constexpr = (FIRST_END + BLOCK - 1) // BLOCK
        third: tl.constexpr = second + (SECOND_END - FIRST_END + BLOCK - 1) // BLOCK
        part = (block >= second).to(tl.int32) + (block >= third).to(tl.int32)
        begin = tl.where(part == 0, 0, tl.where(part == 1, FIRST_END, SECOND_END))
        begin += (block - tl.where(part == 0, 0, tl.where(part == 1, second, third))) * BLOCK
        end = tl.where(part == 0, FIRST_END, tl.where(part == 1, SECOND_END, OUTPUTS))
        token, row, column = tl.arange(0, TILE), tl.arange(0, ROWS), begin + tl.arange(0, BLOCK)
        is_there, inside = token < count, column < end
        of_tile = inner + (tile * TILE + token)[:, None] * (PARTS * RANK) + (part * RANK + row)[None, :]
        of_slot = b + (slot * RANK + row)[:, None] * OUTPUTS + column[None, :]
        total = tl.zeros((TILE, BLOCK), tl.float32)
        for at in range(0, tl.load(ranks + slot).to(tl.int32), ROWS):
            weight = tl.load(of_slot + at * OUTPUTS, inside[None, :], other=0.0)
            total = tl.dot(tl.load(of_tile + at), weight, total, input_precision="ieee")
        places = tl.load(order + tl.load(begins + tile) + token, is_there, other=0)
        sums = out + places[:, None] * OUTPUTS + column[None, :]
        mask = is_there[:, None] & inside[None, :]
        _write(sums, tl.load(sums, mask, other=0.0).to(tl.float32) + total, mask)
