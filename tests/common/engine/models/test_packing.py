"""Products for few rows: what they compute, which one is used, and whole models on them against transformers' own."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from common.engine.models import packing
from common.engine.models.decoder import Decoder
from common.engine.models.few_rows import FewRows, load_few_rows
from common.engine.models.linear import PackedLinear
from common.engine.models.packing import measured_packed, pack_all, packed_rows, why_not_packed
from common.host_limits import HostMemory
from tests.common.engine.checkpoints import VOCAB, llama, qwen3, saved
from tests.common.engine.exact import answers, assert_exact, runner
from tests.common.engine.ranks import answers_of_ranks

CPU = torch.device("cpu")
FASTER_PACKED = {1: 0.9, 8: 0.5, 32: 0.8, 256: 0.9}
FASTER_FOR_FEW = {1: 1.2, 8: 0.5, 32: 0.8, 256: 1.5}
FASTER_PLAIN = {1: 1.2, 8: 1.3, 32: 0.9, 256: 0.9}


def needs(dtype: torch.dtype) -> pytest.MarkDecorator:
    reason = why_not_packed(dtype, CPU)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


def needed_few_rows() -> FewRows:
    made = load_few_rows()
    if made is None:
        pytest.skip("there is no C compiler")
    return made


def layer(outputs: int, inputs: int, *, shared: bool = False) -> PackedLinear:
    return PackedLinear(torch.randn(outputs, inputs), None, shared)


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [
        pytest.param(torch.float32, 2**-18, marks=needs(torch.float32)),
        pytest.param(torch.bfloat16, 2**-8, marks=needs(torch.bfloat16)),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_layer_computes_what_a_plain_one_does(dtype: torch.dtype, rounding: float, with_bias: bool) -> None:
    torch.manual_seed(5)
    weight, bias = torch.randn(48, 130).to(dtype), torch.randn(48).to(dtype) if with_bias else None
    made = PackedLinear(weight, bias)
    made.pack(range(1, 9), keeps_weight=True)
    packed_alone = PackedLinear(weight, bias)
    packed_alone.pack(range(10**9), keeps_weight=False)
    for rows in (0, 1, 8, 9, 300):
        x = torch.randn(130, rows).to(dtype).T  # its rows are not contiguous
        exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        for one in (made, packed_alone):
            out = one(x)
            assert out.dtype == dtype and out.shape == exact.shape
            assert torch.allclose(out.double(), exact, rtol=rounding, atol=130 * rounding / 8)


@pytest.mark.parametrize(
    ("ratios", "keeps_weight", "uses"),
    [
        (FASTER_PACKED, False, {1, 2, 100, 5000}),
        (FASTER_PACKED, True, {1, 2, 100, 5000}),
        (FASTER_FOR_FEW, False, {1, 2, 100, 5000}),
        (FASTER_FOR_FEW, True, {2, 100}),
        (FASTER_PLAIN, True, set()),
    ],
)
def test_the_faster_product_is_used_where_both_weights_are_there(
    ratios: dict[int, float], keeps_weight: bool, uses: set[int]
) -> None:
    rows = packed_rows(ratios, keeps_weight)
    assert {count for count in (1, 2, 100, 5000) if count in rows} == uses


def test_a_measurement_has_a_ratio_for_each_number_of_rows_and_leaves_the_threads() -> None:
    threads = torch.get_num_threads()
    ratios = measured_packed([torch.randn(64, 128), torch.randn(32, 16)])
    assert torch.get_num_threads() == threads
    assert set(ratios) == set(FASTER_PACKED)
    assert all(0 < ratio < float("inf") for ratio in ratios.values())


@needs(torch.float32)
def test_second_copies_are_made_while_memory_allows_and_each_shape_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is shared with the embedding. Room for the head and one of two layers; then for none of them."""
    measured: list[tuple[int, ...]] = []
    said: list[str] = []

    def measure(samples: Sequence[Tensor]) -> dict[int, float]:
        measured.extend(tuple(sample.shape) for sample in samples)
        return FASTER_FOR_FEW

    monkeypatch.setattr(packing, "load_few_rows", lambda: None)
    monkeypatch.setattr(packing, "measured_packed", measure)
    for copies, head_packed, plain_left in ((2, True, [False, True]), (0.9, False, [False, False])):
        free = int(copies * 512 * 256 * 4 * 4 * 3) + 64
        monkeypatch.setattr(packing, "host_memory_now", lambda free=free: HostMemory(64 * free, free))
        layers, head = [layer(512, 256), layer(512, 256)], layer(512, 256, shared=True)
        small = layer(16, 16)
        pack_all([*layers, small, head], sharers=3, progress=said.append)
        assert head.weight is not None and (head.packed is not None) == head_packed
        assert [one.weight is not None for one in layers] == plain_left
        assert all(one.packed is not None for one in layers)
        assert small.packed is None and small.weight is not None
    assert measured == [(512, 256)] * 2
    assert "packed the weights of 3 linear layers" in said[0] and "of them second copies" in said[0]
    assert "packed the weights of 2 linear layers" in said[1] and "second copies" not in said[1]


