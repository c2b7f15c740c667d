"""Int8 layers: against float64 on the same quantised numbers, within the bound of the format on the exact ones, in models too."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.engine.kernels.choice import make_kernels
from common.engine.models import int8
from common.engine.models.decoder import Decoder
from common.engine.models.int8 import Int8Linear, OneDnnProduct, QuantisedProduct, int8_product
from common.engine.models.int8_product import MOST_INPUTS, load_int8_product
from common.errors import ConfigError
from tests.common.engine.checkpoints import VOCAB, qwen2, qwen3, saved
from tests.common.engine.exact import answers, reference_logits, runner
from tests.common.engine.ranks import answers_of_ranks

CPU = torch.device("cpu")
PROMPTS = [np.random.default_rng(6).integers(3, VOCAB, length).astype(np.int32) for length in (3, 40, 90)]


KERNELS = make_kernels(CPU)


def products_here() -> list[QuantisedProduct]:
    """Those that are right on this processor: the one in C, and oneDNN's with tokens of 8 and of 7 bits."""
    in_c = load_int8_product()
    try:
        of_onednn = [product for largest in (127, 63) if int8._is_right(product := OneDnnProduct(largest, KERNELS))]
    except (RuntimeError, AttributeError, NotImplementedError):
        of_onednn = []
    return [*of_onednn, *([] if in_c is None else [in_c])]


PRODUCTS = products_here()
needs_int8 = pytest.mark.skipif(not PRODUCTS, reason="no product in int8 is right on this processor")


def largest_of(product: QuantisedProduct) -> int:
    """The largest number of its quantised tokens."""
    return product._largest if isinstance(product, OneDnnProduct) else 127


def quantised(x: Tensor, largest: int) -> Tensor:
    """What the definition makes of each row, in float64."""
    step = x.double().abs().amax(-1, keepdim=True).clamp_min(1e-30) / largest
    return (x.double() / step).round() * step


def layer(weight: Tensor, bias: Tensor | None, product: QuantisedProduct) -> Int8Linear:
    made = Int8Linear.empty(len(weight), weight.shape[1], bias, product, KERNELS)
    made.put(slice(0, 16), weight[:16])
    made.put(slice(16, None), weight[16:])
    made.pack()
    return made


