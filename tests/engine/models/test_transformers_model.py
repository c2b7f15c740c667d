"""Models that run through transformers: their answers are its own, and those whose attention is not ours are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.granite import modeling_granite

from common.errors import ConfigError
from engine.models.served_shape import read_served_shape
from engine.models.transformers_check import Different, described_mask
from engine.models.transformers_model import TransformersModel, load_transformers_model
from engine.models.weights import Loading
from engine.ports import LayerAttention
from tests.engine.checkpoints import VOCAB, mixtral, prompts_of, saved
from tests.engine.exact import answers, assert_exact, runner

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "tie_word_embeddings": False,
    "pad_token_id": None, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip


def model_of(name: str, **fields: object) -> PreTrainedModel:
    """A small model with random weights. name: of its config class, without Config."""
    config = getattr(transformers, f"{name}Config")(**(SIZES | fields))
    torch.manual_seed(3)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval()


def gemma2() -> PreTrainedModel:
    return model_of("Gemma2", head_dim=32, sliding_window=24, query_pre_attn_scalar=20, attn_logit_softcapping=3.0)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "softcap, and windows in every other layer": gemma2,
    "learned positions": lambda: model_of("GPT2", num_key_value_heads=4),
    "heads rotated in part, attention beside the mlp": lambda: model_of("GPTNeoX", rotary_pct=0.25, num_key_value_heads=4),
    "no rotation in some layers": lambda: model_of("SmolLM3", no_rope_layers=[1, 0]),
    "multipliers": lambda: model_of("Granite", attention_multiplier=0.2, logits_scaling=3.0, residual_multiplier=0.5),
    "one window, biases": lambda: model_of("Starcoder2", sliding_window=24),
}


@pytest.mark.parametrize("what", MODELS)
def test_greedy_answers_equal_those_of_transformers(tmp_path: Path, what: str) -> None:
    model = MODELS[what]()
    said: list[str] = []
    made = runner(saved(model, tmp_path), said.append, page_size=8)
    assert_exact(model, answers(made, prompts_of(1, 23, 24, 120), 6, chunk_tokens=37))
    assert any("through transformers' own implementation" in line and "slower" in line for line in said)


def load(path: Path, dtype: torch.dtype = torch.float32) -> TransformersModel:
    loading = Loading(dtype, torch.device("cpu"), 256)
    return load_transformers_model(path, read_served_shape(path), loading, lambda text: None)


def test_how_layers_attend_is_read_off_the_model(tmp_path: Path) -> None:
    in_window, everywhere = (LayerAttention(20**-0.5, window, 3.0) for window in (24, None))
    assert load(saved(gemma2(), tmp_path)).attention == [in_window, everywhere]


def test_two_models_live_in_one_process(tmp_path: Path) -> None:
    models = [MODELS["multipliers"](), gemma2()]
    made = [runner(saved(model, tmp_path / str(number))) for number, model in enumerate(models)]
    prompts = [np.arange(40, dtype=np.int32)]
    for one, model in zip(made, models, strict=True):
        assert_exact(model, answers(one, prompts, 3, chunk_tokens=16))


def test_a_context_ends_where_transformers_would_change_the_angles_of_keys_in_pages(tmp_path: Path) -> None:
    scaled = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    model = model_of("Phi3", original_max_position_embeddings=64, rope_parameters=scaled)
    assert read_served_shape(saved(model, tmp_path)).context_tokens == 64


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "attention sinks": (lambda: model_of("GptOss", head_dim=16, num_local_experts=4), "it has attention sinks"),
    "other dimensions of values": (
        lambda: model_of(
            "DeepseekV3", num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
            v_head_dim=12, first_k_dense_replace=2,
        ),
        "keys are of 16 and its values of 12 dimensions",
    ),
    "ALiBi": (lambda: model_of("Bloom", n_head=4), "does not let others compute its attention"),
    "a state beside KV": (
        lambda: model_of("Lfm2", layer_types=["conv", "full_attention"]), "layers of other kinds than attention .*: conv",
    ),
    "no causal mask": (lambda: model_of("Bert"), "neither causal nor a sliding window"),
    "a mask of its own": (lambda: model_of("Doge"), "it makes its mask itself"),
    "arguments not handed down": (lambda: model_of("Nemotron"), "does not hand arguments of its forward down"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_of_another_attention_is_refused_by_name_with_the_reason(tmp_path: Path, what: str) -> None:
    model, reason = REFUSED[what]
    made = model()
    with pytest.raises(ConfigError, match=f"{type(made).__name__} is not supported; .*{reason}"):
        load(saved(made, tmp_path))


def hidden_sink(original: Callable[..., Any]) -> Callable[..., Any]:
    """Attention that leaves some of its weight to nothing, and says so to nobody."""

    def attention(*args: Any, **kwargs: Any) -> Any:
        out, weights = original(*args, **kwargs)
        return out * 0.99, weights

    return attention


def token_shift(original: Callable[..., Any]) -> Callable[..., Any]:
    """An mlp that also looks at the token before: a state that is not in the KV pages."""

    def mlp(module: torch.nn.Module, x: torch.Tensor) -> Any:
        return original(module, x + 0.02 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])

    return mlp


@pytest.mark.parametrize(
    ("owner", "name", "change"),
    [(modeling_granite, "eager_attention_forward", hidden_sink), (modeling_granite.GraniteMLP, "forward", token_shift)],
)
def test_a_model_that_differs_in_what_it_does_not_say_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]
) -> None:
    path = saved(MODELS["multipliers"](), tmp_path)
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ConfigError, match=r"GraniteForCausalLM is not supported; .* the logits differ by 0\.0"):
            load(path, dtype)


def test_a_mask_that_is_causal_only_for_late_positions_is_refused() -> None:
    """A prefix whose tokens all see each other, as in PrefixLM."""

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) | ((key < 100) & (query < 100))

    with pytest.raises(Different, match="neither causal nor a sliding window"):
        described_mask(mask, 4, 4, SimpleNamespace(max_position_embeddings=256), torch.device("cpu"))


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"architectures": ["NewForCausalLM"], "model_type": "new"}, "transformers does not know it"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "has no causal language model for its config"),
        ({"architectures": ["GraniteForTokens"], "model_type": "granite"}, "takes it for GraniteForCausalLM"),
        (
            {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "quantization_config": {"quant_method": "awq"}},
            r"its weights are quantised \(awq, ",
        ),
    ],
)
def test_a_checkpoint_that_transformers_cannot_serve_is_refused_before_its_weights_are_read(
    tmp_path: Path, written: dict[str, Any], reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError, match=rf"{written['architectures'][0]} is not supported; .*{reason}"):
        read_served_shape(tmp_path)


@pytest.mark.parametrize(
    ("layers", "named"), [(3, r"lacks weights of .*: model\.layers\.2"), (1, r"not of .*: model\.layers\.1")]
)
def test_weights_that_are_missing_or_that_the_model_has_not_are_named(tmp_path: Path, layers: int, named: str) -> None:
    path = saved(MODELS["multipliers"](), tmp_path)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', f'"num_hidden_layers": {layers}'))
    with pytest.raises(ConfigError, match=named):
        load(path)


def test_weight_files_are_checked_before_transformers_reads_them(tmp_path: Path) -> None:
    path = saved(MODELS["multipliers"](), tmp_path)
    file = path / "model.safetensors"
    weights = load_file(file)
    quantised = {name: weight.to(torch.int8) if weight.ndim == 2 else weight for name, weight in weights.items()}
    save_file(quantised, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"the weight \S+ is of I8"):
        load(path)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model.safetensors is not a safetensors file, or not a whole one"):
        load(path)


def test_a_model_that_makes_much_of_roundings_is_served_in_half_precision(tmp_path: Path) -> None:
    """With such weights its logits differ by half of their spread between two orders of summing."""
    sizes = {"num_hidden_layers": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "initializer_range": 0.2}
    path = saved(model_of("GraniteMoe", **sizes), tmp_path)
    made = runner(path, dtype="bfloat16")
    [answer] = answers(made, [np.arange(30, dtype=np.int32)], 2, chunk_tokens=16)
    assert torch.stack(answer.logits).isfinite().all()
    dtypes = {tensor.dtype for tensor in made.model._causal.parameters()}  # type: ignore[attr-defined]
    assert dtypes == {torch.bfloat16}, "the comparison gave the weights back as they were"


def test_a_model_whose_activations_are_too_large_for_its_dtype_is_refused(tmp_path: Path) -> None:
    path = saved(model_of("Granite", embedding_multiplier=1e6), tmp_path)
    with pytest.raises(ConfigError, match=r"in torch.float16 its logits are infinite or not numbers: give another --dtype"):
        load(path, torch.float16)


def test_random_weights_need_no_weight_files_and_are_the_same_in_each_process(tmp_path: Path) -> None:
    path = saved(gemma2(), tmp_path)
    (path / "model.safetensors").unlink()
    prompts, given = [np.arange(30, dtype=np.int32)], []
    for seed in range(2):
        torch.manual_seed(seed)  # of another process
        before = torch.get_rng_state()
        made = runner(path, load_format="dummy", dtype="bfloat16")
        given.append(torch.stack(answers(made, prompts, 3, chunk_tokens=16)[0].logits))
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(*given)


def test_weights_in_fp8_are_refused_by_name(tmp_path: Path) -> None:
    for number, model in enumerate((gemma2(), mixtral())):
        with pytest.raises(ConfigError, match=f"--quantization fp8 is not supported for {type(model).__name__}"):
            runner(saved(model, tmp_path / str(number)), quantization="fp8", dtype="bfloat16")
