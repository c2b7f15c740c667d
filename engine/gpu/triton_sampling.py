"""The Triton source of sampling: filters, noise and the draw of a token. See `triton_source`, which has these kernels too.

Owns the order in which a row's logits are read. The numbers are those of `torch_kernels`.
"""

import triton
import triton.language as tl

from engine import torch_kernels

_LOG_TERMS, _EXP_TERMS = tl.constexpr(torch_kernels.LOG_TERMS), tl.constexpr(torch_kernels.EXP_TERMS)
_LOG2_E, _LN2, _LN2_REST = (tl.constexpr(each) for each in (torch_kernels.LOG2_E, torch_kernels.LN2, torch_kernels.LN2_REST))
_ROUNDS, _ONE = tl.constexpr(torch_kernels.ROUNDS), tl.constexpr(torch_kernels.ONE)
_ID_BITS = tl.constexpr(21)
"""Those of a token in its place."""
_ALL = tl.constexpr(2**62)
"""More than any place, number of tokens or mass."""
_GREEDY_BELOW = tl.constexpr(torch_kernels.GREEDY_BELOW)


@triton.jit(do_not_specialize_on_alignment=["maxima", "firsts"])
def slice_maxima(logits, maxima, firsts, logits_row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of BLOCK tokens of a row, and the first token that has it. maxima, firsts: [rows, slices].

    NaN counts as minus infinity. The first token of a slice is in the vocabulary, and the first of equal ones wins: so every
    token that is found is in the vocabulary.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * logits_row + token, token < VOCAB, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, values, float("-inf"))
    largest, at = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    place = row * tl.num_programs(1) + part
    tl.store(maxima + place, largest)
    tl.store(firsts + place, part * BLOCK + at)


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "maxima", "counts", "masses"])
def slice_sums(
    logits, temperature, top_k, top_p, maxima, counts, masses, logits_row,
    VOCAB: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SLICES: tl.constexpr, BOUNDS: tl.constexpr,
):  # fmt: skip
    """For a row with top-k or top-p: how many of BLOCK tokens lie ahead of each of BOUNDS bounds, and their probabilities in
    whole numbers. counts, masses: [rows, BOUNDS, slices]."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    if (heat >= _GREEDY_BELOW) & ((tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1.0)):
        largest = _largest(maxima + row * SLICES, SLICES, BLOCK_SLICES)
        token = part * BLOCK + tl.arange(0, BLOCK)
        scaled = _scaled(logits + row * logits_row, token, VOCAB, largest, heat)
        key, share = _key(scaled), tl.where(token < VOCAB, _share(scaled), 0)
        for bound in range(BOUNDS):
            is_ahead = (key < _bound(bound, BOUNDS)) & (token < VOCAB)
            place = (row * BOUNDS + bound) * SLICES + part
            tl.store(counts + place, tl.sum(is_ahead.to(tl.int32), 0))
            tl.store(masses + place, tl.sum(tl.where(is_ahead, share, 0), 0))


@triton.jit(
    do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_logit", "maxima", "counts", "masses", "last", "totals"]
)
def last_places(
    logits, temperature, top_k, top_p, min_logit, maxima, counts, masses, places, last, totals, logits_row,
    VOCAB: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SLICES: tl.constexpr, BOUNDS: tl.constexpr,
    FOUND: tl.constexpr, WAYS: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """The last place that a row's filters leave: its tokens up to there stay. First by top-k and min-p, with the mass up to there
    in `totals`; then BY_MASS: by top-p of it. places: [rows, VOCAB], for the program's own use.

    A token's place is its logit's key with the token in the bits below: the order of falling logits and, where those are equal,
    of rising ids.
    """
    row = tl.program_id(0).to(tl.int64)
    heat, most, share = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    if BY_MASS:
        end = tl.load(last + row)
    else:
        end = (_key(tl.load(min_logit + row)).to(tl.int64) + 1 << _ID_BITS) - 1
    if (heat >= _GREEDY_BELOW) & ((share < 1.0) if BY_MASS else ((most > 0) | (share < 1.0))):
        bound, part = tl.arange(0, BOUNDS)[:, None], tl.arange(0, BLOCK_SLICES)[None, :]
        at = (row * BOUNDS + bound) * SLICES + part
        mass = tl.sum(tl.load(masses + at, part < SLICES, other=0), 1)
        total = tl.max(mass, 0)
        if BY_MASS | (most > 0):
            count = tl.sum(tl.load(counts + at, part < SLICES, other=0), 1)
            reached = most.to(tl.int64) * 0 + _ALL
            if BY_MASS:
                most = reached
                reached = tl.ceil(share.to(tl.float64) * tl.load(totals + row).to(tl.float64)).to(tl.int64)
                reached = tl.maximum(reached, 1)  # of none, one token stays all the same
            largest = _largest(maxima + row * SLICES, SLICES, BLOCK_SLICES)
            found, total = _last_place(
                logits + row * logits_row, heat, largest, count, mass, most, reached, places + row * VOCAB,
                VOCAB, BLOCK, BOUNDS, FOUND, WAYS,
            )  # fmt: skip
            end = tl.minimum(end, found)
        tl.store(totals + row, total)
    tl.store(last + row, end)


@triton.jit
def _last_place(
    logits, heat, largest, count, mass, most, reached, places,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BOUNDS: tl.constexpr, FOUND: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """The last place with fewer than `most` tokens ahead of it, and less mass than `reached`; and the mass up to there.

    count, mass: [BOUNDS], the sums ahead of each bound. The tokens between two bounds are collected, and the place is found among
    them, in a range that shrinks to one of WAYS parts each time.
    """
    is_before = (count < most) & (mass < reached)
    passed = tl.sum(is_before.to(tl.int32), 0)
    count_before = tl.max(tl.where(is_before, count, 0), 0)
    mass_before = tl.max(tl.where(is_before, mass, 0), 0)
    low, high = tl.where(passed > 0, _bound(passed - 1, BOUNDS), 0), _bound(tl.minimum(passed, BOUNDS - 1), BOUNDS)
    begin, end = low.to(tl.int64) << _ID_BITS, high.to(tl.int64) << _ID_BITS
    found = 0
    if passed == BOUNDS:
        begin = end - 1
        end = begin
    else:
        tl.debug_barrier()  # what was collected before has been read
        for first in range(0, VOCAB, BLOCK):
            token = first + tl.arange(0, BLOCK)
            key = _key(_scaled(logits, token, VOCAB, largest, heat))
            is_inside = (key >= low) & (key < high) & (token < VOCAB)
            more = tl.sum(is_inside.to(tl.int32), 0)
            if more > 0:
                at = found + tl.cumsum(is_inside.to(tl.int32), 0) - 1
                tl.store(places + at, (key.to(tl.int64) << _ID_BITS) + token, is_inside)
            found += more
        tl.debug_barrier()  # each thread reads what others have collected
    total = mass_before
    while end - begin > 1:
        step = (end - begin + WAYS - 1) // WAYS
        starts = begin + step * tl.arange(0, WAYS)
        counts, masses = tl.zeros((WAYS,), tl.int32) + count_before, tl.zeros((WAYS,), tl.int64) + mass_before
        for first in range(0, found, FOUND):
            at = first + tl.arange(0, FOUND)
            place = tl.load(places + at, at < found, other=_ALL)
            share = _share(-(place >> _ID_BITS).to(tl.int32).to(tl.float32, bitcast=True))
            is_ahead = place[:, None] < starts[None, :]
            counts += tl.sum(is_ahead.to(tl.int32), 0)
            masses += tl.sum(tl.where(is_ahead, share[:, None], 0), 0)
        is_within = (counts < most) & (masses < reached) & (starts < end)
        begin += step * (tl.sum(is_within.to(tl.int32), 0) - 1)
        end = tl.minimum(begin + step, end)
        total = tl.max(tl.where(is_within, masses, 0), 0)
    return begin, total + _share(-(begin >> _ID_BITS).to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def _bound(number, BOUNDS: tl.constexpr):
    """Keys that divide a row's tokens: those of -2^-6, and further numbers in ratios of about 1.7; all lie ahead of the last."""
    return tl.where(number == BOUNDS - 1, 0x7F800001, (121 << 23) + number * (3 << 21))


