"""The demo model before training: Qwen3 with an induction circuit set by hand, everything else adding nothing.

Owns the architecture and the first weights. Knows the vocabulary; does not know the tasks or how training goes on.

Looking up needs induction (Olsson et al. 2022): find the last place where the present token stood, and say what came next.
A model of this size finds that very late in training, so it begins with it. Hidden dimensions at the beginning:

      0              1 … 36                   37 … 255
    ┌──────────┬────────────────────────┬──────────────────────────┐
    │ constant │ code of previous token │ embedding of this token  │
    └──────────┴────────────────────────┴──────────────────────────┘

Layer 0, head 0 looks one position back by rotary angle alone, and writes a code of what stands there. Layer 1, heads 0 and 2
look for positions whose previous-token code is the code of the present token, and add the embedding found there: the token
that followed last time. Training may change all of it.
"""

import math

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from demo.tokenizer import CONTEXT

HIDDEN, HEAD_DIM, LAYERS = 256, 64, 4
ROPE_BASE = 10_000_000.0
FAST_PAIRS = 14
"""Pairs of a head's dimensions that turn too far over the context to compare contents."""
CODE = HEAD_DIM - 2 * FAST_PAIRS
FIRST_OF_TOKEN = 1 + CODE
SPREAD = 0.05
"""Standard deviation of an embedding's components."""
SPACE = "Ġ"
"""How byte-level BPE writes a space in front of a token."""


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A float32 model, the same one each time."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=640,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embeddings(tokenizer.get_vocab(), generator))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        set_induction(model, generator)
    return model


def embeddings(vocabulary: dict[str, int], generator: torch.Generator) -> Tensor:
    """[vocabulary, HIDDEN]: random, but a word with a space in front of it begins close to the word without."""
    table = torch.zeros(len(vocabulary), HIDDEN)
    table[:, 0] = 2 * SPREAD
    own = SPREAD * torch.randn(len(vocabulary), HIDDEN - FIRST_OF_TOKEN, generator=generator)
    table[:, FIRST_OF_TOKEN:] = own
    for token, index in vocabulary.items():
        bare = vocabulary.get(token.removeprefix(SPACE), index)
        if bare != index:
            table[index, FIRST_OF_TOKEN:] = 0.8 * own[bare] + 0.6 * own[index]
    return table


def directions(count: int, generator: torch.Generator) -> Tensor:
    """[count, HIDDEN]: orthonormal rows within the dimensions of the embedding."""
    width = HIDDEN - FIRST_OF_TOKEN
    rows = torch.zeros(count, HIDDEN)
    rows[:, FIRST_OF_TOKEN:] = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q[:count]
    return rows


def set_induction(model: Qwen3ForCausalLM, generator: torch.Generator) -> None:
    """Write the circuit that this file's docstring draws. Call without gradients."""
    first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    look_back(model)
    code = directions(CODE, generator)
    first.v_proj.weight[:HEAD_DIM] = 0
    first.v_proj.weight[:CODE] = code
    first.o_proj.weight[1:FIRST_OF_TOKEN, :CODE] = SPREAD * torch.eye(CODE)

    half = HEAD_DIM // 2
    slow = torch.cat([torch.arange(FAST_PAIRS, half), torch.arange(half + FAST_PAIRS, HEAD_DIM)])
    copied = directions(2 * HEAD_DIM, generator)
    second.q_norm.weight.fill_(2.0)
    for head, kv_head in ((0, 0), (2, 1)):
        query, key = slow + head * HEAD_DIM, slow + kv_head * HEAD_DIM
        second.q_proj.weight[head * HEAD_DIM : (head + 1) * HEAD_DIM] = 0
        second.q_proj.weight[query] = code
        second.k_proj.weight[kv_head * HEAD_DIM : (kv_head + 1) * HEAD_DIM] = 0
        second.k_proj.weight[key, torch.arange(1, FIRST_OF_TOKEN)] = 1.0
        half_of_copied = copied[kv_head * HEAD_DIM : (kv_head + 1) * HEAD_DIM]
        second.v_proj.weight[kv_head * HEAD_DIM : (kv_head + 1) * HEAD_DIM] = half_of_copied
        second.o_proj.weight[:, head * HEAD_DIM : (head + 1) * HEAD_DIM] = 3 * SPREAD * half_of_copied.T


def look_back(model: Qwen3ForCausalLM) -> None:
    """Head 0 of layer 0 attends to the previous token.

    The constant component makes a key at rotary angle 0 and a query at minus one position's angle in the fastest frequencies,
    so their product peaks one position back.
    """
    attention, half = model.model.layers[0].self_attn, HEAD_DIM // 2
    attention.q_proj.weight[:HEAD_DIM] = 0
    attention.k_proj.weight[:HEAD_DIM] = 0
    for pair, share in enumerate((0.4, 0.25, 0.15, 0.1, 0.05, 0.05)):
        angle, size = ROPE_BASE ** (-pair / half), share**0.5
        attention.k_proj.weight[pair, 0] = size
        attention.q_proj.weight[pair, 0] = size * math.cos(angle)
        attention.q_proj.weight[pair + half, 0] = -size * math.sin(angle)
    attention.q_norm.weight.fill_(4.0)
