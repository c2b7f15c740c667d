"""Products on the CPU: in the model's dtype against float64, and of int8 weights, within the bound of the format.

Also which product is chosen, and what the one in C promises beyond the definition.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from common.errors import ConfigError
from engine.cpu import products
from engine.cpu.products import (
    MOST_INPUTS,
    NativeProduct,
    OneDnnInt8Product,
    OneDnnProduct,
    Packed,
    PackedProduct,
    float_products,
    int8_product,
    load_int8_product,
    load_panel_product,
)
from engine.models.linear import Int8Linear, Linear
from tests.engine.checkpoints import prompts_of, qwen2, qwen3, saved
from tests.engine.cpu.here import CPU, KERNELS, SIZES, int8_products, largest_of, numbers_of_threads
from tests.engine.exact import answers, reference_logits, runner
from tests.engine.ranks import answers_of_ranks

PRODUCTS = int8_products()
needs_c = pytest.mark.skipif(
    load_int8_product() is None, reason="this processor does not multiply bytes, or there is no C compiler"
)


def packed_of(weight: Tensor, bias: Tensor | None, product: PackedProduct, *, gated: bool = False) -> Packed:
    made = Int8Linear.empty(len(weight), weight.shape[1], bias, product, KERNELS, gated=gated)
    made.put(slice(None), weight)
    made.pack()
    assert made.packed is not None
    return made.packed


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("width", [1, 16, 40, 257])
def test_a_gated_layer_is_the_gate_of_the_plain_one(product: PackedProduct, width: int) -> None:
    torch.manual_seed(width)
    weight, bias, x = torch.randn(2 * width, 70), torch.randn(2 * width), torch.randn(20, 70)
    plain, packed = product(x, packed_of(weight, bias, product)), packed_of(weight, bias, product, gated=True)
    assert torch.allclose(product.ungated(x, packed), plain, rtol=1e-6, atol=1e-6)
    gates, ups = plain.double().chunk(2, -1)
    out = product(x, packed)
    assert out.shape == (20, width)
    assert torch.allclose(out.double(), F.silu(gates) * ups, rtol=2e-6, atol=1e-6)


@needs_c
@pytest.mark.parametrize(("outputs", "inputs", "gated"), SIZES)
def test_the_product_in_c_depends_on_no_other_row_and_no_number_of_threads(outputs: int, inputs: int, gated: bool) -> None:
    product = load_int8_product()
    assert product is not None
    torch.manual_seed(inputs)
    packed = packed_of(torch.randn(outputs, inputs), torch.randn(outputs), product, gated=gated)
    wide = torch.full((40, inputs + 3), torch.inf)
    wide[:, :inputs] = torch.randn(40, inputs)
    wide[7, inputs // 2], wide[6, 0], wide[9] = torch.nan, torch.inf, 0.0
    alone = torch.cat([product(wide[row : row + 1, :inputs].contiguous(), packed) for row in range(40)])
    assert alone[6:8].isnan().all() and alone[[*range(6), *range(8, 40)]].isfinite().all()
    with numbers_of_threads() as each:
        for _ in each:
            for rows in (0, 1, 5, 8, 9, 15, 24, 40):  # which are not next to each other
                assert torch.equal(product(wide[:rows, :inputs], packed)[:6], alone[: min(rows, 6)])
                assert torch.equal(product(wide[8:rows, :inputs], packed), alone[8:rows])
            assert torch.equal(product(wide[10:, :inputs].T.contiguous().T, packed), alone[10:])


def test_the_product_is_the_one_in_c_but_where_there_is_none_or_tiles_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    class InC(OneDnnInt8Product):
        """Stands for the one in C on processors that have none."""

    if not any(isinstance(product, OneDnnInt8Product) for product in PRODUCTS):
        pytest.skip("oneDNN has no int8 products here")
    in_c = InC(63, KERNELS)
    for found, flags, expected in (
        (in_c, "avx512_vnni", InC),
        (in_c, "avx512_vnni amx_int8", OneDnnInt8Product),
        (None, "", OneDnnInt8Product),
    ):
        monkeypatch.setattr(products, "load_int8_product", lambda found=found: found)
        monkeypatch.setattr(products, "processor_flags", lambda flags=flags: flags)
        assert type(int8_product(CPU, KERNELS)) is expected
    monkeypatch.setattr(products, "load_int8_product", lambda: in_c)
    monkeypatch.setattr(products, "processor_flags", lambda: "")
    right = OneDnnInt8Product.__call__
    monkeypatch.setattr(InC, "__call__", lambda self, *given: right(self, *given) + 1)
    assert type(int8_product(CPU, KERNELS)) is OneDnnInt8Product, "a product that is wrong is not used"


def test_int8_is_refused_where_it_cannot_be_computed_or_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--quantization int8 computes on CPU, and the device is cuda: use fp8 or none"):
        int8_product(torch.device("cuda"), KERNELS)
    if PRODUCTS:
        with pytest.raises(
            ConfigError, match=f"layers of at most {MOST_INPUTS} inputs, but one of this model has {MOST_INPUTS + 1}"
        ):
            Int8Linear.empty(4, MOST_INPUTS + 1, None, PRODUCTS[0], KERNELS)
    monkeypatch.setattr(products, "load_int8_product", lambda: None)
    right = OneDnnInt8Product.__call__

    def saturating(self: OneDnnInt8Product, *given: Any) -> Tensor:
        """Sums of two products that do not fit into 16 bits are wrong, as on processors without VNNI."""
        out = right(self, *given)
        return out if 2 * 127 * (2 * self.largest + 1) < 2**15 else out - 1

    def refusing(*_: object) -> Tensor:
        raise RuntimeError("could not create a primitive\nand more")

    if any(isinstance(product, OneDnnInt8Product) for product in PRODUCTS):
        monkeypatch.setattr(OneDnnInt8Product, "__call__", saturating)
        product = int8_product(CPU, KERNELS)
        assert isinstance(product, OneDnnInt8Product) and product.largest == 63
        monkeypatch.setattr(OneDnnInt8Product, "__call__", lambda self, *given: right(self, *given) + 1)
        with pytest.raises(ConfigError, match="int8 products are wrong on this processor: use --quantization none"):
            int8_product(CPU, KERNELS)
    monkeypatch.setattr(OneDnnInt8Product, "__call__", refusing)
    with pytest.raises(ConfigError, match=r"no int8 products here \(.+\): use --quantization none"):
        int8_product(CPU, KERNELS)


@needs_c
def test_to_pack_a_weight_in_c_takes_no_memory_but_its_own() -> None:
    product = load_int8_product()
    assert product is not None
    weight, taken = torch.ones(4096, 1024, dtype=torch.int8), list[int]()
    with torch.profiler.profile(profile_memory=True) as profile:
        product.pack(weight, scale=torch.ones(4096))
    for event in profile.events():
        taken.append(event.self_cpu_memory_usage)
    assert sum(bytes_ for bytes_ in taken if bytes_ > 0) < 1.1 * weight.nbytes


FLOAT_PRODUCTS = {dtype: float_products(dtype, CPU, KERNELS) for dtype in (torch.float32, torch.bfloat16)}


def gate(out: Tensor) -> Tensor:
    """By its definition."""
    gates, ups = out.chunk(2, -1)
    return F.silu(gates) * ups


@pytest.mark.parametrize(
    ("product", "dtype", "rounding"),
    [
        pytest.param(product, dtype, rounding, id=f"{type(product).__name__}-{dtype}")
        for dtype, rounding in ((torch.float32, 2**-18), (torch.bfloat16, 2**-8))
        for product in FLOAT_PRODUCTS[dtype]
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_packed_layer_computes_what_a_plain_one_does(
    product: PackedProduct, dtype: torch.dtype, rounding: float, with_bias: bool, gated: bool
) -> None:
    torch.manual_seed(5)
    weight, bias = torch.randn(48, 130).to(dtype) / 4, torch.randn(48).to(dtype) if with_bias else None
    gate_of_plain = KERNELS.silu_and_mul if gated else None
    made = Linear(weight, bias, gate_of_plain)
    made.pack(product, range(1, 9), keeps_weight=True)
    packed_alone = Linear(weight, bias, gate_of_plain)
    packed_alone.pack(product, range(10**9), keeps_weight=False)
    for rows in (0, 1, 8, 9, 300):
        x = torch.randn(130, rows).to(dtype).T  # its rows are not contiguous
        exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        most = float(exact.abs().amax()) + 1 if gated and rows else 1.0  # what an error of one half is multiplied by
        ungated, exact = exact, gate(exact) if gated else exact
        for one in (made, packed_alone):
            out = one(x)
            assert torch.allclose(one.ungated(x).double(), ungated, rtol=rounding, atol=130 * rounding / 32)
            assert out.dtype == dtype and out.shape == exact.shape
            assert torch.allclose(out.double(), exact, rtol=(4 if gated else 1) * rounding, atol=130 * rounding / 32 * most)


@pytest.mark.parametrize(("outputs", "inputs", "gated"), SIZES)
def test_a_row_in_c_depends_on_no_other_row_and_no_number_of_threads(outputs: int, inputs: int, gated: bool) -> None:
    product = load_panel_product()
    if product is None:
        pytest.skip("there is no C compiler")
    torch.manual_seed(inputs)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    packed = product.pack(weight, bias, gated=gated)
    wide = torch.full((40, inputs + 3), torch.nan)
    wide[:, :inputs] = torch.randn(40, inputs)
    exact = wide[:, :inputs].double() @ weight.double().T + bias
    most = float(exact.abs().amax()) if gated else 1.0
    alone = torch.cat([product(wide[row : row + 1, :inputs].contiguous(), packed) for row in range(40)])
    assert torch.allclose(alone.double(), gate(exact) if gated else exact, rtol=1e-5, atol=1e-5 * inputs**0.5 * most)
    with numbers_of_threads() as each:
        for _ in each:
            for rows in (0, 1, 5, 8, 9, 15, 24, 40):
                assert torch.equal(product(wide[:rows, :inputs], packed), alone[:rows])  # its rows are not next to each other
            assert torch.equal(product(wide[:, :inputs].T.contiguous().T, packed), alone)


@pytest.mark.skipif(load_panel_product() is None, reason="there is no C compiler")
def test_a_gate_in_c_is_right_where_exponents_end() -> None:
    product = load_panel_product()
    assert product is not None
    gates = torch.tensor([-3e38, -200.0, -126.0, -88.0, -87.0, -20.0, -1.0, -1e-30, 0.0, 1e-30, 1.0, 20.0, 88.0, 126.0, 3e38])
    weight = torch.cat([gates, torch.ones(len(gates))])[:, None]
    out = product(torch.ones(1, 1), product.pack(weight, gated=True))[0]
    assert torch.allclose(out, F.silu(gates.double()).float(), rtol=1e-6, atol=1e-35)
    lost = product(torch.tensor([[torch.nan]]), product.pack(weight, gated=True))
    assert lost.isnan().all()


def test_what_computes_a_dtype_here_is_found_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert float_products(torch.float32, torch.device("cuda"), KERNELS) == float_products(torch.float64, CPU, KERNELS) == []
    assert not any(isinstance(product, NativeProduct) for product in FLOAT_PRODUCTS[torch.bfloat16])
    assert any(isinstance(product, NativeProduct) for product in FLOAT_PRODUCTS[torch.float32]) == (
        load_panel_product() is not None
    )
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not any(isinstance(product, OneDnnProduct) for product in float_products(torch.float32, CPU, KERNELS))


PROMPTS = prompts_of(3, 40, 90)
needs_int8 = pytest.mark.skipif(not PRODUCTS, reason="no product in int8 is right on this processor")


def quantised(x: Tensor, largest: int) -> Tensor:
    """What the definition makes of each row, in float64."""
    step = x.double().abs().amax(-1, keepdim=True).clamp_min(1e-30) / largest
    return (x.double() / step).round() * step


def ties(x: Tensor, largest: int) -> Tensor:
    """A step for each number that lies between two of them, 0 for all others: [rows, inputs]."""
    step = x.double().abs().amax(-1, keepdim=True).clamp_min(1e-30) / largest
    between = ((x.double() / step) % 1 - 0.5).abs() < 1e-4
    return between * step


def layer(weight: Tensor, bias: Tensor | None, product: PackedProduct) -> Int8Linear:
    made = Int8Linear.empty(len(weight), weight.shape[1], bias, product, KERNELS)
    made.put(slice(0, 16), weight[:16])
    made.put(slice(16, None), weight[16:])
    made.pack()
    return made


@needs_int8
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda each: f"{type(each).__name__}-{largest_of(each)}")
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2.0**-20), (torch.bfloat16, 2.0**-8)])
def test_a_product_is_that_of_its_definition_and_near_the_exact_one(
    dtype: torch.dtype, rounding: float, product: PackedProduct
) -> None:
    largest = largest_of(product)
    torch.manual_seed(4)
    weight = torch.randn(48, 321, dtype=dtype) * torch.logspace(-3, 3, 48, dtype=dtype)[:, None]
    for rows, bias in ((0, None), (1, None), (37, torch.randn(48, dtype=dtype))):
        x = torch.randn(rows, 321, dtype=dtype) ** 3
        out = layer(weight, bias, product)(x)
        assert out.shape == (rows, 48) and out.dtype == dtype
        added = torch.zeros(48, dtype=torch.float64) if bias is None else bias.double()
        weight8, x8 = quantised(weight, 127), quantised(x, largest)
        size = x8.abs() @ weight8.abs().T + added.abs()
        defined, exact = x8 @ weight8.T + added, x.double() @ weight.double().T + added
        # a number between two steps may be rounded to either
        tie = ties(x, largest) @ weight8.abs().T + x8.abs() @ ties(weight, 127).T
        assert ((out.double() - defined).abs() <= rounding * defined.abs() + 1e-5 * size + tie).all()

        def error(of: Tensor, steps: int) -> Tensor:
            return (of.double().abs().amax(-1, keepdim=True) * 0.5 / steps).expand(of.shape)

        error_x, error_weight = error(x, largest), error(weight, 127)
        bound = x.double().abs() @ error_weight.T + error_x @ weight.double().abs().T + error_x @ error_weight.T
        assert ((out.double() - exact).abs() <= bound + rounding * exact.abs() + 1e-5 * size).all()
        assert not rows or ((out.double() - exact).abs() > 0.01 * bound).any(), "the bound is no wider than it must be by far"


def by_definition(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float64, but for the quantisation of weights and inputs of linear layers."""
    largest = largest_of(int8_product(CPU, KERNELS))
    made = copy.deepcopy(model).double()
    for layer in made.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(quantised(layer.weight.data, 127), requires_grad=False)
            layer.register_forward_pre_hook(lambda _, given: (quantised(given[0], largest),))
    return made


@needs_int8
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_models_logits_are_as_near_as_the_definition_makes_them(tmp_path: Path, ranks: int) -> None:
    """With biases and a tied head; on ranks with a head of its own, whose scales are of parts of rows."""
    model = (
        qwen2(initializer_range=0.05, tie_word_embeddings=True)
        if ranks == 1
        else qwen3(initializer_range=0.05, tie_word_embeddings=False)
    )
    path, exact, definition = saved(model, tmp_path), copy.deepcopy(model).double(), by_definition(model)
    if ranks == 1:
        of_ranks = [answers(runner(path, quantization="int8"), PROMPTS, 4, chunk_tokens=30)]
    else:
        of_ranks = answers_of_ranks(path, ranks, PROMPTS, 4, 30, quantization="int8")
    for given in of_ranks:
        for answer in given:
            expected = reference_logits(exact, answer).double()
            far = float((reference_logits(definition, answer).double() - expected).norm() / expected.norm())
            ours = float((torch.stack(answer.logits).double() - expected).norm() / expected.norm())
            assert 0.5 * far < ours < 2 * far < 0.2