@needs_int8
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda each: f"{type(each).__name__}-{largest_of(each)}")
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2.0**-20), (torch.bfloat16, 2.0**-8)])
def test_a_product_is_that_of_its_definition_and_near_the_exact_one(
    dtype: torch.dtype, rounding: float, product: QuantisedProduct
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
        # a number between two steps may be rounded to either, of which there are few
        tie = x.double().abs().amax(-1, keepdim=True) / largest * weight8.abs().amax(-1) * 2
        assert ((out.double() - defined).abs() <= rounding * defined.abs() + 1e-5 * size + tie).all()

        def error(of: Tensor, steps: int) -> Tensor:
            return (of.double().abs().amax(-1, keepdim=True) * 0.5 / steps).expand(of.shape)

        error_x, error_weight = error(x, largest), error(weight, 127)
        bound = x.double().abs() @ error_weight.T + error_x @ weight.double().abs().T + error_x @ error_weight.T
        assert ((out.double() - exact).abs() <= bound + rounding * exact.abs() + 1e-5 * size).all()
        assert not rows or ((out.double() - exact).abs() > 0.01 * bound).any(), "the bound is no wider than it must be by far"


@pytest.mark.skipif(load_int8_product() is None, reason="this processor does not multiply bytes, or there is no C compiler")
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (33, 62), (32, 64), (80, 320), (515, 130)])
def test_the_product_in_c_depends_on_no_other_row_and_no_number_of_threads(outputs: int, inputs: int) -> None:
    product = load_int8_product()
    assert product is not None
    torch.manual_seed(inputs)
    made = layer(torch.randn(outputs, inputs), torch.randn(outputs), product)
    wide = torch.full((40, inputs + 3), torch.inf)
    wide[:, :inputs] = torch.randn(40, inputs)
    wide[7, inputs // 2], wide[6, 0], wide[9] = torch.nan, torch.inf, 0.0
    before, alone = torch.get_num_threads(), torch.cat([made(wide[row : row + 1, :inputs].contiguous()) for row in range(40)])
    assert alone[6:8].isnan().all() and alone[[*range(6), *range(8, 40)]].isfinite().all()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in range(41):
                assert torch.equal(made(wide[:rows, :inputs])[:6], alone[: min(rows, 6)])  # its rows are not next to each other
                assert torch.equal(made(wide[8:rows, :inputs]), alone[8:rows])
            assert torch.equal(made(wide[10:, :inputs].T.contiguous().T), alone[10:])
    finally:
        torch.set_num_threads(before)


def test_the_product_is_the_one_in_c_but_where_there_is_none_or_tiles_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    class InC(OneDnnProduct):
        """Stands for the one in C on processors that have none."""

    if not any(isinstance(product, OneDnnProduct) for product in PRODUCTS):
        pytest.skip("oneDNN has no int8 products here")
    in_c = InC(63, KERNELS)
    for found, flags, expected in (
        (in_c, "avx512_vnni", InC),
        (in_c, "avx512_vnni amx_int8", OneDnnProduct),
        (None, "", OneDnnProduct),
    ):
        monkeypatch.setattr(int8, "load_int8_product", lambda found=found: found)
        monkeypatch.setattr(int8, "processor_flags", lambda flags=flags: flags)
        assert type(int8_product(CPU, KERNELS)) is expected
    monkeypatch.setattr(int8, "load_int8_product", lambda: in_c)
    monkeypatch.setattr(int8, "processor_flags", lambda: "")
    right = OneDnnProduct.__call__
    monkeypatch.setattr(InC, "__call__", lambda self, *given: right(self, *given) + 1)
    assert type(int8_product(CPU, KERNELS)) is OneDnnProduct, "a product that is wrong is not used"


def test_int8_is_refused_where_it_cannot_be_computed_or_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--quantization int8 computes on CPU, and the device is cuda: use fp8 or none"):
        int8_product(torch.device("cuda"), KERNELS)
    if PRODUCTS:
        with pytest.raises(
            ConfigError, match=f"layers of at most {MOST_INPUTS} inputs, but one of this model has {MOST_INPUTS + 1}"
        ):
            Int8Linear.empty(4, MOST_INPUTS + 1, None, PRODUCTS[0], KERNELS)
    monkeypatch.setattr(int8, "load_int8_product", lambda: None)
    right = OneDnnProduct.__call__

    def saturating(self: OneDnnProduct, *given: Any) -> Tensor:
        """Sums of two products that do not fit into 16 bits are wrong, as on processors without VNNI."""
        out = right(self, *given)
        return out if 2 * 127 * (2 * self._largest + 1) < 2**15 else out - 1

    def refusing(*_: object) -> Tensor:
        raise RuntimeError("could not create a primitive\nand more")

    if any(isinstance(product, OneDnnProduct) for product in PRODUCTS):
        monkeypatch.setattr(OneDnnProduct, "__call__", saturating)
        product = int8_product(CPU, KERNELS)
        assert isinstance(product, OneDnnProduct) and product._largest == 63
        monkeypatch.setattr(OneDnnProduct, "__call__", lambda self, *given: right(self, *given) + 1)
        with pytest.raises(ConfigError, match="int8 products are wrong on this processor: use --quantization none"):
            int8_product(CPU, KERNELS)
    monkeypatch.setattr(OneDnnProduct, "__call__", refusing)
    with pytest.raises(ConfigError, match=r"no int8 products here \(.+\): use --quantization none"):
        int8_product(CPU, KERNELS)


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
        of_ranks = [answers(runner(path, quantization="int8"), Decoder, PROMPTS, 4, chunk_tokens=30)]
    else:
        of_ranks = answers_of_ranks(path, ranks, PROMPTS, 4, 30, quantization="int8")
    for given in of_ranks:
        for answer in given:
            expected = reference_logits(exact, answer).double()
            far = float((reference_logits(definition, answer).double() - expected).norm() / expected.norm())
            ours = float((torch.stack(answer.logits).double() - expected).norm() / expected.norm())
            assert 0.5 * far < ours < 2 * far < 0.2


@pytest.mark.skipif(load_int8_product() is None, reason="this processor does not multiply bytes, or there is no C compiler")
def test_to_pack_a_weight_in_c_takes_no_memory_but_its_own() -> None:
    product = load_int8_product()
    assert product is not None
    weight, taken = torch.ones(4096, 1024, dtype=torch.int8), list[int]()
    with torch.profiler.profile(profile_memory=True) as profile:
        product.packed(weight)
    for event in profile.events():
        taken.append(event.self_cpu_memory_usage)
    assert sum(bytes_ for bytes_ in taken if bytes_ > 0) < 1.1 * weight.nbytes
