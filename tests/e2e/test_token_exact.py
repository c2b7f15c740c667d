"""Token-exactness: what comes out of the ring is what transformers generates and what colocated serving generates.

Greedy, float32. The reference is transformers' own `generate` on the same checkpoint.

The tests are slow because each starts two fleets of real processes: page size, chunk size and model are fixed when a fleet
starts. The reference alone takes 13 s of CPU time.
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
from tests.fleet_pages import RunningFleet, running_fleet

AT_ONCE = 6


@dataclass(frozen=True, slots=True)
class Case:
    prompt: list[int]
    max_tokens: int
    expected: list[int]


def reference(path: Path, prompts: Sequence[list[int]], max_tokens: int) -> list[Case]:
    """transformers' greedy continuation of each prompt, end of sequence included if it came."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    cases = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
        cases.append(Case(prompt, max_tokens, output[0, len(prompt) :].tolist()))
    return cases


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


def answers(fleet: RunningFleet, cases: Sequence[Case]) -> list[list[int]]:
    """The fleet's answers, several asked at once."""

    def ask(case: Case) -> list[int]:
        completion = fleet.complete(case.prompt, case.max_tokens, return_token_ids=True)
        ids: list[int] = completion["choices"][0]["token_ids"]
        assert completion["usage"]["prompt_tokens"] == len(case.prompt)
        assert completion["usage"]["completion_tokens"] == len(ids)
        return ids

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, cases))


def check(tmp_path: Path, cases: Sequence[Case], *flags: str) -> None:
    """Every case through the ring and through colocated serving.

    No instance is given up for its silence: on a busy machine that would compute a prompt twice, and the counters would tell.
    """
    expected = [case.expected for case in cases]
    common = ("--dtype", "float32", "--dead-after-s", "60", *flags)
    with running_fleet(*common) as fleet:
        assert answers(fleet, cases) == expected
        check_disaggregated(fleet, cases)
    with running_fleet("--prefill", "0", *common) as fleet:
        assert answers(fleet, cases) == expected
        fleet.wait_until_home()


def check_disaggregated(fleet: RunningFleet, cases: Sequence[Case]) -> None:
    """The metrics prove that prefill pushed what decode received, and that decode computed no prompt token."""
    fleet.wait_until_home()
    counters = {instance["role"]: instance["counters"] for instance in fleet.cluster()["instances"]}
    prefill, decode = counters["prefill"], counters["decode"]
    assert decode["prompt_tokens_computed"] == 0
    assert prefill["prompt_tokens_computed"] == sum(len(case.prompt) for case in cases)
    assert prefill["bytes_pushed"] == decode["bytes_received"] > 0
    assert prefill["pages_pushed"] == decode["pages_received"]
    assert prefill["handoffs"] == decode["handoffs"] == sum(len(case.expected) > 1 for case in cases)
    pushed = fleet.samples("tandem_instance_bytes_pushed_total")
    assert sum(value for _, value in pushed) == prefill["bytes_pushed"]


@pytest.fixture(scope="module")
def demo_cases() -> list[Case]:
    return reference(MODEL, demo_prompts(200, longest=1800, seed=1), max_tokens=24)


@pytest.mark.parametrize(("page_size", "chunk_tokens", "slices"), [(16, 512, (0, 120)), (7, 96, (120, 200))])
def test_the_demo_model_through_the_ring_equals_transformers(
    tmp_path: Path, demo_cases: list[Case], page_size: int, chunk_tokens: int, slices: tuple[int, int]
) -> None:
    flags = ("--page-size", str(page_size), "--chunk-tokens", str(chunk_tokens))
    check(tmp_path, demo_cases[slice(*slices)], *flags)


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
"""Their numbers are proven in tests/common/engine/models; here it is seen that whole fleets serve them."""


@pytest.mark.parametrize(
    ("config", "seed", "page_size", "chunk_tokens"),
    [
        (LLAMA, 3, 4, 33),
        (QWEN3, 4, 32, 256),
        *(pytest.param(config, 5, 16, 512, marks=pytest.mark.soak, id=f"{config.model_type}") for config in OTHERS),
    ],
)
def test_random_weights_through_the_ring_equal_transformers(
    tmp_path: Path, with_tokenizer: Path, config: PretrainedConfig, seed: int, page_size: int, chunk_tokens: int
) -> None:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(with_tokenizer)
    random = Random(page_size)
    lengths = [1, 2, page_size, page_size + 1, 2000] + [random.randrange(1, 700) for _ in range(27)]
    prompts = [[random.randrange(3, 2048) for _ in range(length)] for length in lengths]
    cases = reference(with_tokenizer, prompts, max_tokens=20)
    flags = ("--model", str(with_tokenizer), "--page-size", str(page_size), "--chunk-tokens", str(chunk_tokens))
    check(tmp_path, cases, *flags)
