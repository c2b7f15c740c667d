"""Small random-weight checkpoints of the supported architectures, made by transformers.

Owns their sizes. What they answer is peaked, so that rounding decides nothing.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from common.ids import Int32Array

VOCAB = 500
SIZES: dict[str, object] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip


def llama(**changes: object) -> PreTrainedModel:
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6}
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | sizes | changes))).eval()


def qwen3(**changes: object) -> PreTrainedModel:
    torch.manual_seed(2)
    return Qwen3ForCausalLM(Qwen3Config(**(SIZES | {"head_dim": 32, "tie_word_embeddings": True} | changes))).eval()


def mistral(**changes: object) -> PreTrainedModel:
    torch.manual_seed(3)
    return MistralForCausalLM(MistralConfig(**(SIZES | {"sliding_window": 40} | changes))).eval()


def qwen2(**changes: object) -> PreTrainedModel:
    torch.manual_seed(4)
    return Qwen2ForCausalLM(Qwen2Config(**(SIZES | changes))).eval()


def mixtral(**changes: object) -> PreTrainedModel:
    torch.manual_seed(5)
    return MixtralForCausalLM(MixtralConfig(**(SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2} | changes))).eval()


def qwen3_moe(**changes: object) -> PreTrainedModel:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 32}
    torch.manual_seed(6)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(SIZES | experts | changes))).eval()


def saved(model: PreTrainedModel, path: Path) -> Path:
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)  # norms and biases that matter
    model.save_pretrained(path)
    return path


def prompts_of(*lengths: int) -> list[Int32Array]:
    """Random tokens, the same for as many prompts."""
    random = np.random.default_rng(len(lengths))
    return [random.integers(3, VOCAB, length).astype(np.int32) for length in lengths]
