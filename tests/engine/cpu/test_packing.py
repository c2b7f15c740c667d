"""Which product over packed weights is used, and whole models on each of them against transformers' own."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.host import HostMemory
from engine.backends import make_kernels
from engine.cpu.products import Packed, PackedProduct, float_products
from engine.models import linear as packing
from engine.models.linear import ROWS, Linear, MeasuredProduct, measure, pack_all
from tests.engine.checkpoints import llama, prompts_of, qwen3, saved
from tests.engine.exact import answers, assert_exact, runner
from tests.engine.ranks import answers_of_ranks

CPU = torch.device("cpu")


class Unused:
    """A product that is not asked to compute."""

    def pack(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, gated: bool = False) -> Packed:
        return Packed(weight.clone(), bias, scale, len(weight), gated)

    def __call__(self, x: Tensor, packed: Packed) -> Tensor:
        raise AssertionError("it computes nothing")

    def ungated(self, x: Tensor, packed: Packed) -> Tensor:
        raise AssertionError("it computes nothing")

    def unpack(self, packed: Packed, outputs: int, inputs: int) -> Tensor:
        return packed.weight


FASTER_PACKED = {1: 0.9, 8: 0.5, 16: 0.6, 32: 0.8, 256: 0.9}
FASTER_FOR_FEW = {1: 1.2, 8: 0.5, 16: 0.6, 32: 0.8, 256: 1.5}
FASTER_FOR_MANY = {1: 1.1, 8: 1.2, 16: 0.8, 32: 0.5, 256: 0.7}
FASTER_PLAIN = {1: 1.2, 8: 1.3, 16: 1.1, 32: 0.9, 256: 0.9}


def layer(outputs: int, inputs: int, *, shared: bool = False) -> Linear:
    return Linear(torch.randn(outputs, inputs), None, shared=shared)


def measures(monkeypatch: pytest.MonkeyPatch, packed: dict[int, float]) -> None:
    """The first product is the fastest, with these times."""
    monkeypatch.setattr(packing, "measure", lambda samples, products: MeasuredProduct(products[0], packed))


@pytest.mark.parametrize(
    ("packed", "keeps_weight", "uses"),
    [
        (FASTER_PACKED, False, {1, 2, 8, 16, 32, 100, 256, 5000}),
        (FASTER_PACKED, True, {1, 2, 8, 16, 32, 100, 256, 5000}),
        (FASTER_FOR_FEW, False, {1, 2, 8, 16, 32, 100, 256, 5000}),
        (FASTER_FOR_FEW, True, {8, 16, 32}),
        (FASTER_FOR_MANY, True, {16, 32, 100, 256, 5000}),
    ],
)
def test_the_faster_product_is_used_where_both_weights_are_there(
    packed: dict[int, float], keeps_weight: bool, uses: set[int]
) -> None:
    measured = MeasuredProduct(Unused(), packed)
    rows = measured.packed_rows(keeps_weight)
    assert {count for count in (1, 2, 8, 16, 32, 100, 256, 5000) if count in rows} == uses
    fastest = {count: min(packed[count], 1.0) for count in ROWS}
    assert not keeps_weight or measured.both == fastest


def test_the_range_of_packed_rows_is_the_best_one_where_no_range_is_right_for_all() -> None:
    measured = MeasuredProduct(Unused(), {1: 0.5, 8: 1.1, 16: 0.6, 32: 2.0, 256: 0.9})
    assert [count in measured.packed_rows(keeps_weight=True) for count in ROWS] == [True, True, True, False, False]


@pytest.mark.parametrize(("of_one_row", "first"), [(1.07, 1), (1.2, 3)])
def test_few_rows_have_one_product_unless_two_are_clearly_faster(of_one_row: float, first: int) -> None:
    """So a row's logits are the same bits whatever is beside it."""
    assert MeasuredProduct(Unused(), FASTER_FOR_FEW | {1: of_one_row}).packed_rows(keeps_weight=True)[0] == first


@pytest.mark.parametrize("order", [1, -1])
def test_the_fastest_product_is_measured_and_the_threads_stay(order: int) -> None:
    class Slow(Unused):
        """Computes, but each product ten times."""

        def __call__(self, x: Tensor, packed: Packed) -> Tensor:
            return torch.stack([x @ packed.weight.T for _ in range(10)])[0]

    class Quick(Slow):
        """Does not compute at all."""

        def __call__(self, x: Tensor, packed: Packed) -> Tensor:
            assert packed.weight.shape == (packed.outputs, x.shape[1])
            return x

    threads = torch.get_num_threads()
    measured = measure([torch.randn(64, 128), torch.randn(32, 16)], [Slow(), Quick()][::order])
    assert torch.get_num_threads() == threads
    assert type(measured.product) is Quick
    for ratios in (measured.packed, measured.both):
        assert tuple(ratios) == ROWS and all(0 < ratio < 1 for ratio in ratios.values())


def test_some_of_each_large_weight_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def heard(samples: Sequence[Tensor], products: Sequence[PackedProduct]) -> MeasuredProduct:
        seen.extend(tuple(sample.shape) for sample in samples)
        return MeasuredProduct(products[0], FASTER_PLAIN)

    monkeypatch.setattr(packing, "measure", heard)
    layers = [layer(16, 16), layer(512, 256), layer(4096, 1000), layer(4, 70_016), layer(64, 70_016), *[layer(512, 128)] * 40]
    pack_all(layers, [Unused()], sharers=1, progress=lambda text: None)
    assert seen[:4] == [(512, 256), (1024, 1000), (14, 70_016), (512, 128)] and len(seen) == 24


