"""The contract of `Kernels`, run against every implementation: in plain torch, in Triton's interpreter, and on a card.

Owns the references: float64 for what is rounded, numpy for the noise, and plain indexing for pages. Each `check_` takes an
implementation and sizes, so that the tests on a card add real shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.pages.layout import PageOrder
from engine.lora.adapter_slots import tiles_of
from engine.ports import AdaptedTokens, HeadNorm, LowRankStack, PagePlaces, Rotation, RowSampling
from engine.torch_kernels import GREEDY_BELOW, Kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-6
FP8 = torch.float8_e4m3fn
STEEPNESS = np.array([0.01, 1, 4, 40], dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Subject:
    """An implementation, the device that it runs on, and the dtype of its inputs."""

    kernels: Kernels
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32

    def draw(self, *shape: int) -> Tensor:
        """The same numbers on every device, in every other row of a larger tensor: rows need not be neighbours."""
        wide = torch.randn(2 * shape[0], *shape[1:], generator=torch.Generator().manual_seed(sum(shape)))
        return wide.to(device=self.device, dtype=self.dtype)[::2]


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """half: of the part of a head that is rotated."""

    query_heads: int
    kv_heads: int
    dim: int
    half: int


def check_decode_inputs(subject: Subject, page_size: int) -> None:
    """By plain indexing on the host. The null row, which is there twice, stays empty."""
    random = np.random.default_rng(page_size)
    rows, null = np.array([5, 0, 9, 2, 9]), 9
    length, last_token = random.integers(0, 6 * page_size, 10), random.integers(0, 1000, 10)
    length[null] = 0
    table = random.permutation(60).reshape(10, 6).astype(np.int32)
    given, tokens, lengths, pages = (torch.from_numpy(x.copy()).to(subject.device) for x in (rows, last_token, length, table))
    found = subject.kernels.decode_inputs(given, tokens, lengths, pages, page_size, null)
    at = length[rows]
    expected = last_token[rows], at, table[rows, at // page_size], at % page_size
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == torch.int64 and got.tolist() == wanted.tolist()
    length[rows] += 1
    length[null] = 0
    assert lengths.tolist() == length.tolist() and tokens.tolist() == last_token.tolist()


def check_embedding(subject: Subject, rows: int, hidden: int) -> None:
    table = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(rows)).to(subject.device, subject.dtype)
    token_ids = torch.tensor([rows - 1, 0, 3, 3, 1] * 7, device=subject.device)[::2]
    assert torch.equal(subject.kernels.embed(token_ids, table), torch.stack([table[at] for at in token_ids.tolist()]))


def check_angles(subject: Subject, half: int, factor: float) -> None:
    """In float64 of the angle in float32, which transformers computes."""
    positions = torch.tensor([0, 1, 17, 4095, 131_071, 1_000_003])
    frequencies = 1.0 / 10_000.0 ** (torch.arange(half) / half)
    found = subject.kernels.rotation(positions.to(subject.device), frequencies.to(subject.device), factor)
    angles = (positions[:, None].float() * frequencies).double()
    for got, wanted in ((found.cos, angles.cos()), (found.sin, angles.sin())):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.cpu().double(), wanted * factor, atol=1e-6 * factor, rtol=0)


def check_norms(subject: Subject, tokens: int, hidden: int) -> None:
    x, residual = subject.draw(tokens, hidden), subject.draw(tokens, hidden).flip(0)
    weight = 1 + subject.draw(1, hidden)[0] / 4
    assert_rounded(subject, subject.kernels.rms_norm(x, weight, EPS)[0], exact_norm(x, weight))
    normed, total = subject.kernels.rms_norm(x, weight, EPS, residual)
    assert torch.equal(total, x + residual)
    assert_rounded(subject, normed, exact_norm(x + residual, weight))


def check_activation(subject: Subject, tokens: int, width: int) -> None:
    gate_up = subject.draw(tokens, 2 * width) * 3
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_rounded(subject, subject.kernels.silu_and_mul(gate_up), gate * torch.sigmoid(gate) * up)


def check_quantised(subject: Subject, rows: int, width: int) -> None:
    """Bit by bit: a row's largest number becomes FP8's largest, and the others the nearest of FP8's numbers."""
    x = subject.draw(rows, width) * torch.logspace(-30, 4, rows, device=subject.device)[:, None]
    x[0] = 0
    x = x.to(subject.dtype)
    values, scales = subject.kernels.quantise(x)
    assert values.dtype == FP8 and scales.dtype == torch.float32
    wide = x.float().cpu().numpy()
    expected = np.maximum(np.abs(wide).max(axis=1, keepdims=True), np.float32(1e-30)) * np.float32(1 / 448)
    np.testing.assert_array_equal(scales.cpu().numpy(), expected)
    np.testing.assert_array_equal(values.float().cpu().numpy(), exact_fp8(wide / expected))


