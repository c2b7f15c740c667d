"""Any other causal language model: transformers' own implementation, with our attention in place of its own.

Owns its loading and the function that its attention layers call. Knows no pages or rows, and runs no code from a checkpoint.
Norms, rotary embedding and activations are transformers', a kernel for each operation: it is slower than `Decoder`, and says so.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from common.errors import ConfigError, first_line
from engine.checkpoint import check_weights, weight_files
from engine.models.served_shape import FOREIGN, refusal
from engine.models.shape import ServedShape
from engine.models.transformers_check import (
    PROMPT_TOKENS,
    Definition,
    Description,
    Different,
    described_mask,
    in_float32,
    in_steps,
    prompts,
    require_same,
)
from engine.models.weights import Loading
from engine.ports import LayerAttention, StepAttention

_STEP, _DESCRIBED = "tandem", "tandem-described"
"""Names of our function among transformers' attentions. A model that uses the first one makes no mask; under the second one, the
described run's, there is a function that stands in for the mask."""


class Calls(Protocol):
    """What takes the calls of the attention layers of one forward, in their order."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, asked: dict[str, Any]) -> Tensor:
        """query: [1, heads, tokens, head_dim]; key, value: [1, kv_heads, tokens, head_dim]. asked: what else transformers passes.
        Returns [1, tokens, heads, head_dim]."""


class TransformersModel:
    """Implements `Model`. It is not captured: nothing promises that a forward of transformers starts the same kernels on the same
    storage for every step of one size."""

    capturable = False
    spared_bytes = 0
    tapped: Sequence[Tensor] = ()
    logits_dtype = torch.float32

    def __init__(self, causal: PreTrainedModel, shape: ServedShape) -> None:
        """Raises ConfigError when our attention would not compute what the model's own does."""
        AttentionInterface.register(_STEP, _hand_over)
        AttentionInterface.register(_DESCRIBED, _hand_over)
        AttentionMaskInterface.register(_DESCRIBED, described_mask)
        self._causal = causal
        self._decoder = causal.get_decoder()
        with _translated(shape.architecture, "in a short run"), torch.inference_mode():
            self._head = _with_given_hidden(causal, self._decoder)
            self.attention = self._rehearse(shape)

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: StepAttention, wanted: Tensor | None = None) -> Tensor:
        hidden = self._decode(token_ids, positions, _Layers(attention))
        return hidden if wanted is None else hidden[wanted]

    def logits(self, hidden: Tensor) -> Tensor:
        """By the model's own head, with all that it does to logits: it is given a decoder that returns `hidden`."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()

    def tensors(self) -> Iterator[Tensor]:
        """All weights, in one order."""
        yield from self._causal.parameters()

    def _decode(self, token_ids: Tensor, positions: Tensor, calls: Calls) -> Tensor:
        out = self._decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, tandem_calls=calls)
        hidden: Tensor = out.last_hidden_state
        return hidden[0]

    def _rehearse(self, shape: ServedShape) -> Sequence[LayerAttention]:
        """How each layer attends. Raises Different; see `transformers_check`. The model is ready to serve when it returns."""
        ids = prompts(shape.vocab_size, self._causal.device)
        with in_float32(self._causal):
            self._causal.set_attn_implementation("eager")
            reference = self._causal(input_ids=ids, use_cache=False).logits
            if reference.shape[-1] != shape.vocab_size:
                raise Different(f"it has {reference.shape[-1]} logits, and its config says a vocabulary of {shape.vocab_size}")
            self._causal.set_attn_implementation(_DESCRIBED)
            description = Description(shape)
            self._decode(ids[0], torch.arange(PROMPT_TOKENS, device=ids.device), description)
            layers = description.layers
            if len(layers) != shape.layers:
                raise Different(f"it attends {len(layers)} times in {shape.layers} layers")
            self._causal.set_attn_implementation(_STEP)
            require_same(self._in_steps(layers, ids), reference)
        if not bool(self._in_steps(layers, ids).isfinite().all()):
            raise Different(f"in {self._causal.dtype} its logits are infinite or not numbers: give another --dtype")
        return layers

    def _in_steps(self, layers: Sequence[LayerAttention], ids: Tensor) -> Tensor:
        def logits(token_ids: Tensor, positions: Tensor, attention: Definition) -> Tensor:
            return self.logits(self.hidden(token_ids, positions, attention))

        return in_steps(logits, layers, ids)


def load_transformers_model(
    path: Path, shape: ServedShape, loading: Loading, progress: Callable[[str], None]
) -> TransformersModel:
    """The weights pass through host memory, once. Raises ConfigError."""
    progress(
        f"{shape.architecture} runs through transformers' own implementation with Tandem's attention: it is slower than the "
        f"architectures that Tandem has itself, and its decode steps are not captured in CUDA graphs"
    )
    with _translated(shape.architecture, "while loading"):
        causal = _random(path, loading) if loading.load_format == "dummy" else _loaded(path, shape, loading)
    progress(f"comparing the attention of {shape.architecture} with Tandem's on {PROMPT_TOKENS} tokens")
    return TransformersModel(causal.eval().requires_grad_(False), shape)


def _loaded(path: Path, shape: ServedShape, loading: Loading) -> PreTrainedModel:
    files = weight_files(path)
    causal, found = AutoModelForCausalLM.from_pretrained(
        path, dtype=loading.dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False, output_loading_info=True
    )
    for keys, what in (("missing_keys", "lacks weights of"), ("unexpected_keys", "has weights that are not of")):
        names = sorted(found[keys])
        if names:
            raise ConfigError(f"{path} {what} {shape.architecture}: {', '.join(names[:5])}")
    ignored = causal._keys_to_ignore_on_load_unexpected or ()
    check_weights(files, lambda name: any(re.search(pattern, name) for pattern in ignored))
    return causal.to(loading.device)


def _random(path: Path, loading: Loading) -> PreTrainedModel:
    """Random weights, as transformers initialises the model before training, the same in each process."""
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.random.fork_rng([loading.device] if loading.device.type == "cuda" else []), loading.device:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=loading.dtype, trust_remote_code=False)


class _Layers:
    """Hands the calls of one forward to the attention of a step."""

    def __init__(self, attention: StepAttention) -> None:
        self._attention = attention
        self._layer = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, asked: dict[str, Any]) -> Tensor:
        tokens_first = [heads[0].transpose(0, 1).contiguous() for heads in (query, key, value)]
        out = self._attention.attend(self._layer, *tokens_first)
        self._layer += 1
        return out[None]


class _Given(torch.nn.Module):
    """A decoder that returns what it is given."""

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> BaseModelOutputWithPastAndCrossAttentions:
        out = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=inputs_embeds)
        out.router_logits = None  # heads of mixtures of experts look for it
        return out


def _with_given_hidden(causal: PreTrainedModel, decoder: PreTrainedModel) -> PreTrainedModel:
    """A model of the same weights whose decoder returns what it is given. Raises Different."""
    path = next(path for path, module in causal.named_modules() if module is decoder)
    if path == "":
        raise Different("its decoder cannot be told from its head")
    return _replaced(causal, path, _Given())


def _replaced(module: torch.nn.Module, path: str, other: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module that shares everything with it, but for the module at `path`."""
    name, _, rest = path.partition(".")
    inner = module.get_submodule(name)
    copied = copy.copy(module)
    copied._modules = {**module._modules, name: _replaced(inner, rest, other) if rest else other}
    return copied


def _hand_over(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    tandem_calls: Calls | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' interface. tandem_calls: the argument of the forward, handed down by the model."""
    if tandem_calls is None:
        raise Different("it does not hand arguments of its forward down to its attention layers")
    return tandem_calls.attend(query, key, value, attention_mask, asked), None


@contextmanager
def _translated(architecture: str, when: str) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, ConfigError):
        raise
    except Different as error:
        raise refusal(architecture, f"Tandem's attention cannot stand in for its own: {error}") from error
    except FOREIGN as error:
        raise refusal(architecture, f"transformers' implementation failed {when}: {first_line(error)}") from error
