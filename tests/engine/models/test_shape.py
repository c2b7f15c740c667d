"""What a config says of a model, which part of it a rank has, and what is refused because it is missing or cannot be divided."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from common.config import Quantization
from common.errors import ConfigError
from engine.models.moe import with_one_spelling
from engine.models.registry import make_decoder
from engine.models.served_shape import read_served_shape
from engine.models.shape import DEFAULTS, check_ranks, read_shape, share_of
from engine.models.weights import Loading, WeightSlots
from engine.torch_kernels import Kernels
from tests.common.text.tiny import write_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 32,
}  # fmt: skip

EXPERTS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def write(folder: Path, name: str, content: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def config(architecture: str = "LlamaForCausalLM", **changes: object) -> dict[str, Any]:
    return {"architectures": [architecture], **SIZES, **EXPERTS.get(architecture, {}), **changes}


def reference(written: dict[str, Any], folder: Path) -> PreTrainedModel:
    """What transformers makes of a checkpoint with this config, without memory."""
    model_type = getattr(transformers, written["architectures"][0]).config_class.model_type
    write(folder, "config.json", {**written, "model_type": model_type})
    with torch.device("meta"):
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    return model


@pytest.mark.parametrize("architecture", DEFAULTS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 2, "rms_norm_eps": 0.1},
        {"sliding_window": 7},
        {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
        {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0},
        {"sliding_window": None, "use_sliding_window": True},
        {
            "sliding_window": 7, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"],
            "head_dim": 4,
        },
    ],
    ids=["no optional values", "biases", "window", "from a layer on", "everywhere", "no window", "by layer"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_optional_values_mean_what_they_mean_to_transformers(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> None:
    written = config(architecture, **changes)
    model = reference(written, tmp_path)
    shape, made = read_shape(tmp_path), model.config
    assert shape.context_tokens == made.max_position_embeddings
    assert shape.norm_eps == made.rms_norm_eps
    assert shape.rope.base == made.rope_parameters["rope_theta"]
    assert shape.tied == made.tie_word_embeddings
    windows = [window_of(model, layer) for layer in range(shape.layers)]
    assert list(shape.windows) == windows
    cpu, kernels = torch.device("cpu"), Kernels()
    slots = WeightSlots(torch.float32, cpu, kernels)
    make_decoder(shape, slots, Loading(torch.float32, cpu, 100), kernels, lambda text: None)
    expected = {name: tuple(weight.shape) for name, weight in with_one_spelling(model.state_dict().items())}
    if shape.tied:
        del expected["lm_head.weight"]
    assert {name: slot.shape for name, slot in slots.slots.items()} == expected


def window_of(model: PreTrainedModel, layer: int) -> int | None:
    """How many tokens a token sees in this layer of transformers' model."""
    if model.config.model_type == "llama":
        return None
    attention: Any = model.model.layers[layer].self_attn
    of_all = model.config.model_type in ("mistral", "mixtral")
    window: int | None = model.config.sliding_window if of_all else attention.sliding_window
    return window


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        *(({name: size for name, size in config().items() if name != key}, f"{key} is missing") for key in SIZES),
        (config(hidden_size="64"), "hidden_size must be a positive number; it is '64'"),
        (config(num_hidden_layers=0), "num_hidden_layers must be a positive number"),
        (config(max_position_embeddings=math.inf), "max_position_embeddings must be a positive number; it is inf"),
        (config(hidden_size=10**30), "hidden_size must be a whole number below 2147483648; it is 1000"),
        (config(vocab_size=10.5), "vocab_size must be a whole number"),
        (config(rms_norm_eps=True), "rms_norm_eps must be a positive number"),
        (config(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "low_freq_factor is missing"),
        (config(eos_token_id="</s>"), "eos_token_id must be a token id"),
        (config(num_key_value_heads=3), "num_attention_heads, 32, must be a multiple of num_key_value_heads, 3"),
        (config(head_dim=5), "head_dim must be even; it is 5"),
        (config(mlp_bias="yes"), "mlp_bias must be true or false; it is 'yes'"),
        (config(hidden_act="gelu"), "hidden_act gelu is not supported"),
        (
            config(quantization_config={"quant_method": "awq"}),
            r"its weights are quantised \(awq, by its quantization_config\), which is not supported",
        ),
        (config("MistralForCausalLM", sliding_window=-1), "sliding_window must be a positive number"),
        (config("Qwen3ForCausalLM", layer_types=["full_attention"]), "layer_types must be 2 times one of full_attention; it is"),
        (config("Qwen3ForCausalLM", layer_types=["sliding_attention"] * 2), "needs use_sliding_window and sliding_window"),
        (
            config("Qwen2MoeForCausalLM"),
            "Qwen2MoeForCausalLM is not supported; the nearest that is supported is Qwen3MoeForCausalLM",
        ),
        (config("MixtralForCausalLM", num_local_experts=1), "num_experts_per_tok is 2, but there are 1 experts"),
        (config("Qwen3MoeForCausalLM", mlp_only_layers=[True, "1"]), "mlp_only_layers must be a list of layers"),
        (config("MambaForCausalLM"), "MambaForCausalLM is not supported; supported are LlamaForCausalLM, "),
        (config("T5Model"), "T5Model is not supported; supported are LlamaForCausalLM, "),
        (config(architectures=None), "architectures must name the model's class"),
        ([], "must hold a JSON object"),
    ],
)
def test_a_config_that_lacks_something_or_is_invalid_is_refused_with_the_reason(
    tmp_path: Path, written: object, reason: str
) -> None:
    write(tmp_path, "config.json", written)
    with pytest.raises(ConfigError, match=reason):
        read_shape(tmp_path)