def test_second_copies_are_made_while_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is shared with the embedding. Room for the head and one of two layers; then for none of them."""
    said: list[str] = []
    measures(monkeypatch, FASTER_FOR_FEW)
    for copies, head_packed, plain_left in ((2, True, [False, True]), (0.9, False, [False, False])):
        free = int(copies * 512 * 256 * 4 * 4 * 3) + 64
        monkeypatch.setattr(packing, "host_memory_now", lambda free=free: HostMemory(64 * free, free))
        layers, head = [layer(512, 256), layer(512, 256)], layer(512, 256, shared=True)
        small = layer(16, 16)
        pack_all([*layers, small, head], [Unused()], sharers=3, progress=said.append)
        assert head.weight is not None and (head.packed is not None) == head_packed
        assert [one.weight is not None for one in layers] == plain_left
        assert all(one.packed is not None for one in layers)
        assert small.packed is None and small.weight is not None
    assert "packed the weights of 3 linear layers" in said[0] and "second copies of them take" in said[0]
    assert "packed the weights of 2 linear layers" in said[1] and "second copies" not in said[1]


def test_one_that_starts_again_beside_three_others_makes_as_many_second_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measures(monkeypatch, FASTER_FOR_FEW)
    total = 8 * 4 * 512 * 256 * 4
    for free in (total, total // 4):
        monkeypatch.setattr(packing, "host_memory_now", lambda free=free: HostMemory(total, free))
        layers = [layer(512, 256), layer(512, 256)]
        pack_all(layers, [Unused()], sharers=4, progress=lambda text: None)
        assert [one.weight is not None for one in layers] == [False, True]


@pytest.mark.parametrize(
    ("measured", "has_room", "packed", "plain"),
    [
        pytest.param(FASTER_PACKED, True, [True, True], [False, True], id="packed is faster"),
        pytest.param(FASTER_PACKED, False, [True, False], [False, True], id="no room for that of the shared one"),
        pytest.param(FASTER_FOR_MANY, True, [True, True], [True, True], id="both"),
        pytest.param(FASTER_FOR_MANY, False, [True, False], [False, True], id="no room for both"),
        pytest.param(FASTER_PLAIN, True, [False, False], [True, True], id="torch is the fastest"),
    ],
)
def test_each_layer_gets_the_products_that_are_fastest_and_have_room(
    monkeypatch: pytest.MonkeyPatch, measured: dict[int, float], has_room: bool, packed: list[bool], plain: list[bool]
) -> None:
    """The second layer is shared."""
    room = 2**40 if has_room else 0
    monkeypatch.setattr(packing, "host_memory_now", lambda: HostMemory(room, room))
    measures(monkeypatch, measured)
    layers, small = [layer(512, 256), layer(512, 256, shared=True)], layer(16, 16)
    pack_all([*layers, small], [Unused()], sharers=1, progress=lambda text: None)
    assert [one.packed is not None for one in (*layers, small)] == [*packed, False]
    assert [one.weight is not None for one in (*layers, small)] == [*plain, True]


@pytest.mark.parametrize("room_bytes", [0, 4 * 512 * 256 * 4, 2**30])
def test_second_copies_and_what_they_spare_are_the_same_whatever_was_measured(
    monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    """Else the pools of pages of two instances would differ where their measurements do."""
    monkeypatch.setattr(packing, "host_memory_now", lambda: HostMemory(8 * room_bytes, 8 * room_bytes))
    seen = set()
    for measured in (FASTER_PLAIN, FASTER_PACKED, FASTER_FOR_FEW, FASTER_FOR_MANY):
        measures(monkeypatch, measured)
        layers = [layer(512, 256, shared=number == 5) for number in range(6)]
        spared_bytes = pack_all(layers, [Unused()], sharers=1, progress=lambda text: None)
        seen.add(spared_bytes + sum(one.weight.nbytes for one in layers if one.weight is not None and one.packed is not None))
    assert seen == {min(room_bytes, 6 * 512 * 256 * 4)}


@pytest.mark.parametrize("product", float_products(torch.float32, CPU, make_kernels(CPU)), ids=lambda each: type(each).__name__)
@pytest.mark.parametrize(
    ("measured", "ranks"),
    [(FASTER_PACKED, 1), (FASTER_FOR_FEW, 1), (FASTER_FOR_MANY, 1), (FASTER_FOR_FEW, 2)],
    ids=["packed", "for few", "for many", "for few on two ranks"],
)
def test_models_give_the_answers_of_transformers_by_each_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, product: PackedProduct, measured: dict[int, float], ranks: int
) -> None:
    monkeypatch.setattr(packing, "_LEAST_ITEMS", 0)
    monkeypatch.setattr(packing, "_LEAST_OUTPUTS", 0)
    monkeypatch.setattr(packing, "measure", lambda samples, products: MeasuredProduct(product, measured))
    model = (
        llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True) if ranks == 1 else qwen3(tie_word_embeddings=False)
    )
    prompts, path, said = prompts_of(1, 40, 200), saved(model, tmp_path), list[str]()
    if ranks == 1:
        assert_exact(model, answers(runner(path, said.append), prompts, 6, chunk_tokens=150))
        assert any("packed the weights of 9 linear layers" in line for line in said)
    else:
        for given in answers_of_ranks(path, ranks, prompts, 6, 150):
            assert_exact(model, given)