@needs(torch.float32)
def test_one_that_starts_again_beside_three_others_makes_as_many_second_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "load_few_rows", lambda: None)
    monkeypatch.setattr(packing, "measured_packed", lambda samples: FASTER_FOR_FEW)
    total = 8 * 4 * 512 * 256 * 4
    for free in (total, total // 4):
        monkeypatch.setattr(packing, "host_memory_now", lambda free=free: HostMemory(total, free))
        layers = [layer(512, 256), layer(512, 256)]
        pack_all(layers, sharers=4, progress=lambda text: None)
        assert [one.weight is not None for one in layers] == [False, True]


@needs(torch.float32)
@pytest.mark.parametrize("in_c", [True, False], ids=["in C", "packed"])
def test_the_product_in_c_is_used_where_it_is_the_fastest_one(monkeypatch: pytest.MonkeyPatch, in_c: bool) -> None:
    in_c_ratios = {1: 0.8, 8: 0.4, 32: 0.9} if in_c else {1: 0.9, 8: 0.7, 32: 0.9}
    monkeypatch.setattr(packing, "load_few_rows", needed_few_rows)
    monkeypatch.setattr(packing, "measured_packed", lambda samples: FASTER_PACKED)
    monkeypatch.setattr(packing, "measured_few_rows", lambda samples, few_rows: in_c_ratios)
    layers, small = [layer(512, 256), layer(512, 256, shared=True)], layer(16, 16)
    pack_all([*layers, small], sharers=1, progress=lambda text: None)
    assert [one.few_rows is not None for one in (*layers, small)] == [in_c, in_c, False]
    assert [one.packed is not None for one in (*layers, small)] == [not in_c, not in_c, False]


@needs(torch.float32)
@pytest.mark.parametrize(
    "ratios", [FASTER_PACKED, FASTER_FOR_FEW, FASTER_PLAIN], ids=["packed alone", "both copies", "few rows in C"]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_models_give_the_answers_of_transformers_by_each_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratios: dict[int, float], ranks: int
) -> None:
    if ratios is FASTER_PLAIN:
        monkeypatch.setattr(packing, "load_few_rows", needed_few_rows)
        monkeypatch.setattr(packing, "measured_few_rows", lambda samples, few_rows: dict.fromkeys(ratios, 0.1))
    else:
        monkeypatch.setattr(packing, "load_few_rows", lambda: None)
    monkeypatch.setattr(packing, "_LEAST_ITEMS", 0)
    monkeypatch.setattr(packing, "measured_packed", lambda samples: ratios)
    model = (
        llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True) if ranks == 1 else qwen3(tie_word_embeddings=False)
    )
    random = np.random.default_rng(9)
    prompts = [random.integers(3, VOCAB, length).astype(np.int32) for length in (1, 40, 200)]
    path, said = saved(model, tmp_path), list[str]()
    if ranks == 1:
        assert_exact(model, answers(runner(path, said.append), Decoder, prompts, 6, chunk_tokens=150))
        told = "13 linear layers compute few rows in C" if ratios is FASTER_PLAIN else "packed the weights of 13 linear layers"
        assert any(told in line for line in said)
    else:
        for given in answers_of_ranks(path, ranks, prompts, 6, 150):
            assert_exact(model, given)


def test_weights_stay_plain_where_they_cannot_be_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_packed(torch.float32, torch.device("cuda")) == "packed weights are for CPU, not for cuda"
    assert why_not_packed(torch.float64, CPU) is not None
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert why_not_packed(torch.float32, CPU) == "torch has no oneDNN here"