def check_fused_fp8(subject: Subject, rows: int, width: int) -> None:
    """Bit by bit what `quantise` makes of what the operation without it gives; in float32 to the last bits, where a compiler may
    round a product and a sum once in one kernel and twice in the other. Half precision hides that.
    """
    kernels, x, residual = subject.kernels, subject.draw(rows, 2 * width) * 3, subject.draw(rows, 2 * width).flip(0)
    weight = 1 + subject.draw(1, 2 * width)[0] / 4
    x[0] = 0
    (normed, same), (plain, _) = kernels.rms_norm_fp8(x, weight, EPS), kernels.rms_norm(x, weight, EPS)
    added, total = kernels.rms_norm_fp8(x, weight, EPS, residual)
    plain_added, plain_total = kernels.rms_norm(x, weight, EPS, residual)
    assert same is x and torch.equal(total, plain_total)
    activated, plain_activated = kernels.silu_and_mul_fp8(x), kernels.silu_and_mul(x)
    for found, given in ((normed, plain), (added, plain_added), (activated, plain_activated)):
        expected = kernels.quantise(given)
        assert found.values.dtype == FP8
        codes, expected_codes = found.values.view(torch.uint8).int(), expected.values.view(torch.uint8).int()
        if subject.dtype == torch.float32:
            torch.testing.assert_close(found.scales, expected.scales, rtol=1e-6, atol=0)
            assert (codes - expected_codes).abs().max() <= 1
        else:
            assert torch.equal(found.scales, expected.scales) and torch.equal(codes, expected_codes)


def check_routing(subject: Subject, tokens: int, experts: int, chosen: int, here: range, *, normalised: bool) -> None:
    """Against float64 and a sort on the host, with ties of the largest too. Then each token's sum over its experts."""
    logits = (subject.draw(tokens, experts) * 4).round() / 2
    found = subject.kernels.route(logits, chosen, here, normalised=normalised)
    exact = logits.cpu().double()
    scores = exact.softmax(-1)
    best = [sorted(range(experts), key=lambda expert: (-float(row[expert]), expert))[:chosen] for row in exact]
    weights = torch.stack([score[list(which)] for score, which in zip(scores, best, strict=True)])
    if normalised:
        weights /= weights.sum(-1, keepdim=True)
    assert found.weights.dtype == torch.float32
    torch.testing.assert_close(found.weights.cpu().double(), weights, rtol=1e-5, atol=1e-9)
    pairs = [(token, expert) for token, which in enumerate(best) for expert in which]
    ordered = sorted(pairs, key=lambda pair: ((pair[1] - here.start) % experts, pair[0]))
    assert found.tokens.dtype == torch.int64 and found.tokens.tolist() == [token for token, _ in ordered]
    assert found.places.tolist() == [[ordered.index((token, expert)) for expert in which] for token, which in enumerate(best)]
    counts = np.cumsum([sum(expert == one for _, expert in pairs) for one in here])
    assert found.ends.dtype == torch.int32 and found.ends.tolist() == counts.tolist()
    rows = subject.draw(tokens * chosen, 70)
    rows[int(counts[-1]) :] = torch.nan  # of experts elsewhere
    of_tokens = rows.cpu().double().nan_to_num()[found.places.cpu()]
    assert_rounded(subject, subject.kernels.combine(rows, found), (of_tokens * weights[..., None]).sum(1))