@triton.jit
def _largest(maxima, SLICES: tl.constexpr, BLOCK_SLICES: tl.constexpr):
    among = tl.arange(0, BLOCK_SLICES)
    return tl.max(tl.load(maxima + among, among < SLICES, other=float("-inf")), 0)


@triton.jit
def _scaled(logits, token, VOCAB: tl.constexpr, largest, heat):
    """Equal ones apart: infinity minus itself is no number. div_rn rounds as torch does, `/` does not. NaN is minus infinity."""
    values = tl.load(logits + token, token < VOCAB, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, values, float("-inf"))
    return tl.where(values == largest, 0.0, tl.div_rn(values - largest, tl.zeros_like(values) + heat))


@triton.jit
def _key(scaled):
    """A whole number that rises as a scaled logit, which is at most 0, falls."""
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _share(scaled):
    """As in `torch_kernels.kept`: e^scaled in whole numbers, int64. Options must keep products and sums apart."""
    inside = tl.maximum(scaled, -87.0)
    whole = (inside * _LOG2_E + _ROUNDS) - _ROUNDS
    rest = (inside - whole * _LN2) + whole * _LN2_REST
    y = rest * _EXP_TERMS[0]
    for term in tl.static_range(1, 5):
        y = (y + _EXP_TERMS[term]) * rest
    y = ((y + _EXP_TERMS[5]) * (rest * rest) + rest) + 1.0
    y = y * ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return (tl.where(scaled < -87.0, 0.0, y) * _ONE).to(tl.int64)


