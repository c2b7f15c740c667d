"""Models that several ranks compute together, over Gloo: every rank gives the greedy answers of transformers in float32."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from common.errors import ConfigError
from common.executor import StepPlan, StepResult
from common.sampling_params import SamplingParams
from engine.checkpoint import read_weights
from engine.models import registry
from engine.models.moe import MixtureOfExperts, Products, grouped, one_by_one
from engine.models.registry import load_model
from engine.models.shape import read_shape
from engine.models.weights import Cut, Loading, Stored
from engine.parallel import Group
from engine.torch_kernels import Kernels
from tests.engine.checkpoints import VOCAB, llama, mixtral, qwen2, qwen3, qwen3_moe, saved
from tests.engine.driver import Driver
from tests.engine.exact import answers, assert_exact, reference_logits, runner
from tests.engine.graph_recorder import RecordedGraphs
from tests.engine.models.own_values import OwnValues
from tests.engine.models.test_linear import needs_fp8_on_cpu
from tests.engine.models.test_loading import distance
from tests.engine.ranks import answers_of_ranks, least_of, on_ranks, runner_of

Make = Callable[..., PreTrainedModel]
EIGHT: dict[str, Any] = {"num_attention_heads": 8, "num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16}
PROMPTS = [np.random.default_rng(9).integers(3, VOCAB - 1, length).astype(np.int32) for length in (1, 17, 60)]
TOKENS, CHUNK = 4, 24

MATRIX = [(make, kv_heads, ranks) for make in (llama, qwen3, qwen3_moe) for kv_heads in (1, 2, 8) for ranks in (2, 4)]
USUAL = [(llama, 8, 2), (qwen3, 2, 4), (qwen3_moe, 1, 2)]
OTHERS: dict[str, tuple[int, Callable[[], PreTrainedModel]]] = {
    "biases, which one rank adds": (2, lambda: llama(**EIGHT, num_key_value_heads=4, attention_bias=True, mlp_bias=True)),
    "biases of queries, keys and values": (4, lambda: qwen2(**EIGHT, num_key_value_heads=2)),
    "a vocabulary that does not divide": (4, lambda: qwen3(**EIGHT, vocab_size=VOCAB - 1, tie_word_embeddings=False)),
    "experts of Mixtral's names": (2, lambda: mixtral(num_local_experts=4)),
    "dense layers between experts": (4, lambda: qwen3_moe(**EIGHT | {"num_hidden_layers": 3}, mlp_only_layers=[1])),
}


@pytest.mark.parametrize(
    ("make", "kv_heads", "ranks"),
    [pytest.param(*case, marks=[] if case in USUAL else pytest.mark.soak) for case in MATRIX],
)
def test_every_rank_gives_the_answers_of_transformers(tmp_path: Path, make: Make, kv_heads: int, ranks: int) -> None:
    check(make(**EIGHT, num_key_value_heads=kv_heads), tmp_path, ranks)


@pytest.mark.parametrize("name", OTHERS)
def test_other_shapes_are_divided_too(tmp_path: Path, name: str) -> None:
    ranks, make = OTHERS[name]
    check(make(), tmp_path, ranks)


def check(model: PreTrainedModel, path: Path, ranks: int) -> None:
    for given in answers_of_ranks(saved(model, path), ranks, PROMPTS, TOKENS, CHUNK):
        assert_exact(model, given)


def test_experts_that_were_saved_as_one_tensor_are_divided(tmp_path: Path) -> None:
    model = qwen3_moe(**EIGHT)
    model.save_pretrained(tmp_path, save_original_format=False)
    for given in answers_of_ranks(tmp_path, 2, PROMPTS[:1], TOKENS, CHUNK):
        assert_exact(model, given)


class Counted:
    """A stored weight that counts what is read of it."""

    def __init__(self, stored: Stored, read: list[int]) -> None:
        self.shape, self._stored, self._read = stored.shape, stored, read

    def __getitem__(self, cut: Cut) -> Tensor:
        part = self._stored[cut]
        self._read.append(part.nbytes)
        return part


@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_reads_its_share_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """Norms and routers are on all ranks; of the rest each has an equal part, but for KV heads that two ranks have."""
    model = qwen3_moe(**EIGHT, num_key_value_heads=2)
    model.save_pretrained(tmp_path, save_original_format=not fused)
    read = list[int]()

    def counting(files: Sequence[Path], progress: Callable[[str], None]) -> Iterator[tuple[str, Stored]]:
        yield from ((name, Counted(stored, read)) for name, stored in read_weights(files, progress))

    monkeypatch.setattr(registry, "read_weights", counting)
    stored = {name: weight.numel() * 4 for name, weight in model.state_dict().items()}
    everywhere = sum(size for name, size in stored.items() if "norm" in name or "mlp.gate.weight" in name)
    keys = sum(size for name, size in stored.items() if "k_proj" in name or "v_proj" in name)
    rest = sum(stored.values()) - everywhere - keys
    for rank in range(4):
        read.clear()
        load_model(tmp_path, read_shape(tmp_path), of_rank(rank, 4), Kernels(), lambda text: None)
        assert sum(read) == everywhere + keys // 2 + rest // 4


class Partial(Group):
    """A rank that hears nothing of the others: sums are its own part, and what it gathers is its part for each rank. Its
    collectives are operations that can be recorded."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def sum(self, x: Tensor) -> Tensor:
        return x.add_(0.0)

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.ranks, dim=1)


def of_rank(rank: int, ranks: int) -> Loading:
    return Loading(torch.float32, torch.device("cpu"), 64, group=Partial(rank, ranks))


