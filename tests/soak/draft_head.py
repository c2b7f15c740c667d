"""An EAGLE-3 head for the demo model, trained here in minutes: one layer that learns what follows from the model's hidden states.

Not how heads of large models are trained: it reads the model's own examples, and sees its own mistakes only by being given its
own output in place of the model's for all places of a text at once (Li et al. 2025 build a tree of them).
"""

import json
import time
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, Qwen3ForCausalLM

from bench.report import say
from demo.examples import collate, draw

TAPS, BATCHES, DEPTH, RATE = (1, 2, 3), 600, 3, 2e-3
HEADS, KV_HEADS, HEAD_DIM, BASE, EPS = 4, 2, 64, 10000.0, 1e-6


class Head(torch.nn.Module):
    """The formulas of `engine.models.eagle3`, over whole texts. Its names are those of a checkpoint, with _ for dots."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        sizes = {
            "fc": (width, 3 * width), "midlayer.self_attn.q_proj": (HEADS * HEAD_DIM, 2 * width),
            "midlayer.self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * width),
            "midlayer.self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * width),
            "midlayer.self_attn.o_proj": (width, HEADS * HEAD_DIM), "midlayer.mlp.gate_proj": (2 * width, width),
            "midlayer.mlp.up_proj": (2 * width, width), "midlayer.mlp.down_proj": (width, 2 * width), "lm_head": (vocab, width),
        }  # fmt: skip
        norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
        weights = {name: torch.randn(size) / size[1] ** 0.5 for name, size in sizes.items()}
        weights |= {name: torch.ones(width) for name in norms}
        self.weights = torch.nn.ParameterDict({name.replace(".", "_"): weight for name, weight in weights.items()})
        self.names = {name.replace(".", "_"): f"{name}.weight" for name in weights}

    def forward(self, embedded: Tensor, features: Tensor) -> Tensor:
        """[texts, tokens, width] each. Returns the layer's output before the last norm."""
        texts, tokens, _ = embedded.shape
        x = torch.cat([self.norm(embedded, "midlayer_input_layernorm"), self.norm(features, "midlayer_hidden_norm")], dim=-1)
        query, key, value = (
            F.linear(x, self.weights[f"midlayer_self_attn_{each}_proj"]).view(texts, tokens, -1, HEAD_DIM).transpose(1, 2)
            for each in "qkv"
        )
        query, key = self._rotated(query), self._rotated(key)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        attended = F.linear(out.transpose(1, 2).reshape(texts, tokens, -1), self.weights["midlayer_self_attn_o_proj"])
        residual = features + attended
        x = self.norm(residual, "midlayer_post_attention_layernorm")
        gate, up = (F.linear(x, self.weights[f"midlayer_mlp_{each}_proj"]) for each in ("gate", "up"))
        return residual + F.linear(F.silu(gate) * up, self.weights["midlayer_mlp_down_proj"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name], EPS)

    def _rotated(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2])[:, None] * BASE ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1)


def train(model_folder: Path, folder: Path, batches: int = BATCHES) -> Path:
    """Trains a head for the model, and writes its checkpoint into the folder, unless there is one."""
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    model = Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval().requires_grad_(False)
    tokenizer, random = AutoTokenizer.from_pretrained(model_folder), Random("draft head")
    width, vocab = model.config.hidden_size, model.config.vocab_size
    head, began_s = Head(width, vocab), time.monotonic()
    with torch.no_grad():
        head.weights["lm_head"].copy_(model.lm_head.weight)
    adam = torch.optim.AdamW(head.parameters(), lr=RATE, weight_decay=0.0)
    rates = torch.optim.lr_scheduler.OneCycleLR(adam, RATE, total_steps=batches)
    for number in range(batches):
        ids, counts = collate(draw(tokenizer, random, 0.2)[1], pad=0)
        with torch.no_grad():
            states = model.model(input_ids=ids, output_hidden_states=True).hidden_states
            embedded, tapped = model.get_input_embeddings()(ids[:, 1:]), torch.cat([states[each] for each in TAPS], dim=-1)
        features, loss, right = F.linear(tapped[:, :-1], head.weights["fc"]), torch.zeros(()), list[float]()
        for depth in range(DEPTH):
            hidden = head(embedded[:, depth:], features)
            counted = counts[:, 2 + depth :]
            logits = F.linear(head.norm(hidden[:, :-1], "norm")[counted], head.weights["lm_head"])
            wanted = ids[:, 2 + depth :][counted]
            loss = loss + F.cross_entropy(logits, wanted)
            right.append(float((logits.argmax(-1) == wanted).float().mean()))
            features = hidden[:, :-1]
        adam.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        adam.step()
        rates.step()
        if (number + 1) % 50 == 0:
            say(f"{number + 1} batches in {time.monotonic() - began_s:.0f} s: right {', '.join(f'{each:.3f}' for each in right)}")
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: head.weights[key].detach().contiguous() for key, name in head.names.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": width, "intermediate_size": 2 * width,
        "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "vocab_size": vocab, "max_position_embeddings": 4096, "rms_norm_eps": EPS, "rope_theta": BASE,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [each - 1 for each in TAPS]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder
