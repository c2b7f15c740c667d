"""Adapters in PEFT's format: a folder with `adapter_config.json` and `adapter_model.safetensors`.

Owns what a LoRA adapter is refused for, its scaling, and its digest. Reads whole files, once: an adapter is small, and a file
that changes meanwhile changes nothing of what was read. Does not know slots or devices. Sources: Hu et al. 2021 (LoRA),
Kalajdzievski 2023 (rsLoRA), PEFT's `LoraConfig` 0.21.
"""

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from common.config import MOST_LORA_RANK
from common.errors import ConfigError
from common.ids import Digest
from common.model_path import read_json
from engine.checkpoint import bytes_of, content_digest, not_whole

N = TypeVar("N", int, float)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""What PEFT puts before the name of a module."""
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "layers_to_transform",
    "bias", "init_lora_weights",
}  # fmt: skip
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "inference_mode", "layers_pattern", "loftq_config",
    "lora_dropout", "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "task_type", "eva_config",
}  # fmt: skip
"""Fields that say nothing about what a trained adapter computes."""
_FIXES = {
    "use_dora": "train without DoRA, or merge the adapter into the model",
    "modules_to_save": "merge the adapter into the model, which then has these modules",
    "target_parameters": "train without experts and other bare parameters",
}
_OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin training that change the base weights too."""
_MATCH = r"""
import json, re, sys
keys, modules = json.load(sys.stdin)
means = {module: key for module in modules for key in reversed(keys) if re.match(rf"(.*\.)?({key})$", module)}
json.dump(means, sys.stdout)
"""
"""Prints which key means each module that any of them means: the first one."""
_MATCH_S = 5.0
_NAMED = 3
"""How many tensors an error names."""


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A linear layer that an adapter may have."""

    inputs: int
    """In the checkpoint, as are outputs."""
    outputs: int
    columns: range
    """The inputs that this rank has."""
    rows: range
    """Its outputs."""
    dtype: torch.dtype
    """In which the factors are used."""


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """What is added to a layer's outputs is x @ a.T @ b. Both are contiguous, and in the target's dtype."""

    a: Tensor
    """[rank, columns]."""
    b: Tensor
    """[rank, rows], with the scaling in it."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter as it was read."""

    digest: Digest
    rank: int
    """The highest of its factors."""
    factors: Mapping[str, Factors]
    """By the names of the modules that they belong to."""

    def pinned(self) -> "Adapter":
        """The same in memory from which a GPU copies while the host goes on."""
        return replace(
            self, factors={name: Factors(each.a.pin_memory(), each.b.pin_memory()) for name, each in self.factors.items()}
        )


def read_adapter(path: Path, targets: Mapping[str, AdapterTarget], max_rank: int) -> Adapter:
    """The adapter in a folder, checked against the linear layers of a model. Raises ConfigError."""
    config = _AdapterConfig(path)
    config.refuse_what_is_not_lora(max_rank)
    tensors = _read_tensors(path)
    expected = config.expected(targets)
    factors, rank = dict[str, Factors](), 0
    for name, tensor in tensors.items():
        _refuse_name(path, name, targets, expected)
        if not tensor.isfinite().all():
            raise ConfigError(f"{path / WEIGHTS}: {name} is infinite or not a number somewhere: train the adapter again")
    for module in expected:
        names = [f"{_PREFIX}{module}.lora_{factor}.weight" for factor in "AB"]
        missing = [name for name in names if name not in tensors]
        if missing:
            raise ConfigError(
                f"{path / WEIGHTS} lacks {', '.join(missing)}, which target_modules of {CONFIG} asks for: save the adapter again"
            )
        target, own = targets[module], config.rank_of(module)
        wanted = ((own, target.inputs), (target.outputs, own))
        for name, shape in zip(names, wanted, strict=True):
            if tuple(tensors[name].shape) != shape:
                raise ConfigError(
                    f"{path / WEIGHTS}: {name} has the shape {list(tensors[name].shape)}, but this model and r of {CONFIG} ask "
                    f"for {list(shape)}: the adapter is for another model"
                )
        a, b = tensors[names[0]].to(target.dtype), tensors[names[1]].double() * config.scaling_of(module)
        scaled = b.T.to(target.dtype)
        if not scaled.isfinite().all() or not a.isfinite().all():
            raise ConfigError(f"{path / WEIGHTS}: {module} is too large for {target.dtype}: give --dtype bfloat16")
        columns, rows = (slice(held.start, held.stop) for held in (target.columns, target.rows))
        factors[module] = Factors(a[:, columns].contiguous(), scaled[:, rows].contiguous())
        rank = max(rank, own)
    return Adapter(config.digest(tensors), rank, factors)


