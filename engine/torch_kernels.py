"""The engine's small operations in plain torch: what every other implementation builds on, and the reference for it.

Owns their arithmetic, the filters and the noise of sampling, which is a hash of (seed, position, token), so that an answer does
not depend on its batch or on a resume, and the temperature below which there is none. Knows tensors only. The Triton
kernels in `gpu` and the C in `cpu` compute the same numbers.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ports import AdaptedTokens, Fp8Rows, HeadNorm, LowRankStack, PagePlaces, Rotation, Routing, RowSampling

GREEDY_BELOW = 1e-5
"""At a temperature below this, any difference between two logits is far larger than the noise."""
ONE = 2.0**40
"""The most likely token's share in whole numbers: sums over 2**20 tokens stay below 2**63."""
LOG_TERMS = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
LOG2_E = 1.44269504
LN2 = 0.693359375
"""log(2) to few digits, so that its product with an exponent is exact; LN2_REST is what is too much."""
LN2_REST = 2.12194440e-4
ROUNDS = 1.5 * 2.0**23
"""Adding it to a small float32 number rounds that to a whole number."""
_MASK = 0xFFFFFFFF


def token_noise(vocab_size: int, device: torch.device) -> Tensor:
    """The part of the noise that is the same in every step. [vocab] int64."""
    return _mix(torch.arange(vocab_size, device=device))


def gumbel(seed: Tensor, position: Tensor, of_tokens: Tensor) -> Tensor:
    """Gumbel noise by (seed, position, token): the largest logit plus noise is a sample. It is the same number on every device,
    because each operation is rounded to float32 on its own.

    It is -log(-log(u)) of u in (0, 1), exact to its tails because a number near 1 is kept as its distance to 1.

    seed, position: [rows] int64. of_tokens: as `token_noise` returns it. Returns [rows, vocab] float32.
    """
    key = _mix(_mix(seed & _MASK) ^ _mix((seed >> 32) & _MASK) * 3 & _MASK)
    key = _mix(key ^ _mix(position & _MASK))
    bits = _mix(of_tokens[None, :] ^ key[:, None])
    is_upper = bits > _MASK >> 1
    nearest = torch.where(is_upper, bits ^ _MASK, bits)  # of both ends of [0, 1]
    distance = (2 * nearest + 1).float() * 2.0**-33
    exponent, rest = _parts(distance)
    is_far = distance > 0.29289323  # 1 - sqrt(1/2)
    exponent = torch.where(is_upper, -1.0 * is_far, exponent)
    rest = torch.where(is_upper, torch.where(is_far, 1.0 - 2.0 * distance, -distance), rest)
    return -_logarithm(*_parts(-_logarithm(exponent, rest)))


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """(exponent, rest) with x = 2^exponent * (1 + rest) and 1 + rest from sqrt(1/2) to sqrt(2). x: float32, positive."""
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23
    return exponent.float(), (bits - (exponent << 23)).view(torch.float32) - 1.0


def _logarithm(exponent: Tensor, rest: Tensor) -> Tensor:
    """log(2^exponent * (1 + rest)) by the polynomial of Cephes' logf (Moshier), every operation rounded to float32."""
    square = rest * rest
    y = rest * LOG_TERMS[0]
    for term in LOG_TERMS[1:-1]:
        y = (y + term) * rest
    y = (y + LOG_TERMS[-1]) * rest * square
    y = (y - exponent * LN2_REST) - square * 0.5
    return (rest + y) + exponent * LN2


def exponential(x: Tensor) -> Tensor:
    """e^x for x of at most 0, by the polynomial of Cephes' expf (Moshier), every operation rounded to float32; 0 below -87."""
    inside = x.clamp(min=-87.0)
    whole = (inside * LOG2_E + ROUNDS) - ROUNDS
    rest = (inside - whole * LN2) + whole * LN2_REST
    y = rest * EXP_TERMS[0]
    for term in EXP_TERMS[1:-1]:
        y = (y + term) * rest
    y = ((y + EXP_TERMS[-1]) * (rest * rest) + rest) + 1.0
    return (y * ((whole.int() + 127) << 23).view(torch.float32)).masked_fill(x < -87.0, 0.0)


