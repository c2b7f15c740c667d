"""Token-exactness: what comes out of the ring is what transformers generates, and colocated serving answers the same.

Greedy, float32. The reference is a forward pass of transformers on the same checkpoint over a prompt with its whole answer: the
answer is greedy when each of its tokens is the best one at its place.

The tests are slow because each starts fleets of real processes: page size, chunk size and model are fixed when a fleet starts.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from demo import corpus
from demo.evaluate import MODEL
from tests.rig.pages import FleetPages, RunningFleet, running_fleet

SOAK = pytest.mark.soak
AT_ONCE = 6
ANSWER_TOKENS = 24
LONGEST_FIRST_TURN = 1700
"""The context has room for another turn."""


@dataclass(frozen=True, slots=True)
class Reference:
    """transformers' model of a checkpoint."""

    model: Any

    @classmethod
    def load(cls, path: Path) -> "Reference":
        return cls(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())

    def greedy(self, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """The best token after the prompt, and after the prompt with each beginning of the answer but the whole."""
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        with torch.inference_mode():
            logits = self.model(ids, logits_to_keep=len(answer), use_cache=False).logits[0]
        best: list[int] = logits.argmax(-1).tolist()
        return best

    def regrets(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """By how much the logit of each token of the answer is below that of the best one there: nothing but rounding, if it was
        drawn greedily."""
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        with torch.inference_mode():
            logits = self.model(ids, logits_to_keep=len(answer), use_cache=False).logits[0]
        found: list[float] = (logits.max(-1).values - logits[torch.arange(len(answer)), torch.tensor(answer)]).tolist()
        return found

    def length(self, answer: Sequence[int], max_tokens: int) -> int:
        """An answer ends with the first end of sequence, or when it is as long as it may be."""
        eos = self.model.generation_config.eos_token_id
        return min(max_tokens, answer.index(eos) + 1 if eos in answer else max_tokens)


def demo_prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    """Lists to look up, lines to copy, and prompts of every length from one token on."""
    tokenizer, random = AutoTokenizer.from_pretrained(MODEL), Random(seed)
    prompts: list[list[int]] = [[random.randrange(300, 2000)], [random.randrange(300, 2000) for _ in range(longest)]]
    while len(prompts) < count:
        task = random.choice(corpus.TASKS)
        size = random.choice((3, 10, 40, 150, 480)) if task == "retrieval" else 12
        (turn,) = corpus.held_out(task, size, random.randrange(10**6)).turns
        chat = [{"role": "user", "content": turn.user}]
        ids = tokenizer.encode(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        prompts.append(ids[:longest])
    return prompts


def answers(fleet: FleetPages, prompts: Sequence[list[int]]) -> list[list[int]]:
    """The fleet's answers, several asked at once."""

    def ask(prompt: list[int]) -> list[int]:
        completion = fleet.complete(prompt, ANSWER_TOKENS, return_token_ids=True)
        ids: list[int] = completion["choices"][0]["token_ids"]
        assert completion["usage"]["prompt_tokens"] == len(prompt)
        assert completion["usage"]["completion_tokens"] == len(ids)
        return ids

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, prompts))


def check(model: Reference, prompts: Sequence[list[int]], *flags: str, colocated: bool) -> None:
    """Every prompt through the ring, where the demo model drafts tokens, and through colocated serving that looks them up.

    No instance is given up for its silence: on a busy machine that would compute a prompt twice, and the counters would tell.
    """
    common = ("--dtype", "float32", "--dead-after-s", "60", "--grammar", "off", "--max-running", "8", *flags)
    with running_fleet("--speculative-config", '{"model": "demo", "num_speculative_tokens": 4}', *common) as fleet:
        found = answers(fleet, prompts)
        assert sum(value for _, value in fleet.samples("tandem_instance_tokens_drafted_total")) > 0
        again = list(range(0, len(prompts), 4))
        assert answers(fleet, [prompts[at] for at in again]) == [found[at] for at in again], "a hit changes an answer"
        check_disaggregated(fleet, prompts, found, again)
        turns = [at for at in again[::2] if len(found[at]) > 1 and len(prompts[at]) < LONGEST_FIRST_TURN]
        next_turns = [[*prompts[at], *found[at], *prompts[at][:9]] for at in turns]
        spared, page = pages_spared(fleet), fleet.cluster()["instances"][0]["page_size"]
        said = answers(fleet, next_turns)
        had = [(len(prompts[at]) + len(found[at]) - 1) // page for at in turns]
        assert pages_spared(fleet) - spared >= sum(pages for pages, answer in zip(had, said, strict=True) if len(answer) > 1)
    for prompt, answer in zip([*prompts, *next_turns], [*found, *said], strict=True):
        assert len(answer) == model.length(answer, ANSWER_TOKENS)
        assert answer == model.greedy(prompt, answer), prompt
    if colocated:
        with running_fleet("--prefill", "0", "--speculative-algorithm", "NGRAM", *common) as fleet:
            assert answers(fleet, prompts) == found
            assert answers(fleet, next_turns) == said, "the KV of an answer is that of a prompt"
            fleet.wait_until_home()
            assert sum(value for _, value in fleet.samples("tandem_instance_tokens_accepted_total")) > 0


def pages_spared(fleet: RunningFleet) -> float:
    """Pages that were not pushed, because decode had them from an earlier prompt or answer."""
    fleet.wait_until_home()
    return sum(value for _, value in fleet.samples("tandem_instance_pages_spared_total"))


def check_disaggregated(
    fleet: RunningFleet, prompts: Sequence[list[int]], found: Sequence[list[int]], again: Sequence[int]
) -> None:
    """The metrics prove that prefill pushed what decode received, that decode computed no prompt token, and that prefill computed
    no whole page again. again: the prompts that were asked twice."""
    fleet.wait_until_home()
    counters = {instance["role"]: instance["counters"] for instance in fleet.cluster()["instances"]}
    prefill, decode = counters["prefill"], counters["decode"]
    assert decode["prompt_tokens_computed"] == 0
    computed, hit = prefill["prompt_tokens_computed"], prefill["prompt_tokens_hit"]
    assert computed + hit == sum(map(len, prompts)) + sum(len(prompts[at]) for at in again)
    page = fleet.cluster()["instances"][0]["page_size"]
    assert hit >= sum((len(prompts[at]) - 1) // page * page for at in again)
    assert prefill["bytes_pushed"] == decode["bytes_received"] > 0
    assert prefill["pages_pushed"] == decode["pages_received"]
    assert prefill["handoffs"] == decode["handoffs"] == sum(len(found[at]) > 1 for at in (*range(len(found)), *again))
    pushed = fleet.samples("tandem_instance_bytes_pushed_total")
    assert sum(value for _, value in pushed) == prefill["bytes_pushed"]


@pytest.fixture(scope="module")
def demo_model() -> Reference:
    return Reference.load(MODEL)


@pytest.mark.parametrize(
    ("page_size", "chunk_tokens", "prompts", "colocated"),
    [(16, 512, 24, True), pytest.param(16, 512, 120, True, marks=SOAK), pytest.param(7, 96, 80, False, marks=SOAK)],
)
def test_the_demo_model_through_the_ring_equals_transformers(
    demo_model: Reference, page_size: int, chunk_tokens: int, prompts: int, colocated: bool
) -> None:
    flags = ("--page-size", str(page_size), "--chunk-tokens", str(chunk_tokens))
    check(demo_model, demo_prompts(prompts, longest=1800, seed=page_size), *flags, colocated=colocated)


COMMON = {"vocab_size": 2048, "max_position_embeddings": 2048, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
LLAMA = LlamaConfig(
    **COMMON, hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
    tie_word_embeddings=False, initializer_range=0.2,
)  # fmt: skip
QWEN3 = Qwen3Config(
    **COMMON, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
    head_dim=32, tie_word_embeddings=True, initializer_range=0.2,
)  # fmt: skip


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> Iterator[Path]:
    """A folder for a checkpoint, with the demo model's tokenizer in it."""
    path = tmp_path / "checkpoint"
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(path)
    yield path


SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": False, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "head_dim": 16}
OTHERS: list[PretrainedConfig] = [
    MistralConfig(**COMMON, **SMALL, sliding_window=100),
    Qwen2Config(**COMMON, **SMALL),
    MixtralConfig(**COMMON, **SMALL, **EXPERTS, num_local_experts=4),
    Qwen3MoeConfig(**COMMON, **SMALL, **EXPERTS, num_experts=6, moe_intermediate_size=48, norm_topk_prob=True),
    Gemma2Config(**COMMON, **SMALL, head_dim=32, sliding_window=100, query_pre_attn_scalar=20),
]
"""Their numbers are proven in tests/engine/models; here it is seen that whole fleets serve them."""


@pytest.mark.parametrize(
    ("config", "seed", "page_size", "chunk_tokens", "colocated"),
    [
        (LLAMA, 3, 7, 33, False),
        pytest.param(LLAMA, 3, 4, 33, True, marks=SOAK),
        pytest.param(QWEN3, 4, 32, 256, False, marks=SOAK),
        *(pytest.param(config, 5, 16, 512, True, marks=SOAK, id=f"{config.model_type}") for config in OTHERS),
    ],
)
def test_random_weights_through_the_ring_equal_transformers(
    with_tokenizer: Path, config: PretrainedConfig, seed: int, page_size: int, chunk_tokens: int, colocated: bool
) -> None:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(with_tokenizer)
    random = Random(page_size)
    lengths = [1, 2, page_size, page_size + 1, 2000] + [random.randrange(1, 700) for _ in range(15)]
    prompts = [[random.randrange(3, 2048) for _ in range(length)] for length in lengths]
    flags = ("--model", str(with_tokenizer), "--page-size", str(page_size), "--chunk-tokens", str(chunk_tokens))
    check(Reference.load(with_tokenizer), prompts, *flags, colocated=colocated)