def check_broken_routing(subject: Subject) -> None:
    """Every token gets different experts, whatever its logits are, and the tokens beside it get their own."""
    logits = torch.arange(5.0).repeat(5, 1)
    logits[0], logits[1, :3], logits[2], logits[3, 1] = torch.nan, torch.nan, -torch.inf, torch.inf
    found = subject.kernels.route(logits.to(subject.device), 4, range(5), normalised=True)
    assert sorted(found.places.flatten().tolist()) == list(range(20))
    assert all(count <= 5 for count in torch.diff(found.ends).tolist())
    of_last = [int((found.ends.cpu() <= place).sum()) for place in found.places[4].tolist()]
    assert of_last == [4, 3, 2, 1] and found.weights[4].isfinite().all()


def check_int8(subject: Subject, rows: int, width: int, largest: int) -> None:
    """A row's largest number becomes the largest one, and the others are within half a step. All are moved to be positive."""
    x = subject.draw(rows, width) * torch.logspace(-6, 3, rows, device=subject.device)[:, None]
    x[-1] = 0
    x = x.to(subject.dtype)
    moved, scales = subject.kernels.quantise_int8(x, largest)
    assert moved.dtype == torch.uint8 and scales.dtype == torch.float32
    values = moved.int() - largest - 1
    assert (values[:-1].abs().amax(1) == largest).all() and (values[-1] == 0).all()
    steps = x[:-1].double() / scales[:-1].double()
    torch.testing.assert_close(values[:-1].double(), steps, rtol=0, atol=0.5001)
    torch.testing.assert_close(scales[:-1, 0], x[:-1].float().abs().amax(1) / largest)


def check_rotation(
    subject: Subject, tokens: int, sizes: HeadSizes, *, norm: bool, page_dtype: torch.dtype, order: PageOrder = "layer"
) -> None:
    """Queries and keys against float64, values bit by bit, and every other slot of the pool as it was."""
    heads = subject.draw(tokens, sizes.query_heads + 2 * sizes.kv_heads + 1, sizes.dim)[:, 1:]
    heads[0] *= 1000  # beyond the largest FP8 number
    angles = 3 * torch.rand(tokens, sizes.half, device=subject.device)
    rotation = Rotation(angles.cos(), angles.sin())
    weights = 1 + subject.draw(2, sizes.dim) / 4
    page_size, pages = 4, tokens // 4 + 3
    pool = _pool(order, pages, sizes.kv_heads, page_size, sizes.dim).to(page_dtype)
    places = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(tokens))[:tokens]
    page, slot = places // page_size, places % page_size
    on_device = pool.to(subject.device, copy=True)

    queries = subject.kernels.rotate_and_write(
        heads,
        rotation,
        HeadNorm(weights[0], weights[1], EPS) if norm else None,
        PagePlaces(*_views(on_device, order), page.to(subject.device), slot.to(subject.device)),
    )

    query, key, value = torch.split(heads, [sizes.query_heads, sizes.kv_heads, sizes.kv_heads], dim=1)
    exact_query, exact_key = query.double(), key.double()
    if norm:
        exact_query, exact_key = exact_norm(query, weights[0]), exact_norm(key, weights[1])
    assert_rounded(subject, queries, exact_rotation(exact_query, rotation))
    keys, values = _views(on_device.cpu().float(), order)
    largest = float(torch.finfo(page_dtype).max)
    expected = exact_rotation(exact_key, rotation).clamp(-largest, largest)
    _assert_close(keys[page, :, slot], expected, _room(subject.dtype) + torch.finfo(page_dtype).eps)
    assert torch.equal(values[page, :, slot], value.cpu().float().clamp(-largest, largest).to(page_dtype).float())
    untouched = torch.ones(pages, page_size, dtype=torch.bool)
    untouched[page, slot] = False
    for now, before in zip((keys, values), _views(pool.float(), order), strict=True):
        assert torch.equal(now.transpose(1, 2)[untouched], before.transpose(1, 2)[untouched])
    everything = torch.ones_like(pool, dtype=torch.bool)
    for view in _views(everything, order):
        view.fill_(False)
    assert torch.equal(on_device.cpu().float()[everything], pool.float()[everything]), "another layer's KV was written"