def kept(scaled: Tensor, rows: RowSampling) -> Tensor:
    """Which tokens the filters of each row leave, at least one. scaled: [rows, vocab] float32, the largest of a row is 0. Returns
    [rows, vocab] bool.

    Top-p counts probabilities in whole numbers, whose sums do not depend on the order in which they are summed. A nucleus ends
    with the token whose sum reaches top-p.
    """
    ordered, token_ids = scaled.sort(descending=True, stable=True)
    limit = torch.where(rows.top_k > 0, rows.top_k, scaled.shape[1])
    is_within = torch.arange(scaled.shape[1], device=scaled.device) < limit[:, None]
    share = (exponential(ordered) * ONE).long().masked_fill(~is_within, 0)
    total = share.cumsum(dim=-1)
    reached = (rows.top_p.double() * total[:, -1]).ceil().long().clamp(min=1)  # of none, one token stays all the same
    is_nucleus = (total - share < reached[:, None]) | (rows.top_p >= 1)[:, None]
    stays = is_within & is_nucleus & (ordered >= rows.min_logit[:, None])
    return torch.zeros_like(stays).scatter_(1, token_ids, stays)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit mixing function in int64 (lowbias32, https://nullprogram.com/blog/2018/07/31/)."""
    x = (x + 0x9E3779B9) & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


FP8_LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_ROW = 1e-30
"""A row whose largest number is below this is quantised as if it were this: nothing is divided by zero."""


class Kernels:
    """The small operations, each as torch computes it on any device; another implementation replaces those that it is faster in.

    Every method returns new tensors, of its input's dtype where nothing else is said. Norms are in float32 inside, as checkpoints
    are trained. No method waits for the device, and what a call starts there depends on shapes alone."""

    def __init__(self) -> None:
        self._token_noise: Tensor | None = None
        """The part of the noise that is the same in every step."""

    def decode_inputs(
        self, rows: Tensor, last_token: Tensor, length: Tensor, table: Tensor, page_size: int, null: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What some rows decode next, and where its KV goes: (token_ids, positions, pages, slots), all [n] int64. Their lengths
        grow by one, but for that of row `null`.

        rows: [n] int64, each once, but for `null`. last_token, length: [all rows] int64. table: [all rows, width] int32.
        """
        positions = length[rows]
        length[rows] = (positions + 1).masked_fill(rows == null, 0)
        return last_token[rows], positions, table[rows, positions // page_size].long(), positions % page_size

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """token_ids: [tokens] int64, each a row of table; with others it raises, or reads nothing. table: [rows, hidden]. Returns
        [tokens, hidden]."""
        return F.embedding(token_ids, table)

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
        """The rotation by the angles position * frequency. positions: [tokens] int64. frequencies: [rotary_dim / 2] float32.
        factor: multiplies cos and sin."""
        angles = positions[:, None].float() * frequencies
        if factor == 1.0:
            return Rotation(angles.cos(), angles.sin())
        return Rotation(angles.cos() * factor, angles.sin() * factor)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Zhang and Sennrich 2019. Returns the norm of x + residual, and x + residual; without a residual those of x.
        x, residual: [tokens, hidden]; weight: [hidden]."""
        total = x if residual is None else x + residual
        wide = total.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype), total

    def rms_norm_fp8(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Fp8Rows, Tensor]:
        """As `rms_norm`, and the norm is quantised: bit by bit what `quantise` makes of it."""
        normed, total = self.rms_norm(x, weight, eps, residual)
        return self.quantise(normed), total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """SwiGLU (Shazeer 2020). gate_up: [tokens, 2 * width], the gate first. Returns silu(gate) * up, [tokens, width]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def silu_and_mul_fp8(self, gate_up: Tensor) -> Fp8Rows:
        """As `silu_and_mul`, quantised: bit by bit what `quantise` makes of it."""
        return self.quantise(self.silu_and_mul(gate_up))

    def quantise(self, x: Tensor) -> Fp8Rows:
        """Each row in FP8 with a scale of its own, as large as it may be. x: [rows, width]."""
        wide = x.float()
        scale = wide.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_ROW) * (1.0 / FP8_LARGEST)
        return Fp8Rows(_fp8(wide / scale), scale)

    def quantise_int8(self, x: Tensor, largest: int) -> tuple[Tensor, Tensor]:
        """Each row in whole numbers from -largest to largest with a scale of its own. x: [rows, width]. largest: at most 127.

        Returns [rows, width] uint8, which are the numbers plus largest + 1, and [rows, 1] float32, the scales.
        """
        wide = x.float()
        scale = wide.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_ROW) * (1.0 / largest)
        return (wide / scale).round().add_(largest + 1).to(torch.uint8), scale

    def rotate_and_write(self, heads: Tensor, rotation: Rotation, norm: HeadNorm | None, places: PagePlaces) -> Tensor:
        """Norm and rotate queries and keys, and write keys and values to their pages, in the pages' dtype.

        heads: [tokens, heads + 2 * kv_heads, head_dim], queries first, then keys, then values. Returns the queries,
        [tokens, heads, head_dim].
        """
        kv_heads = places.keys.shape[1]
        query_heads = heads.shape[1] - 2 * kv_heads
        turning, value = heads.tensor_split([query_heads + kv_heads], dim=1)  # queries and keys together: half the operations
        if norm is not None:
            weight = torch.cat([norm.query.expand(query_heads, -1), norm.key.expand(kv_heads, -1)])
            turning, _ = self.rms_norm(turning, weight, norm.eps)
        query, key = _rotated(turning, rotation).tensor_split([query_heads], dim=1)
        write(places, key, value)
        return query

    def route(self, logits: Tensor, chosen: int, here: range, *, normalised: bool) -> Routing:
        """The experts of each token: those of the largest logits, of equal ones the first; their weights are what softmax makes
        of the logits in float32.

        logits: [tokens, experts]. chosen: how many compute a token. here: which of the experts are here. normalised: the weights
        of a token's experts are scaled to a sum of 1. A token with NaN gets some experts, each once.
        """
        experts = logits.sort(descending=True, stable=True).indices[:, :chosen]
        weights = logits.softmax(-1, dtype=torch.float32).gather(1, experts)
        if normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        of_pair, is_whole = experts.flatten(), len(here) == logits.shape[1]
        if not is_whole:
            of_pair = (of_pair - here.start) % logits.shape[1]
        of_pair, order = of_pair.sort(stable=True)
        ends = torch.searchsorted(of_pair, torch.arange(len(here), device=logits.device), right=True, out_int32=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=logits.device)
        return Routing(weights, order // chosen, places.view_as(experts), ends, is_whole)

    def combine(self, rows: Tensor, routing: Routing) -> Tensor:
        """The sum of what its experts made of each token, by their weights, in float32. rows: [pairs, width]; what is behind the
        last end may be anything. Returns [tokens, width]."""
        of_tokens = rows[routing.places]
        if not routing.is_whole:
            of_tokens = of_tokens.masked_fill((routing.places >= routing.ends[-1:])[..., None], 0.0)
        return (of_tokens * routing.weights[..., None]).sum(1).to(rows.dtype)

    def sample(self, logits: Tensor, rows: RowSampling | None = None) -> Tensor:
        """One token per row: the largest of (logits - the row's maximum) / temperature + `gumbel` among those `kept`, in float32;
        the largest logit if the row is greedy, or all are: None. Of equal ones the first.

        logits: [rows, vocab]; minus infinity excludes a token while another has more, and NaN is minus infinity. The vocabulary
        has at most 2**20 tokens. Returns [rows] int64. Here every row is sorted, also where none filters.
        """
        logits = logits.float().nan_to_num(-torch.inf, torch.inf, -torch.inf)
        first = logits.argmax(dim=-1)
        if rows is None:
            return first
        if self._token_noise is None or len(self._token_noise) != logits.shape[1]:
            self._token_noise = token_noise(logits.shape[1], logits.device)
        is_greedy = rows.temperature < GREEDY_BELOW
        largest = logits.gather(1, first[:, None])
        scaled = (logits - largest) / torch.where(is_greedy, 1.0, rows.temperature)[:, None]
        scaled = scaled.masked_fill(logits == largest, 0.0)  # infinity minus itself is no number
        noisy = scaled + gumbel(rows.seed, rows.position, self._token_noise)
        return torch.where(is_greedy, first, noisy.masked_fill(~kept(scaled, rows), -torch.inf).argmax(dim=-1))

    def add_low_rank(self, out: Tensor, x: Tensor, stack: LowRankStack, tokens: AdaptedTokens) -> None:
        """Add to a layer's outputs what the tokens' adapters add, in the stack's dtype. Others stay as they are, bit by bit.

        out: [tokens, outputs], contiguous. x: [tokens, inputs]. Here all adapters compute all tokens, and a mask keeps of each
        what is its own: so nothing depends on which token has which adapter, but it takes as often as many products.
        """
        count, parts, rank, inputs = stack.a.shape
        inner = F.linear(x.to(stack.a.dtype), stack.a.view(-1, inputs)).view(-1, count, parts, rank)
        others = tokens.slots[:, None] != torch.arange(count, device=x.device)
        inner = inner.masked_fill(others[:, :, None, None], 0.0)
        for part, (begin, end) in enumerate(itertools.pairwise((0, *stack.ends))):
            added = inner[:, :, part].flatten(1) @ stack.b[:, :, begin:end].flatten(0, 1)
            out[:, begin:end].add_(added.to(out.dtype))

    def page_indices(self, table: Tensor, rows: Tensor, indptr: Tensor, out: Tensor) -> None:
        """The pages of some rows, one row after the other: out[indptr[i] : indptr[i + 1]] = the first of table[rows[i]].

        table: [all rows, width] int32. rows: [n] int64. indptr: [n + 1] int32, rising from 0; no difference is above width.
        out: [at least indptr[n]] int32, contiguous; what lies beyond stays as it is.
        """
        if len(rows) == 0:
            return
        at = torch.arange(len(out), dtype=indptr.dtype, device=out.device)
        entry = torch.searchsorted(indptr[1:], at, right=True)
        within = entry < len(rows)
        entry = entry.clamp(max=len(rows) - 1)
        column = (at - indptr[entry]).clamp(max=table.shape[1] - 1)
        out.copy_(torch.where(within, table[rows[entry], column], out))


def write(places: PagePlaces, key: Tensor, value: Tensor) -> None:
    """Put each token's KV in its page and slot, in the pages' dtype. key, value: [tokens, kv_heads, head_dim]. FP8 saturates."""
    for pages, x in ((places.keys, key), (places.values, value)):
        if pages.dtype == torch.float8_e4m3fn:  # as bytes, because not every version of torch can index FP8
            pages, x = pages.view(torch.uint8), _fp8(x).view(torch.uint8)
        pages[places.pages, :, places.slots] = x.to(pages.dtype)


def rows_of(x: Tensor) -> Tensor:
    """x itself where the elements of a row lie side by side, however far the rows are apart, as kernels read them; else a
    copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _fp8(x: Tensor) -> Tensor:
    """x in FP8, saturated: the conversion of some versions of torch makes NaN of what is too large."""
    return x.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)


def _rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """x: [tokens, heads, head_dim]. Eq. 34 of Su et al. 2021, halves paired."""
    half = rotation.cos.shape[-1]
    cos, sin = rotation.cos.to(x.dtype)[:, None], rotation.sin.to(x.dtype)[:, None]
    first, second, rest = x.tensor_split([half, 2 * half], dim=-1)
    turned = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    return torch.cat([*turned, rest], dim=-1)
