"""Products for few rows: what they compute, which one is used, and whole models on them against transformers' own."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from common.engine.models import packing
from common.engine.models.decoder import Decoder
from common.engine.models.few_rows import FewRows, fits, load_few_rows
from common.engine.models.linear import PackedLinear
from common.engine.models.packing import ROWS, Measured, measure, pack_all, why_not_packed
from common.host_limits import HostMemory
from tests.common.engine.checkpoints import VOCAB, llama, qwen3, saved
from tests.common.engine.exact import answers, assert_exact, runner
from tests.common.engine.ranks import answers_of_ranks

CPU = torch.device("cpu")
FASTER_PACKED = Measured({1: 0.9, 8: 0.5, 16: 0.6, 32: 0.8, 256: 0.9}, None)
FASTER_FOR_FEW = Measured({1: 1.2, 8: 0.5, 16: 0.6, 32: 0.8, 256: 1.5}, None)
FASTER_FOR_MANY = Measured({1: 0.9, 8: 0.5, 16: 0.5, 32: 0.5, 256: 0.7}, {1: 0.6, 8: 0.4, 16: 0.7, 32: 0.8, 256: 1.0})
FASTER_PLAIN = Measured({1: 1.2, 8: 1.3, 16: 1.1, 32: 0.9, 256: 0.9}, None)
FASTER_IN_C = Measured({1: 1.2, 8: 0.5, 16: 0.6, 32: 0.8, 256: 0.95}, {1: 0.9, 8: 0.4, 16: 0.5, 32: 0.8, 256: 1.0})
SLOWER_IN_C = Measured({1: 1.2, 8: 1.3, 16: 1.1, 32: 1.1, 256: 1.2}, {1: 1.2, 8: 1.3, 16: 1.1, 32: 1.1, 256: 1.0})


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
    ("measured", "keeps_weight", "uses"),
    [
        (FASTER_PACKED, False, {1, 2, 8, 16, 32, 100, 256, 5000}),
        (FASTER_PACKED, True, {1, 2, 8, 16, 32, 100, 256, 5000}),
        (FASTER_FOR_FEW, False, {1, 2, 8, 16, 32, 100, 256, 5000}),
        (FASTER_FOR_FEW, True, {8, 16, 32}),
        (FASTER_FOR_MANY, True, {16, 32, 100, 256, 5000}),
    ],
)
def test_the_faster_product_is_used_where_both_weights_are_there(measured: Measured, keeps_weight: bool, uses: set[int]) -> None:
    rows = measured.packed_rows(keeps_weight)
    assert {count for count in (1, 2, 8, 16, 32, 100, 256, 5000) if count in rows} == uses
    fastest = {count: min(measured.packed[count], measured.plain[count]) for count in ROWS}
    assert not keeps_weight or measured.both == fastest


def test_the_range_of_packed_rows_is_the_best_one_where_no_range_is_right_for_all() -> None:
    measured = Measured({1: 0.5, 8: 1.1, 16: 0.6, 32: 2.0, 256: 0.9}, None)
    assert [count in measured.packed_rows(keeps_weight=True) for count in ROWS] == [True, True, True, False, False]


@pytest.mark.parametrize("in_c", [True, False], ids=["C and torch", "torch alone"])
def test_a_measurement_has_a_ratio_for_each_number_of_rows_and_leaves_the_threads(in_c: bool) -> None:
    threads = torch.get_num_threads()
    measured = measure([torch.randn(64, 128), torch.randn(32, 16)], needed_few_rows() if in_c else None)
    assert torch.get_num_threads() == threads
    assert (measured.in_c is not None) == in_c
    for ratios in (measured.packed, measured.plain, measured.both):
        assert tuple(ratios) == ROWS and all(0 < ratio < float("inf") for ratio in ratios.values())
    assert measured.plain[256] == 1.0, "C computes few rows only"


def test_some_of_each_large_weight_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def heard(samples: Sequence[Tensor], few_rows: FewRows | None) -> Measured:
        seen.extend(tuple(sample.shape) for sample in samples)
        return FASTER_PLAIN

    monkeypatch.setattr(packing, "measure", heard)
    layers = [layer(16, 16), layer(512, 256), layer(4096, 1000), *[layer(512, 128)] * 40]
    pack_all(layers, sharers=1, progress=lambda text: None)
    assert seen[:3] == [(512, 256), (1040, 1000), (512, 128)] and len(seen) == 24


@needs(torch.float32)
def test_second_copies_are_made_while_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is shared with the embedding. Room for the head and one of two layers; then for none of them."""
    said: list[str] = []
    monkeypatch.setattr(packing, "measure", lambda samples, few_rows: FASTER_FOR_FEW)
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
    assert "packed the weights of 3 linear layers" in said[0] and "of them second copies" in said[0]
    assert "packed the weights of 2 linear layers" in said[1] and "second copies" not in said[1]


@needs(torch.float32)
def test_one_that_starts_again_beside_three_others_makes_as_many_second_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "measure", lambda samples, few_rows: FASTER_FOR_FEW)
    total = 8 * 4 * 512 * 256 * 4
    for free in (total, total // 4):
        monkeypatch.setattr(packing, "host_memory_now", lambda free=free: HostMemory(total, free))
        layers = [layer(512, 256), layer(512, 256)]
        pack_all(layers, sharers=4, progress=lambda text: None)
        assert [one.weight is not None for one in layers] == [False, True]


@needs(torch.float32)
@pytest.mark.parametrize(
    ("measured", "has_room", "in_c", "packed"),
    [
        pytest.param("FASTER_IN_C", True, [True, True], [False, False], id="C is the fastest"),
        pytest.param("FASTER_PACKED", True, [False, False], [True, True], id="packed is the fastest"),
        pytest.param("FASTER_FOR_MANY", True, [True, True], [True, True], id="both: C for few rows, packed for more"),
        pytest.param("FASTER_FOR_MANY", False, [False, True], [True, False], id="no room for both"),
        pytest.param("SLOWER_IN_C", True, [False, False], [False, False], id="torch is the fastest"),
    ],
)
def test_each_layer_gets_the_products_that_are_fastest_and_have_room(
    monkeypatch: pytest.MonkeyPatch, measured: str, has_room: bool, in_c: list[bool], packed: list[bool]
) -> None:
    """The second layer is shared."""
    room = 2**40 if has_room else 0
    monkeypatch.setattr(packing, "host_memory_now", lambda: HostMemory(room, room))
    monkeypatch.setattr(packing, "load_few_rows", needed_few_rows)
    monkeypatch.setattr(packing, "measure", lambda samples, few_rows: globals()[measured])
    layers, small = [layer(512, 256), layer(512, 256, shared=True)], layer(16, 16)
    pack_all([*layers, small], sharers=1, progress=lambda text: None)
    assert [one.few_rows is not None for one in (*layers, small)] == [*in_c, False]
    assert [one.packed is not None for one in (*layers, small)] == [*packed, False]
    assert layers[1].weight is not None and (layers[0].weight is None) == (packed[0] and not in_c[0])


@needs(torch.float32)
@pytest.mark.parametrize("room_bytes", [0, 4 * 512 * 256 * 4, 2**30])
def test_second_copies_and_what_they_spare_are_the_same_whatever_was_measured(
    monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    """Else the pools of pages of two instances would differ where their measurements do."""
    monkeypatch.setattr(packing, "host_memory_now", lambda: HostMemory(8 * room_bytes, 8 * room_bytes))
    monkeypatch.setattr(packing, "load_few_rows", needed_few_rows)
    seen = set()
    for measured in (FASTER_IN_C, FASTER_PACKED, FASTER_FOR_FEW, FASTER_FOR_MANY, SLOWER_IN_C):
        monkeypatch.setattr(packing, "measure", lambda samples, few_rows, measured=measured: measured)
        layers = [layer(512, 256, shared=number == 5) for number in range(6)]
        spared_bytes = pack_all(layers, sharers=1, progress=lambda text: None)
        seen.add(spared_bytes + sum(one.weight.nbytes for one in layers if one.weight is not None and one.packed is not None))
    assert seen == {min(room_bytes, 6 * 512 * 256 * 4)}


def test_what_is_measured_of_a_weight_with_very_many_inputs_fits_the_c() -> None:
    for outputs, inputs in ((16, 70_016), (4, 2**19), (32, 2**16)):
        assert fits(packing._sample(torch.empty(outputs, inputs)))


@needs(torch.float32)
@pytest.mark.parametrize(
    ("measured", "told"),
    [
        pytest.param(FASTER_PACKED, "packed the weights of 13 linear layers", id="packed alone"),
        pytest.param(FASTER_FOR_FEW, "packed the weights of 13 linear layers", id="packed, and torch"),
        pytest.param(FASTER_FOR_MANY, "13 linear layers compute few rows in C", id="packed, and C"),
        pytest.param(FASTER_IN_C, "13 linear layers compute few rows in C", id="C, and torch"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_models_give_the_answers_of_transformers_by_each_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Measured, told: str, ranks: int
) -> None:
    monkeypatch.setattr(packing, "_LEAST_ITEMS", 0)
    monkeypatch.setattr(packing, "load_few_rows", needed_few_rows if measured.in_c else lambda: None)
    monkeypatch.setattr(packing, "measure", lambda samples, few_rows: measured)
    model = (
        llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True) if ranks == 1 else qwen3(tie_word_embeddings=False)
    )
    random = np.random.default_rng(9)
    prompts = [random.integers(3, VOCAB, length).astype(np.int32) for length in (1, 40, 200)]
    path, said = saved(model, tmp_path), list[str]()
    if ranks == 1:
        assert_exact(model, answers(runner(path, said.append), Decoder, prompts, 6, chunk_tokens=150))
        assert any(told in line for line in said)
    else:
        for given in answers_of_ranks(path, ranks, prompts, 6, 150):
            assert_exact(model, given)


def test_weights_stay_plain_where_they_cannot_be_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_packed(torch.float32, torch.device("cuda")) == "packed weights are for CPU, not for cuda"
    assert why_not_packed(torch.float64, CPU) is not None
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert why_not_packed(torch.float32, CPU) == "torch has no oneDNN here"