class _AdapterConfig:
    """`adapter_config.json`. Each method names the field that it refuses."""

    def __init__(self, path: Path) -> None:
        self.file = path / CONFIG
        if not self.file.is_file():
            raise ConfigError(f"{path} has no {CONFIG}: name a folder that save_pretrained of PEFT has written")
        self._values = read_json(self.file)
        self._rank = self._whole("r", self._values.get("r", 8))
        self._alpha = self._number("lora_alpha", self._values.get("lora_alpha", 8))
        ranks, alphas = self._pattern("rank_pattern"), self._pattern("alpha_pattern")
        self._own_ranks, self._own_alphas = dict[str, int](), dict[str, float]()
        """Those of modules for which a pattern has others; `expected` finds them."""
        self._ranks = {key: self._whole("rank_pattern", value) for key, value in ranks.items()}
        self._alphas = {key: self._number("alpha_pattern", value) for key, value in alphas.items()}
        self._is_rslora = self._values.get("use_rslora") or False
        if not isinstance(self._is_rslora, bool):
            raise self._refused("use_rslora", "true or false")

    def refuse_what_is_not_lora(self, max_rank: int) -> None:
        values = self._values
        if values.get("peft_type") != "LORA":
            raise self._refused("peft_type", "LORA")
        if values.get("bias", "none") != "none":
            raise self._refused("bias", "none: train without biases, or merge the adapter into the model")
        if str(values.get("init_lora_weights")).lower().startswith(_OTHER_BASES):
            fix = "one that leaves the base weights: save with path_initial_model_for_weight_conversion"
            raise self._refused("init_lora_weights", fix)
        for name, value in values.items():
            if name not in _READ and name not in _WITHOUT_EFFECT and value not in (None, False, "", [], {}):
                raise self._refused(name, "left out: " + _FIXES.get(name, "Tandem computes plain LoRA only"))
        for field, rank in (("r", self._rank), *(("rank_pattern", rank) for rank in self._ranks.values())):
            if rank > min(max_rank, MOST_LORA_RANK):
                more = "give more --max-lora-rank" if rank <= MOST_LORA_RANK else f"the most is {MOST_LORA_RANK}"
                raise ConfigError(f"{self.file}: {field} is {rank}, and --max-lora-rank {max_rank}: {more}")

    def expected(self, targets: Mapping[str, AdapterTarget]) -> list[str]:
        """The modules that the adapter has, in the model's order."""
        asked, layers = self._values.get("target_modules"), self._values.get("layers_to_transform")
        if asked == "all-linear":
            names = {module.rpartition(".")[2] for module in targets}
        elif isinstance(asked, list) and asked and all(isinstance(name, str) for name in asked):
            names = set(asked)
        else:
            raise self._refused("target_modules", 'a list of names, or "all-linear"')
        layers = [layers] if isinstance(layers, int) else layers
        if layers is not None and not (isinstance(layers, list) and all(isinstance(layer, int) for layer in layers)):
            raise self._refused("layers_to_transform", "a list of layers")
        found = dict[str, list[str]]()
        for name in sorted(names):
            found[name] = [module for module in targets if module == name or module.endswith(f".{name}")]
            if not found[name]:
                known = ", ".join(sorted({module.rpartition(".")[2] for module in targets}))
                raise self._refused("target_modules", f"among the linear layers {known}: {name} is none of this model's")
        modules = {module for each in found.values() for module in each}
        if layers is not None:
            modules = {module for module in modules if int(module.split(".")[2]) in layers}
        found_here = [module for module in targets if module in modules]
        self._own_ranks = _matching(self.file, self._ranks, found_here)
        self._own_alphas = _matching(self.file, self._alphas, found_here)
        return found_here

    def rank_of(self, module: str) -> int:
        return self._own_ranks.get(module, self._rank)

    def scaling_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), self._own_alphas.get(module, self._alpha)
        return alpha / math.sqrt(rank) if self._is_rslora else alpha / rank

    def digest(self, tensors: Mapping[str, Tensor]) -> Digest:
        """It depends on the tensors' bytes and on what scales them. A copy of the folder elsewhere has the same."""
        of_tensors = [
            [name, str(tensor.dtype), list(tensor.shape), content_digest(bytes_of(tensor.contiguous()))]
            for name, tensor in sorted(tensors.items())
        ]
        of_config = {
            "r": self._rank, "lora_alpha": self._alpha, "use_rslora": self._is_rslora, "rank_pattern": list(self._ranks.items()),
            "alpha_pattern": list(self._alphas.items()),
        }  # fmt: skip
        text = json.dumps([of_tensors, of_config], sort_keys=True, separators=(",", ":"))
        return Digest(content_digest(text.encode()))

    def _whole(self, field: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._refused(field, "whole and at least 1")
        return value

    def _number(self, field: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._refused(field, "a number")
        return float(value)

    def _pattern(self, field: str) -> dict[str, Any]:
        """By regular expressions over names of modules, the first of which counts."""
        pattern = self._values.get(field) or {}
        if isinstance(pattern, dict):
            return pattern
        raise self._refused(field, "an object whose names are regular expressions")

    def _refused(self, field: str, rule: str) -> ConfigError:
        return ConfigError(f"{self.file}: {field} must be {rule}; it is {str(self._values.get(field))[:80]}")


def _matching(file: Path, pattern: Mapping[str, N], modules: Sequence[str]) -> dict[str, N]:
    """What a pattern has for each module that it means, as PEFT's `get_pattern_key` finds it. Some expressions take for ever, so
    another process tries them. Raises ConfigError."""
    if not pattern:
        return {}
    given, why = json.dumps([list(pattern), list(modules)]), "they are no regular expressions"
    try:
        done = subprocess.run([sys.executable, "-I", "-c", _MATCH], input=given, capture_output=True, text=True, timeout=_MATCH_S)
        if done.returncode == 0:
            return {module: pattern[key] for module, key in json.loads(done.stdout).items()}
    except subprocess.TimeoutExpired:
        why = f"that takes more than {_MATCH_S:g} s"
    raise ConfigError(f"{file}: cannot find out which modules {', '.join(pattern)[:80]} mean, because {why}: name the modules")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    file = path / WEIGHTS
    if not file.is_file():
        raise ConfigError(f"{path} has no {WEIGHTS}, and other files are not read: save the adapter with safe_serialization=True")
    try:
        tensors: dict[str, Tensor] = load(file.read_bytes())
    except (SafetensorError, KeyError, OSError) as error:
        raise not_whole(file, error) from error
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise ConfigError(f"{file}: {name} is of {tensor.dtype}: save the adapter before quantisation")
    return tensors


def _refuse_name(path: Path, name: str, targets: Mapping[str, AdapterTarget], expected: list[str]) -> None:
    """Refuses a tensor that belongs to no module which the adapter has."""
    matched = _FACTOR.fullmatch(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
    if matched is not None and matched[1] in expected:
        return
    why = f"the model has no such linear layer; {_NAMED} of its own are {', '.join(list(targets)[:_NAMED])}"
    if ".experts." in name:
        why = "experts cannot have adapters here: train without them"
    elif "lora_embedding" in name or "embed_tokens" in name or "lm_head" in name:
        why = "the embedding and the output head cannot have adapters here: train without them"
    elif matched is not None and matched[1] in targets:
        why = f"target_modules of {CONFIG} does not name it: save the adapter again"
    raise ConfigError(f"{path / WEIGHTS}: unknown tensor {name}: {why}")
