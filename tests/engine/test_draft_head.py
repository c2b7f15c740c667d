"""An EAGLE-3 head beside the served model, driven by the scheduler that decodes: answers are those without it, and what it
proposes is what its formulas say in float64, without pages or KV, of what transformers' model computes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from common.drafting import HEAD_TAIL
from common.errors import ConfigError
from common.executor import StepResult
from common.ids import Int32Array
from common.sampling_params import SamplingParams
from decode import speculation
from engine.parallel import Group
from tests.engine.checkpoints import VOCAB, llama, qwen3, saved
from tests.engine.drafting import KINDS, made, requests, serve, take_in
from tests.engine.graph_recorder import RecordedGraphs
from tests.engine.padded_attention import as_on_a_card
from tests.engine.ranks import least_of, on_ranks

LAYERS, OWN_VOCAB, HEADS, KV_HEADS, DIM = 7, 400, 4, 2, 16
SIZES: dict[str, Any] = {"context_tokens": 300, "kv_memory": "8MiB"}


def head_of(served: PreTrainedModel, path: Path, own_vocab: int = OWN_VOCAB, **changes: object) -> Path:
    """Random weights whose proposals are peaked."""
    config = served.config
    width, wide = config.hidden_size, 96
    written = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": width, "intermediate_size": wide, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM, "vocab_size": VOCAB,
        "draft_vocab_size": own_vocab, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    } | changes  # fmt: skip
    path.mkdir()
    (path / "config.json").write_text(json.dumps(written))
    torch.manual_seed(9)
    sizes = {
        "fc.weight": (width, 3 * width), "midlayer.self_attn.q_proj.weight": (HEADS * DIM, 2 * width),
        "midlayer.self_attn.k_proj.weight": (KV_HEADS * DIM, 2 * width),
        "midlayer.self_attn.v_proj.weight": (KV_HEADS * DIM, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, HEADS * DIM), "midlayer.mlp.gate_proj.weight": (wide, width),
        "midlayer.mlp.up_proj.weight": (wide, width), "midlayer.mlp.down_proj.weight": (width, wide),
        "lm_head.weight": (own_vocab, width),
    }  # fmt: skip
    weights = {name: torch.randn(size) * 0.3 for name, size in sizes.items()}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    weights |= {f"{name}.weight": torch.rand(width) + 0.5 for name in norms}
    ids = torch.randperm(VOCAB)[:own_vocab].sort().values
    weights |= {"d2t": ids - torch.arange(own_vocab), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)}
    save_file(weights, path / "model.safetensors")
    return path


class Reference:
    """The head's formulas in float64: no pages, no KV, every step computed anew; the model's part of it once for a sequence."""

    def __init__(self, served: PreTrainedModel, path: Path) -> None:
        self._served = served.double()
        self._weights = {name: weight.double() for name, weight in load_file(path / "model.safetensors").items()}
        self._ids = self._weights["d2t"].long() + torch.arange(len(self._weights["d2t"]))
        self._computed = list[tuple[list[int], Tensor]]()

    def drafts(self, known: list[int], begin: int, count: int) -> list[int]:
        """known: all tokens, the last one not fed yet. begin: the first place that the head reads."""
        features, tokens = self._features(known)[begin:], list(known[begin + 1 :])
        for _ in range(count):
            hidden = self._layer(torch.tensor(tokens), features)
            logits = F.linear(self._norm(hidden[-1:], "norm"), self._weights["lm_head.weight"])
            tokens.append(int(self._ids[logits[0].argmax()]))
            features = torch.cat([features, hidden[-1:]])
        return tokens[-count:]

    def read(self, sequences: list[tuple[list[int], list[int]]]) -> None:
        """Compute what the model knows of prompts and their answers."""
        for prompt, answer in sequences:
            self._features([*prompt, *answer])

    def teach(self, sequences: list[tuple[list[int], list[int]]], path: Path) -> None:
        """Fit the head's last product to these answers to prompts, so that some of its drafts are right."""
        hidden = list[Tensor]()
        for prompt, answer in sequences:
            known = [*prompt, *answer]
            whole = self._norm(self._layer(torch.tensor(known[1:]), self._features(known)), "norm")
            hidden.append(whole[len(prompt) - 1 :])
        wanted = torch.tensor([token for _, answer in sequences for token in answer[1:]])
        own = torch.searchsorted(self._ids, wanted).clamp(max=len(self._ids) - 1)
        is_own = self._ids[own] == wanted
        features, classes = torch.cat([each[:-1] for each in hidden])[is_own], F.one_hot(own[is_own], len(self._ids)).double()
        self._weights["lm_head.weight"] = 20 * torch.linalg.lstsq(features, classes).solution.T
        stored = load_file(path / "model.safetensors")
        save_file(stored | {"lm_head.weight": self._weights["lm_head.weight"].float().contiguous()}, path / "model.safetensors")

    def _features(self, known: list[int]) -> Tensor:
        """Those of all tokens but the last: the beginning of what was computed for a longer sequence, if there is one."""
        before = known[:-1]
        whole = next((each for tokens, each in self._computed if tokens[: len(before)] == before), None)
        if whole is None:
            whole = self._compute_features(known)
            self._computed.append((before, whole))
        return whole[: len(before)]

    @torch.no_grad()
    def _compute_features(self, known: list[int]) -> Tensor:
        states = self._served(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
        taps = torch.cat([states[each][0] for each in (2, LAYERS // 2, LAYERS - 3)], dim=-1)
        return F.linear(taps, self._weights["fc.weight"])

    def _layer(self, tokens: Tensor, features: Tensor) -> Tensor:
        weights, count = self._weights, len(tokens)
        embedded = self._norm(self._served.get_input_embeddings()(tokens), "midlayer.input_layernorm")
        x = torch.cat([embedded, self._norm(features, "midlayer.hidden_norm")], dim=-1)
        query, key, value = (
            F.linear(x, weights[f"midlayer.self_attn.{each}_proj.weight"]).view(count, -1, DIM).transpose(0, 1) for each in "qkv"
        )
        key, value = (each.repeat_interleave(HEADS // KV_HEADS, dim=0) for each in (self._rotated(key), value))
        out = F.scaled_dot_product_attention(self._rotated(query), key, value, is_causal=True)
        residual = features + F.linear(out.transpose(0, 1).reshape(count, -1), weights["midlayer.self_attn.o_proj.weight"])
        x = self._norm(residual, "midlayer.post_attention_layernorm")
        gate, up = (F.linear(x, weights[f"midlayer.mlp.{each}_proj.weight"]) for each in ("gate", "up"))
        return residual + F.linear(F.silu(gate) * up, weights["midlayer.mlp.down_proj.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], 1e-6)

    def _rotated(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None].double() * 10000.0 ** (-torch.arange(0, DIM, 2).double() / DIM)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1)


def compare(steps: list[StepResult], prompts: list[list[int]], reference: Reference) -> tuple[int, set[int]]:
    """How many drafts were compared, and where the head began rows. All requests are greedy."""
    known, begins, waiting, compared = dict[int, list[int]](), dict[int, int](), list(prompts), 0
    seen, started = set[int](), set[int]()
    for result in steps:
        plan = result.plan
        started |= {start.row for start in plan.starts}
        for chunk in plan.chunks:
            if chunk.row in started:
                tokens = chunk.token_ids.tolist()
                known[chunk.row] = next(each for each in waiting if each[chunk.start :][: len(tokens)] == tokens)
                waiting = [each for each in waiting if each is not known[chunk.row]]
                started.remove(chunk.row)
                begins.pop(chunk.row, None)
        for chunk in plan.draft_chunks:
            if chunk.row not in begins or len(chunk.token_ids) > HEAD_TAIL:
                begins[chunk.row] = chunk.start
                assert chunk.start == 0 or len(chunk.token_ids) == HEAD_TAIL + 1
                seen.add(chunk.start)
            assert chunk.token_ids.tolist() == known[chunk.row][chunk.start :]
        for row in np.unique(plan.draft_rows).tolist():
            ours = plan.draft_tokens[plan.draft_rows == row].tolist()
            assert ours == reference.drafts(known[row], begins[row], len(ours))
            compared += len(ours)
        take_in(known, result)
    return compared, seen


@dataclass(frozen=True, slots=True)
class Taught:
    """A model with a head, and what the model answers without it to requests, of which the head knows the first two."""

    path: Path
    head: Path
    asked: list[tuple[Int32Array, SamplingParams]]
    answers: list[list[int]]
    reference: Reference


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Taught:
    """Prompts are shorter and longer than what a head begins with, and some begin alike."""
    served, folder = qwen3(num_hidden_layers=LAYERS), tmp_path_factory.mktemp("taught")
    path, head = saved(served, folder / "served"), head_of(served, folder / "head")
    asked = requests(4, KINDS[:1], 2, longest=150)
    asked += [(np.concatenate([asked[0][0], prompt[:20]]), sampling) for prompt, sampling in asked[:2]]
    answers = serve(made(path, None, **SIZES), asked).answers
    sequences = [(prompt.tolist(), answer) for (prompt, _), answer in zip(asked, answers, strict=True)]
    reference = Reference(served, head)
    reference.read(sequences)
    reference.teach(sequences[:2], head)
    return Taught(path, head, asked, answers, reference)


@pytest.mark.parametrize(
    "changes", [{}, {"graphs": "off"}, {"graph_sizes": "1,4,16,24"}], ids=["recorded", "layer by layer", "graphs"]
)
def test_a_head_proposes_what_its_formulas_say_and_changes_no_answer(
    taught: Taught, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins some rows anew."""
    if "graphs" in changes:
        monkeypatch.setattr(speculation, "HEAD_WINDOW", 110)
    if "graph_sizes" in changes:
        as_on_a_card(monkeypatch, RecordedGraphs())
    served = serve(made(taught.path, taught.head, is_head=True, **SIZES | changes), taught.asked)
    assert served.answers == taught.answers
    counters = served.counters
    assert counters.tokens_drafted > 100 and 0.05 < counters.tokens_accepted / counters.tokens_drafted < 0.9
    compared, begins = compare(served.steps, [prompt.tolist() for prompt, _ in taught.asked], taught.reference)
    assert compared == counters.tokens_drafted and len(begins) > (5 if "graphs" in changes else 2) and 0 in begins


def test_sampled_answers_grammars_of_processors_and_ranks_are_as_without(tmp_path: Path) -> None:
    """The ranks have pages of another size."""
    served = llama(num_hidden_layers=LAYERS)
    path, head = saved(served, tmp_path / "served"), head_of(served, tmp_path / "head")
    agree, asked = least_of(2), requests(4, KINDS, 3, longest=100)

    def run(group: Group) -> tuple[list[list[int]], list[list[int]]]:
        result = serve(made(path, head, group, agree, is_head=True, **SIZES, page_size=16), asked)
        return result.answers, [each.plan.draft_tokens.tolist() for each in result.steps]

    (ours, drafted), theirs = on_ranks(2, run)
    assert (ours, drafted) == theirs and sum(map(len, drafted)) > 100
    assert ours == serve(made(path, None, **SIZES), asked).answers
    in_int8: dict[str, Any] = SIZES | {"quantization": "int8"}
    plain = serve(made(path, None, **in_int8), asked).answers
    assert serve(made(path, head, is_head=True, **in_int8), asked).answers == plain


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is no EAGLE-3 head"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1; it is 2"),
        ({"norm_before_residual": True}, "norm_before_residual.* must be false"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, "three layers of a model of 7.*they are"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "123"}}, "they are '123'"),
        ({"eagle_config": [1]}, "eagle_config must be an object"),
        ({"target_hidden_size": 128}, "must be the model's, 64"),
        ({"hidden_size": 128, "target_hidden_size": 64}, "must be the model's, 64"),
        ({"vocab_size": 700}, "vocab_size is 700, that of the model 500"),
        ({"draft_vocab_size": 90}, "lm_head.weight has the shape"),
    ],
)
def test_what_is_no_head_for_the_model_is_refused_by_name(
    taught: Taught, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    head = head_of(qwen3(num_hidden_layers=1), tmp_path / "head", **changes)
    with pytest.raises(ConfigError, match=f"--speculative-config: with the draft head .*{says}"):
        made(taught.path, head, is_head=True)


@pytest.mark.parametrize("offsets", [[-1] * 400, [101] * 400, [1] + [0] * 399, [0] * 399])
def test_tokens_that_the_served_model_does_not_have_once_are_refused(taught: Taught, tmp_path: Path, offsets: list[int]) -> None:
    stored = load_file(taught.head / "model.safetensors")
    head = head_of(qwen3(num_hidden_layers=1), tmp_path / "head")
    save_file(stored | {"d2t": torch.tensor(offsets)}, head / "model.safetensors")
    with pytest.raises(ConfigError, match="d2t must name 400 different tokens of the model's 500"):
        made(taught.path, head, is_head=True)