@triton.jit(do_not_specialize_on_alignment=["temperature", "seed", "position", "maxima", "firsts", "last", "best", "tokens"])
def slice_samples(
    logits, temperature, seed, position, maxima, firsts, last, best, tokens, logits_row,
    VOCAB: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SLICES: tl.constexpr,
):  # fmt: skip
    """The largest noisy logit among those of BLOCK tokens of a row that stay, and its token; of a greedy row, what `slice_maxima`
    found. A slice in which no token can win computes no logarithm.

    noise is -log(-log(u)) <= -log(1 - u), and log(x) >= log(2) * (x's bits as a number / 2^23 - 127), because the mantissa's
    logarithm is concave. 1e-3 is far above the roundings.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * SLICES + part
    heat = tl.load(temperature + row)
    among = tl.arange(0, BLOCK_SLICES)
    each = tl.load(maxima + row * SLICES + among, among < SLICES, other=float("-inf"))
    largest, of = tl.max(each, 0, return_indices=True, return_indices_tie_break_left=True)
    most, token_found = tl.load(maxima + place), tl.load(firsts + place)
    if heat >= _GREEDY_BELOW:
        key = _noise_key(tl.load(seed + row), tl.load(position + row))
        token = part * BLOCK + tl.arange(0, BLOCK)
        scaled = _scaled(logits + row * logits_row, token, VOCAB, largest, heat)
        bits = _mix(_mix(token.to(tl.uint32)) ^ key)
        beyond = ((bits ^ 0xFFFFFFFF) >> 8).to(tl.int32).to(tl.float32) * 256.0 + 0.5  # at most 2^32 * (1 - u)
        bound = scaled + (0x4F800000 - beyond.to(tl.int32, bitcast=True)).to(tl.float32) * (0.69314718 / 8388608.0) + 1e-3
        first = tl.load(firsts + row * SLICES + of) + tl.zeros((1,), tl.int32)
        least = tl.max(_gumbel(_mix(_mix(first.to(tl.uint32)) ^ key)), 0)  # the likeliest token's: it always stays
        most, at = float("-inf"), 0
        if tl.max(tl.where(token < VOCAB, bound, float("-inf")), 0) >= least:
            stays = ((_key(scaled).to(tl.int64) << _ID_BITS) + token <= tl.load(last + row)) & (token < VOCAB)
            noisy = tl.where(stays, scaled + _gumbel(bits), float("-inf"))
            most, at = tl.max(noisy, 0, return_indices=True, return_indices_tie_break_left=True)
        token_found = part * BLOCK + at
    tl.store(best + place, most)
    tl.store(tokens + place, token_found)


@triton.jit(do_not_specialize_on_alignment=["best", "tokens"])
def best_of_slices(best, tokens, out, SLICES: tl.constexpr, BLOCK_SLICES: tl.constexpr):
    """The token of the best slice of a row, the first of equal ones."""
    row = tl.program_id(0).to(tl.int64)
    among = tl.arange(0, BLOCK_SLICES)
    values = tl.load(best + row * SLICES + among, among < SLICES, other=float("-inf"))
    _, at = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out + row, tl.load(tokens + row * SLICES + at).to(tl.int64))


@triton.jit
def _gumbel(bits):
    """As `torch_kernels.gumbel`, from uint32. Options must keep products and sums apart."""
    is_upper = bits > 0x7FFFFFFF
    distance = (2 * tl.where(is_upper, bits ^ 0xFFFFFFFF, bits) + 1).to(tl.float32) * (1.0 / 8589934592.0)
    exponent, rest = _parts(distance)
    is_far = distance > 0.29289323
    exponent = tl.where(is_upper, tl.where(is_far, -1.0, 0.0), exponent)
    rest = tl.where(is_upper, tl.where(is_far, 1.0 - 2.0 * distance, -distance), rest)
    exponent, rest = _parts(-_logarithm(exponent, rest))
    return -_logarithm(exponent, rest)


@triton.jit
def _parts(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    return exponent.to(tl.float32), (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _logarithm(exponent, rest):
    square = rest * rest
    y = rest * _LOG_TERMS[0]
    for term in tl.static_range(1, 8):
        y = (y + _LOG_TERMS[term]) * rest
    y = (y + _LOG_TERMS[8]) * rest * square
    y = (y - exponent * _LN2_REST) - square * 0.5
    return (rest + y) + exponent * _LN2


@triton.jit
def _noise_key(seed, position):
    """What `torch_kernels.gumbel` makes of them, as a block. seed, position: int64 scalars."""
    zero = tl.zeros((1,), tl.uint32)  # Triton computes with blocks
    key = _mix(zero + (seed & 0xFFFFFFFF).to(tl.uint32)) ^ (_mix(zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)) * 3)
    return _mix(_mix(key) ^ _mix(zero + (position & 0xFFFFFFFF).to(tl.uint32)))


@triton.jit
def _mix(x):
    """lowbias32, as in `torch_kernels`. x: uint32, which wraps."""
    x += 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
