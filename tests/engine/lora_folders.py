"""Random LoRA adapters as PEFT saves them, and the models that they make of a base model.

Owns the independent reference: each weight of transformers' model becomes W + scaling * B A, in float64.
"""

import copy
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Lora:
    """An adapter to be made. ranks, alphas: by regular expressions over names of modules."""

    seed: int
    rank: int = 8
    alpha: float = 16.0
    modules: Sequence[str] = EVERY
    is_rslora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def size(self, module: str) -> tuple[int, float]:
        """The rank of a module, and its scaling."""
        rank, alpha = (
            next((value for key, value in pattern.items() if re.search(rf"(^|\.)({key})$", module)), default)
            for pattern, default in ((self.ranks, self.rank), (self.alphas, self.alpha))
        )
        return int(rank), alpha / (math.sqrt(rank) if self.is_rslora else rank)

    def factors(self, model: PreTrainedModel) -> dict[str, tuple[Tensor, Tensor]]:
        """A and B of each module, large enough to change answers."""
        generator, found = torch.Generator().manual_seed(self.seed), dict[str, tuple[Tensor, Tensor]]()
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in self.modules:
                rank, scaling = self.size(name)
                a = torch.randn(rank, module.in_features, generator=generator) / module.in_features**0.5
                b = torch.randn(module.out_features, rank, generator=generator) / (rank**0.5 * scaling)
                found[name] = a.to(self.dtype), b.to(self.dtype)
        assert found
        return found

    def saved(self, model: PreTrainedModel, path: Path, **changes: object) -> Path:
        """Its folder. changes: to the fields of its config; None: the field is left out."""
        path.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"base_model.model.{name}.lora_{letter}.weight": factor
            for name, factors in self.factors(model).items()
            for letter, factor in zip("AB", factors, strict=True)
        }
        save_file(tensors, path / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA", "r": self.rank, "lora_alpha": self.alpha, "target_modules": list(self.modules), "bias": "none",
            "use_rslora": self.is_rslora, "rank_pattern": dict(self.ranks), "alpha_pattern": dict(self.alphas), "use_dora": False,
            "modules_to_save": None, "lora_dropout": 0.05, "init_lora_weights": True, "task_type": "CAUSAL_LM",
        }  # fmt: skip
        config = {name: value for name, value in (config | changes).items() if value is not None}
        (path / "adapter_config.json").write_text(json.dumps(config))
        return path

    def merged(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model whose weights have the adapter in them."""
        made = copy.deepcopy(model)
        modules = dict(made.named_modules())
        for name, (a, b) in self.factors(model).items():
            weight = modules[name].weight
            added = self.size(name)[1] * (b.double() @ a.double())
            weight.data = (weight.data.double() + added).to(weight.dtype)
        return made