def random_rows(generator: np.random.Generator, rows: int, vocab: int) -> tuple[np.ndarray, RowSampling]:
    """Logits, flat and steep, with ties, infinities and what is no number, and rows with any filters, on the host."""
    logits = generator.normal(size=(rows, vocab)).astype(np.float32) * generator.choice(STEEPNESS, (rows, 1))
    logits = np.where(generator.random((rows, 1)) < 0.6, np.round(logits * 2) / 2, logits)
    for number, often in ((-np.inf, 0.3), (np.nan, 0.1), (np.inf, 0.05)):
        logits[(generator.random((rows, vocab)) < often) & (generator.random((rows, 1)) < 0.2)] = number
    logits[generator.random(rows) < 0.05] = logits[0, 0]
    top_k = np.where(
        generator.random(rows) < 0.3, generator.integers(1, 2 * vocab + 1, rows), generator.choice([0, 0, 1, 2, 40], rows)
    )
    top_p = np.where(
        generator.random(rows) < 0.3, generator.random(rows), generator.choice([1, 1, 2, 0, 0.25, 0.5, 0.9, 0.999], rows)
    )
    min_p = generator.choice([0, 0, 1e-30, 0.001, 0.05, 0.5, 1], rows)
    with np.errstate(divide="ignore"):
        shares = (generator.choice([0, 1e-6, 1e-5, 0.3, 1, 1, 2, 30], rows), top_p, np.log(min_p))
    temperature, nucleus, min_logit = (torch.from_numpy(each).float() for each in shares)
    seed = generator.integers(-(2**63), 2**63, size=rows, dtype=np.int64)
    position = generator.integers(0, 2**33, size=rows, dtype=np.int64)
    return logits, RowSampling(
        temperature,
        torch.from_numpy(top_k.astype(np.int64)),
        nucleus,
        min_logit,
        torch.from_numpy(seed),
        torch.from_numpy(position),
    )