@torch.inference_mode()
def test_a_step_of_a_rank_can_be_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(qwen3_moe(**EIGHT, vocab_size=VOCAB - 1), tmp_path)
    monkeypatch.setattr(registry, "why_not_grouped", lambda *_: None)
    model = load_model(path, read_shape(path), of_rank(1, 2), Kernels(), lambda text: None)
    assert model.capturable
    ids, positions, out = torch.arange(6) * 80, torch.arange(6), torch.empty(6, VOCAB - 1)

    def run() -> None:
        out.copy_(model.logits(model.hidden(ids, positions, OwnValues(4))))

    replay = RecordedGraphs().capture(run)
    for _ in range(3):
        ids.copy_(torch.randint(0, VOCAB - 1, (6,)))  # other tokens are rows of other ranks, and choose other experts
        replay()
        recorded = out.clone()
        run()
        assert torch.equal(recorded, out)


@pytest.mark.parametrize("products", [grouped, one_by_one])
@torch.inference_mode()
def test_the_parts_of_a_mixture_add_up_to_the_whole_whatever_is_behind_the_last_pair(products: Products) -> None:
    def with_rubbish(pairs: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        out = products(pairs, weights, ends)
        out[int(ends[-1]) :] = torch.nan
        return out

    block: Any = qwen3_moe().model.layers[0].mlp
    x = torch.randn(9, 64)
    gate_up, down = block.experts.gate_up_proj, block.experts.down_proj
    parts = [
        MixtureOfExperts(
            block.gate.weight, gate_up[first : first + 2], down[first : first + 2], 3, False, with_rubbish, Kernels(), first
        )(x)
        for first in range(0, 8, 2)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(0), block(x[None])[0])


def test_random_weights_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    path = saved(qwen3_moe(**EIGHT), tmp_path)
    (path / "model.safetensors").unlink()
    alone = answers(runner(path, load_format="dummy"), PROMPTS[:2], TOKENS, CHUNK)
    for given in answers_of_ranks(path, 2, PROMPTS[:2], TOKENS, CHUNK, load_format="dummy"):
        for ours, expected in zip(given, alone, strict=True):
            assert ours.tokens == expected.tokens
            torch.testing.assert_close(torch.stack(ours.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


def test_sampled_answers_and_log_probabilities_of_prompts_are_those_of_one_rank(tmp_path: Path) -> None:
    path, agree = saved(qwen3(**EIGHT), tmp_path), least_of(2)
    sampling = SamplingParams(max_new_tokens=9, temperature=0.9, top_p=0.95, seed=11, prompt_logprobs=1)

    def sampled(group: Group | None) -> tuple[list[list[int]], list[float]]:
        made, told = runner(path) if group is None else runner_of(path, group, agree), list[float]()

        def run(plan: StepPlan) -> StepResult:
            result = made.run(plan)
            told.extend(token.logprob for tokens in result.prompt_logprobs.by_row().values() for token in tokens)
            return result

        return Driver(run, made.description).answers(PROMPTS, 9, sampling, CHUNK), told

    tokens, told = sampled(None)
    assert len({token for answer in tokens for token in answer}) > 5
    assert len(told) == sum(len(prompt) - 1 for prompt in PROMPTS)
    for ours, ours_told in on_ranks(2, sampled):
        assert ours == tokens
        assert ours_told == pytest.approx(told, abs=1e-4)


@needs_fp8_on_cpu
def test_fp8_on_ranks_is_as_near_as_on_one(tmp_path: Path) -> None:
    model = qwen2(**EIGHT | {"num_attention_heads": 4}, num_key_value_heads=2, initializer_range=0.05)
    path = saved(model, tmp_path)
    fields: dict[str, Any] = {"dtype": "bfloat16", "quantization": "fp8"}
    (alone,) = answers(runner(path, **fields), PROMPTS[2:], 1, CHUNK)
    off = distance(torch.stack(alone.logits), reference_logits(model, alone).double())
    for (given,) in answers_of_ranks(path, 2, PROMPTS[2:], 1, CHUNK, **fields):
        assert distance(torch.stack(given.logits), reference_logits(model, given).double()) < 2 * off < 0.4


def test_ranks_use_the_pages_and_the_context_of_the_one_with_the_least_memory(tmp_path: Path) -> None:
    path, agree = saved(qwen3(**EIGHT, num_key_value_heads=2), tmp_path), least_of(2)
    of_pages = runner(path).description.layout.page_bytes // 2

    def describe(group: Group) -> Any:
        return runner_of(path, group, agree, kv_memory=str(of_pages * (20, 9)[group.rank])).description

    first, second = on_ranks(2, describe)
    assert first.total_pages == second.total_pages == 9
    assert first.model == second.model
    assert (first.model.context_tokens, first.model.kv_heads, first.layout.kv_heads) == (128, 2, 1)


def test_a_copy_of_the_embedding_is_compared_with_the_rows_of_the_rank(tmp_path: Path) -> None:
    path = saved(qwen3(**EIGHT), tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    for row, wrong in ((0, [0]), (VOCAB - 1, [1])):
        changed = weights | {"lm_head.weight": weights["lm_head.weight"].clone()}
        changed["lm_head.weight"][row] += 1
        save_file(changed, path / "model.safetensors", metadata={"format": "pt"})
        for rank in range(2):
            if rank in wrong:
                with pytest.raises(ConfigError, match=r"lm_head\.weight differs from the embedding"):
                    load_model(path, read_shape(path), of_rank(rank, 2), Kernels(), lambda text: None)
            else:
                load_model(path, read_shape(path), of_rank(rank, 2), Kernels(), lambda text: None)