ADDED = {"added_tokens": [{"id": 9, "content": "<|im_end|>"}], "model": {"vocab": {"a": 0}}}


class TestEndOfSequence:
    """config.json says 2 here unless a generation config says otherwise."""

    def shape_eos(self, folder: Path) -> tuple[int, ...]:
        write(folder, "config.json", config(eos_token_id=2))
        return read_shape(folder).eos_token_ids

    def test_without_a_tokenizer_the_config_names_it(self, tmp_path: Path) -> None:
        assert self.shape_eos(tmp_path) == (2,)

    def test_the_generation_config_replaces_the_configs(self, tmp_path: Path) -> None:
        write(tmp_path, "generation_config.json", {"eos_token_id": [7, 8]})
        assert self.shape_eos(tmp_path) == (7, 8)
        write(tmp_path, "generation_config.json", {})
        assert self.shape_eos(tmp_path) == (2,)

    @pytest.mark.parametrize(
        ("named", "tokenizer", "expected"),
        [
            ("<|im_end|>", ADDED, (2, 9)),
            ({"content": "<|im_end|>", "special": True}, ADDED, (2, 9)),
            ("</s>", {"model": {"vocab": {"a": 0, "</s>": 1}}}, (2, 1)),
            ("</s>", {"model": {"vocab": [["a", 0.0], ["</s>", 0.0]]}}, (2, 1)),
            ("</s>", {"model": {"vocab": {"</s>": 2}}}, (2,)),
            (None, {"model": {"vocab": {"a": 0}}}, (2,)),
            ("absent", {"model": {"vocab": {"a": 0}}}, (2,)),
        ],
        ids=["added", "with properties", "a word of BPE", "a word of Unigram", "the config's too", "none", "not in the file"],
    )
    def test_the_tokenizers_own_is_added_unless_it_is_listed_or_there_is_none(
        self, tmp_path: Path, named: object, tokenizer: object, expected: tuple[int, ...]
    ) -> None:
        write(tmp_path, "tokenizer_config.json", {"eos_token": named})
        write(tmp_path, "tokenizer.json", tokenizer)
        assert self.shape_eos(tmp_path) == expected

    @pytest.mark.parametrize("tokenizer", [{}, {"model": {"vocab": 3}}, {"model": {"vocab": {}}, "added_tokens": [{}]}])
    def test_a_tokenizer_in_another_format_is_refused(self, tmp_path: Path, tokenizer: object) -> None:
        write(tmp_path, "tokenizer_config.json", {"eos_token": "</s>"})
        write(tmp_path, "tokenizer.json", tokenizer)
        with pytest.raises(ConfigError, match="tokenizers library's format"):
            self.shape_eos(tmp_path)

    def test_a_file_of_the_tokenizers_library_is_understood(self, tmp_path: Path) -> None:
        from transformers import AutoTokenizer

        folder = write_checkpoint(tmp_path / "tiny")
        (folder / "generation_config.json").unlink()
        assert self.shape_eos(folder) == (2, AutoTokenizer.from_pretrained(folder).eos_token_id)


MOE = "Qwen3MoeForCausalLM"
DIVIDED: dict[str, Any] = {"num_attention_heads": 24, "num_key_value_heads": 4, "intermediate_size": 96, "head_dim": 8}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 12, 24])
def test_ranks_have_everything_once_but_kv_heads_that_their_query_heads_share(tmp_path: Path, ranks: int) -> None:
    write(tmp_path, "config.json", config(MOE, **DIVIDED, num_experts=24, vocab_size=100))
    shape = read_shape(tmp_path)
    check_ranks(shape, ranks, "none")
    shares = [share_of(shape, rank, ranks) for rank in range(ranks)]
    for name, whole in (("heads", 24), ("intermediate", 96), ("experts", 24), ("vocabulary", 100)):
        assert [one for share in shares for one in getattr(share, name)] == list(range(whole))
    for share in shares:
        assert {head // 6 for head in share.heads} == set(share.kv_heads), "a query head finds its KV head"
        assert len(share.heads) % len(share.kv_heads) == 0
        assert len(share.vocabulary) <= share.vocabulary_rows == shares[0].vocabulary_rows
    assert sum(share.adds_biases for share in shares) == 1


@pytest.mark.parametrize(
    ("architecture", "changes", "ranks", "quantization", "reason"),
    [
        ("LlamaForCausalLM", {}, 5, "none", "it has 24 attention heads; what works is 1, 2, 4, 8, 12, 24"),
        ("LlamaForCausalLM", {}, 3, "none", "it has 4 KV heads; what works is 1, 2, 4, 8, 12, 24"),
        ("LlamaForCausalLM", {"intermediate_size": 100}, 8, "none", "its mlps are 100 wide; what works is 1, 2, 4"),
        (MOE, {"num_experts": 6}, 4, "none", "it has 6 experts; what works is 1, 2"),
        ("LlamaForCausalLM", {}, 4, "fp8", r"--quantization fp8 .* multiples of 16; what works is 1, 2"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_numbers_that_work(
    tmp_path: Path, architecture: str, changes: dict[str, object], ranks: int, quantization: Quantization, reason: str
) -> None:
    write(tmp_path, "config.json", config(architecture, **DIVIDED | changes))
    with pytest.raises(ConfigError, match=rf"--tp {ranks} cannot divide this {architecture}: {reason}$"):
        check_ranks(read_served_shape(tmp_path), ranks, quantization)


def test_a_model_of_transformers_runs_on_one_rank_only(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    shape = read_served_shape(tmp_path)
    check_ranks(shape, 1, "none")
    with pytest.raises(ConfigError, match=r"--tp 2 is not supported for GPT2LMHeadModel, .* give --tp 1"):
        check_ranks(shape, 2, "none")