def check_samples(subject: Subject, rows: int, vocab: int, seed: int = 0) -> None:
    """Tokens against the definition in numpy and float64, token for token: see `random_rows`."""
    logits, sampling = random_rows(np.random.default_rng(seed), rows, vocab)
    in_dtype = torch.from_numpy(logits).to(subject.device, subject.dtype)
    logits = in_dtype.cpu().float().numpy()
    tokens = subject.kernels.sample(in_dtype, RowSampling(*(each.to(subject.device) for each in sampling)))
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == exact_samples(logits, sampling).tolist()
    logits = np.nan_to_num(logits, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    assert subject.kernels.sample(in_dtype).tolist() == logits.argmax(axis=1).tolist()


def check_broken_logits(subject: Subject, vocab: int) -> None:
    """Rows with NaN or infinities get a token of the vocabulary, and the rows beside them their own."""
    for temperature, width in ((0.0, 60), (1.0, vocab)):
        logits = torch.zeros(6, width)
        logits[0] = torch.nan
        logits[1, ::2] = torch.nan
        logits[2] = -torch.inf
        logits[3, 5] = torch.inf
        logits[4:, 7] = 1e4
        none, of_all = torch.arange(6), torch.ones(6)
        rows = RowSampling(temperature * of_all, 0 * none, of_all, -torch.inf * of_all, none, none)
        given = RowSampling(*(each.to(subject.device) for each in rows))
        tokens = subject.kernels.sample(logits.to(subject.device), given).tolist()
        assert all(0 <= token < width for token in tokens)
        assert tokens[3:] == [5, 7, 7]


def check_low_rank(subject: Subject, slots: list[int], inputs: int, widths: list[int], ranks: list[int], spare: int = 0) -> None:
    """slots: of each token. widths: outputs of each part. ranks: of each adapter. spare: tiles that only fill a batch. Against
    float64, and tokens without an adapter bit by bit."""
    rank = 16 * -(-max(ranks) // 16)
    own = (torch.arange(rank) < torch.tensor(ranks)[:, None]).to(subject.device)
    a = subject.draw(len(ranks), len(widths), rank, inputs) * own[:, None, :, None] / inputs**0.5
    b = subject.draw(len(ranks), rank, sum(widths)) * own[:, :, None]
    ends = np.cumsum(widths).tolist()
    part_ends, of_adapters = (torch.tensor(each, device=subject.device) for each in (ends, ranks))
    stack = LowRankStack(a.contiguous(), b.contiguous(), of_adapters, tuple(ends), part_ends)
    x, given = subject.draw(len(slots), inputs), subject.draw(len(slots), sum(widths)).contiguous()
    arrays = tiles_of(np.array(slots))
    padded = [np.pad(each, (0, spare)) for each in arrays[2:]]
    tokens = AdaptedTokens(*(torch.from_numpy(each).to(subject.device) for each in (*arrays[:2], *padded)))
    out = given.clone()
    subject.kernels.add_low_rank(out, x, stack, tokens)
    expected = given.cpu().double()
    for token, slot in enumerate(slots):
        for part, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if slot >= 0:
                inner = a[slot, part].cpu().double() @ x[token].cpu().double()
                expected[token, begin:end] += inner @ b[slot, :, begin:end].cpu().double()
    _assert_close(out, expected, 4 * _room(subject.dtype))
    without = torch.tensor(slots) < 0
    assert out.dtype == subject.dtype and torch.equal(out.cpu()[without], given.cpu()[without])
    assert torch.equal(out, given) == without.all()


def check_page_indices(subject: Subject, counts: list[int], width: int, spare: int) -> None:
    """counts: pages of each row. spare: entries of `out` beyond the last row's."""
    table = torch.randint(0, 10**6, (len(counts) + 2, width + 1), dtype=torch.int32)[:, :width]
    rows = torch.randperm(len(counts) + 2)[: len(counts)]
    indptr = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    out = torch.full((sum(counts) + spare,), -5, dtype=torch.int32)
    parts = [table[row, :count] for row, count in zip(rows.tolist(), counts, strict=True)]
    expected = torch.cat([*parts, out[:spare]])
    on_device = out.to(subject.device)
    device = subject.device
    subject.kernels.page_indices(table.to(device), rows.to(device), indptr.to(device), on_device)
    assert torch.equal(on_device.cpu(), expected)


def exact_fp8(x: np.ndarray) -> np.ndarray:
    """The nearest numbers of four binary digits, at most 448, and multiples of 2^-9 below 2^-6; of two the even one."""
    exponent = np.floor(np.log2(np.maximum(np.abs(x.astype(np.float64)), 2.0**-6)))
    step = 2.0 ** (exponent - 3)
    rounded: np.ndarray = np.clip(np.round(x / step) * step, -448, 448)
    return rounded


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def exact_rotation(x: Tensor, rotation: Rotation) -> Tensor:
    """As complex numbers: pairs turn by their angles."""
    half = rotation.cos.shape[-1]
    turn = torch.complex(rotation.cos.double(), rotation.sin.double())[:, None]
    turned = torch.complex(x[..., :half].contiguous(), x[..., half : 2 * half].contiguous()) * turn
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1)


def exact_samples(logits: np.ndarray, rows: RowSampling) -> np.ndarray:
    """The definition, a row at a time: scaled logits in float32, filters with probabilities of float64, noise, the largest."""
    temperature, top_k, top_p, min_logit, seeds, positions = (each.numpy() for each in rows)
    logits = np.nan_to_num(logits, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    picked = logits.argmax(axis=1)
    for row in np.flatnonzero(temperature >= np.float32(GREEDY_BELOW)):
        own, largest = logits[row], logits[row].max()
        with np.errstate(invalid="ignore", over="ignore"):
            scaled = np.where(own == largest, np.float32(0), (own - largest) / temperature[row])
        order = np.argsort(-scaled, kind="stable")
        order = order[: top_k[row] or None]
        shares = np.floor(np.exp(scaled[order].astype(np.float64)) * 2**40).astype(np.int64)
        if top_p[row] < 1:
            order = order[: max(1, int((shares.cumsum() - shares < np.float64(top_p[row]) * shares.sum()).sum()))]
        order = np.sort(order[scaled[order] >= min_logit[row]])
        noisy = scaled[order] + exact_noise(random_bits(seeds[row], positions[row], len(own))[order])
        picked[row] = order[noisy.argmax()]
    tokens: np.ndarray = picked
    return tokens


def random_bits(seed: np.int64, position: np.int64, vocab: int) -> np.ndarray:
    """By wrapping uint32. [vocab] uint32."""

    def mix(x: np.ndarray) -> np.ndarray:
        x = x + np.uint32(0x9E3779B9)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        mixed: np.ndarray = x ^ (x >> np.uint32(16))
        return mixed

    seeds, positions = np.array([seed]), np.array([position])
    key = mix(mix(seeds.astype(np.uint32)) ^ mix((seeds >> 32).astype(np.uint32)) * np.uint32(3))
    key = mix(key ^ mix(positions.astype(np.uint32)))
    return mix(mix(np.arange(vocab, dtype=np.uint32)) ^ key)


def exact_noise(bits: np.ndarray) -> np.ndarray:
    """The definition of the noise in float32, by Cephes' logf. numpy rounds each operation. bits: uint32."""
    one = np.float32(1)
    is_upper = bits >= 2**31
    distance = (2 * np.where(is_upper, ~bits, bits) + np.uint32(1)).astype(np.float32) * np.float32(2.0**-33)
    is_far = distance > np.float32(0.29289323)
    exponent, rest = _parts(distance)
    exponent = np.where(is_upper, np.where(is_far, -1, 0), exponent)
    rest = np.where(is_upper, np.where(is_far, one - 2 * distance, -distance), rest)
    return -_log(*_parts(-_log(exponent, rest)))


def _parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    exponent = (x.view(np.int32) - np.int32(0x3F3504F3)) >> 23
    return exponent, (x.view(np.int32) - (exponent << 23)).view(np.float32) - np.float32(1)


def _log(exponent: np.ndarray, rest: np.ndarray) -> np.ndarray:
    terms = [7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1]
    terms += [-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1]
    whole, y = exponent.astype(np.float32), np.zeros_like(rest)
    for term in terms:
        y = y * rest + np.float32(term)
    y = y * rest * (rest * rest) - whole * np.float32(2.12194440e-4) - rest * rest * np.float32(0.5)
    summed: np.ndarray = (rest + y) + whole * np.float32(0.693359375)
    return summed


def assert_rounded(subject: Subject, actual: Tensor, exact: Tensor) -> None:
    assert actual.dtype == subject.dtype
    _assert_close(actual, exact, _room(subject.dtype))


def _room(dtype: torch.dtype) -> float:
    """A few roundings, as a share of the largest number of a token."""
    return 4 * torch.finfo(dtype).eps


def _assert_close(actual: Tensor, exact: Tensor, room: float) -> None:
    """Each token's numbers are compared beside the largest of them."""
    assert actual.shape == exact.shape
    actual, exact = actual.cpu().double().flatten(1), exact.cpu().flatten(1)
    scale = exact.abs().amax(dim=1, keepdim=True).clamp_min(1e-30)
    torch.testing.assert_close(actual / scale, exact / scale, rtol=0, atol=room)


def _pool(order: PageOrder, pages: int, kv_heads: int, page_size: int, dim: int) -> Tensor:
    """Pages of three layers, full of small numbers."""
    inner = (3, 2, kv_heads) if order == "layer" else (kv_heads, 3, 2)
    shape = (pages, *inner, page_size, dim)
    return (torch.arange(torch.Size(shape).numel()) % 7).float().view(shape)


def _views(pool: Tensor, order: PageOrder) -> tuple[Tensor, Tensor]:
    """Keys and values of the middle layer, each [pages, kv_heads, page_size, dim]."""
    if order == "layer":
        return pool[:, 1, 0], pool[:, 1, 1]
    return pool[:, :, 1, 0], pool[:, :, 1, 1]


def paired(cases: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The first case in every dtype, and each other one in one of them: what depends on sizes does not depend on the dtype."""
    return [(*cases[0], dtype) for dtype in DTYPES] + [(*case, DTYPES[at % 3]) for at, case in enumerate(cases[1:])]


class KernelsContract:
    """Subclasses name an implementation and its device. Sizes are small and odd: the interpreter is slow."""

    kernels: Kernels
    device = torch.device("cpu")
    sampled: Sequence[tuple[int, int]] = ((300, 50), (40, 2048), (60, 5000), (300, 1), (600, 7))
    """Rows that are sampled, and their vocabularies."""

    def subject(self, dtype: torch.dtype = torch.float32) -> Subject:
        return Subject(self.kernels, self.device, dtype)

    @pytest.mark.parametrize("page_size", [1, 16, 5])
    def test_rows_decode_their_last_tokens_behind_what_they_have(self, page_size: int) -> None:
        check_decode_inputs(self.subject(), page_size)

    @pytest.mark.parametrize(("hidden", "dtype"), paired([(64,), (33,)]))
    def test_token_ids_become_their_rows_of_the_embedding(self, hidden: int, dtype: torch.dtype) -> None:
        check_embedding(self.subject(dtype), 11, hidden)

    @pytest.mark.parametrize(("half", "factor"), [(32, 1.0), (5, 1.25), (0, 1.0)])
    def test_angles_agree_with_float64(self, half: int, factor: float) -> None:
        check_angles(self.subject(), half, factor)

    @pytest.mark.parametrize(("tokens", "hidden", "dtype"), paired([(9, 96), (2, 1500), (1, 64)]))
    def test_norms_agree_with_float64(self, tokens: int, hidden: int, dtype: torch.dtype) -> None:
        check_norms(self.subject(dtype), tokens, hidden)

    @pytest.mark.parametrize(("tokens", "width", "dtype"), paired([(3, 1100), (1, 64)]))
    def test_the_activation_agrees_with_float64(self, tokens: int, width: int, dtype: torch.dtype) -> None:
        check_activation(self.subject(dtype), tokens, width)

    @pytest.mark.parametrize(("rows", "width", "dtype"), paired([(5, 1100), (1, 64)]))
    def test_rows_are_quantised_to_the_nearest_numbers(self, rows: int, width: int, dtype: torch.dtype) -> None:
        check_quantised(self.subject(dtype), rows, width)

    @pytest.mark.parametrize(("rows", "width", "dtype"), paired([(2, 1100), (1, 64), (9, 48)]))
    def test_norms_and_activations_are_quantised_as_by_themselves(self, rows: int, width: int, dtype: torch.dtype) -> None:
        check_fused_fp8(self.subject(dtype), rows, width)

    @pytest.mark.parametrize(
        ("tokens", "experts", "chosen", "here", "normalised", "dtype"),
        paired(
            [
                (1, 8, 2, range(8), True),
                (20, 8, 1, range(2, 4), False),
                (9, 33, 8, range(33), True),
                (9, 20, 4, range(15, 20), True),
                (3, 5, 5, range(5), False),
            ]
        ),
    )
    def test_tokens_go_to_the_likeliest_experts_and_come_back(
        self, tokens: int, experts: int, chosen: int, here: range, normalised: bool, dtype: torch.dtype
    ) -> None:
        check_routing(self.subject(dtype), tokens, experts, chosen, here, normalised=normalised)

    def test_broken_logits_go_to_experts_that_exist(self) -> None:
        check_broken_routing(self.subject())

    @pytest.mark.parametrize(("rows", "width", "largest", "dtype"), paired([(37, 1100, 127), (2, 64, 127), (5, 100, 63)]))
    def test_rows_become_int8_with_scales_of_their_own(self, rows: int, width: int, largest: int, dtype: torch.dtype) -> None:
        check_int8(self.subject(dtype), rows, width, largest)

    @pytest.mark.parametrize(
        ("dtype", "page_dtype", "norm"),
        [
            *((dtype, dtype, norm) for dtype in DTYPES for norm in (False, True)),
            *((torch.float32, torch.bfloat16, False), (torch.bfloat16, FP8, True), (torch.float16, torch.bfloat16, True)),
        ],
    )
    def test_rotated_queries_return_and_kv_is_in_its_pages(self, dtype: torch.dtype, page_dtype: torch.dtype, norm: bool) -> None:
        check_rotation(self.subject(dtype), 5, HeadSizes(4, 2, 16, 8), norm=norm, page_dtype=page_dtype)

    @pytest.mark.parametrize(
        ("sizes", "norm"),
        [
            *((HeadSizes(11, 1, 20, 10), False), (HeadSizes(9, 9, 24, 5), True)),
            *((HeadSizes(2, 1, 16, 4), False), (HeadSizes(1, 1, 8, 0), True), (HeadSizes(1, 1, 8, 0), False)),
        ],
    )
    def test_heads_of_any_number_and_size_are_rotated_in_part_or_in_full(self, sizes: HeadSizes, norm: bool) -> None:
        check_rotation(self.subject(), 3, sizes, norm=norm, page_dtype=torch.float32, order="head")

    def test_a_token_is_sampled_as_the_definitions_of_filters_and_noise_say(self) -> None:
        for seed, (rows, vocab) in enumerate(self.sampled):
            check_samples(self.subject(DTYPES[seed % 3]), rows, vocab, seed)

    def test_broken_logits_give_a_token_of_the_vocabulary(self) -> None:
        check_broken_logits(self.subject(), 2100)

    @pytest.mark.parametrize(("widths", "dtype"), paired([([130, 33, 33],), ([40, 40],), ([600],)]))
    def test_each_token_gets_what_its_adapter_adds(self, widths: list[int], dtype: torch.dtype) -> None:
        check_low_rank(self.subject(dtype), [0] * 5 + [-1, 2, 0, 1, -1] + [2] * 18, 150, widths, [5, 16, 20], spare=2)

    def test_tokens_without_adapters_stay_as_they_are(self) -> None:
        check_low_rank(self.subject(), [-1, -1], 32, [16], [8])
        check_low_rank(self.subject(), [-1, -1], 32, [16], [8], spare=1)

    @pytest.mark.parametrize("spare", [0, 3])
    def test_the_pages_of_rows_lie_one_row_after_the_other(self, spare: int) -> None:
        check_page_indices(self.subject(), [3, 1100, 0, 1, 1024], 1200, spare)

    def test_no_rows_and_no_tokens_are_no_work(self) -> None:
        kernels, empty = self.kernels, torch.empty(0, 16, device=self.device)
        weight, none = torch.ones(16, device=self.device), torch.empty(0, dtype=torch.int64, device=self.device)
        pages = torch.ones(2, 1, 4, 16, device=self.device)
        assert kernels.rms_norm(empty, weight, EPS)[0].shape == kernels.embed(none, weight[None]).shape == (0, 16)
        assert kernels.rotation(none, weight, 1.0).cos.shape == (0, 16)
        assert kernels.rms_norm(empty, weight, EPS, empty)[1].shape == (0, 16)
        assert kernels.silu_and_mul(empty).shape == (0, 8)
        assert [part.shape for part in kernels.quantise(empty)] == [(0, 16), (0, 1)]
        assert [part.shape for part in kernels.rms_norm_fp8(empty, weight, EPS)[0]] == [(0, 16), (0, 1)]
        assert [part.shape for part in kernels.silu_and_mul_fp8(empty)] == [(0, 8), (0, 1)]
        routing = kernels.route(empty, 2, range(3), normalised=True)
        assert routing.weights.shape == (0, 2) and routing.ends.tolist() == [0, 0, 0]
        assert kernels.combine(empty, routing).shape == (0, 16)
        assert [part.shape for part in kernels.quantise_int8(empty, 127)] == [(0, 16), (0, 1)]
        rotation, places = Rotation(empty[:, :8], empty[:, :8]), PagePlaces(pages, pages, none, none)
        assert kernels.rotate_and_write(empty.view(0, 1, 16).expand(0, 5, 16), rotation, None, places).shape == (0, 3, 16)
        shares = weight[:0]
        assert (
            kernels.sample(empty, RowSampling(shares, none, shares, shares, none, none)).shape
            == kernels.sample(empty).shape
            == (0,)
        )
        kernels.page_indices(none.int().view(0, 1), none, torch.zeros(1, dtype=torch.int32, device=self.device), none.int())
