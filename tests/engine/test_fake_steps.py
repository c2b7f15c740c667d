"""Whole steps of real models on a card of fake tensors: a start, chunks, mixed steps, captures, replays, rows that grow, and all
that a request may ask for. Nothing waits for the card, no operation mixes devices, and no size depends on data.

Owns the sizes of the models and the steps. With few layers here, and with --soak with all of them, by more ranks and dtypes.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from common.config import EngineConfig, ModelConfig
from common.executor import Chunk, RowStart, StepPlan, StepResult
from common.ids import Digest
from common.sampling_params import SamplingParams
from engine.gpu.triton_kernels import TritonKernels
from engine.lora.adapter_files import Adapter, Factors
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from tests.engine.driver import Driver
from tests.engine.fake_card import CARD, CheckedKernel, FakeCard, Refused, fake_card, fake_group

pytestmark = pytest.mark.skipif(
    find_spec("flashinfer") is None or find_spec("triton") is None, reason="flashinfer-python or triton is not installed"
)
LAYERS, FEW_ROWS = 2, "4"
LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "eos_token_id": 128001, "hidden_act": "silu",
}  # fmt: skip
LLAMA_70B: dict[str, object] = {
    **LLAMA,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
QWEN3: dict[str, object] = {
    **LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_attention_heads": 16, "num_hidden_layers": 28, "head_dim": 128, "vocab_size": 151936, "eos_token_id": 151645,
    "max_position_embeddings": 40960, "tie_word_embeddings": True, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
}  # fmt: skip
QWEN3_14B: dict[str, object] = {
    **QWEN3, "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 40, "num_hidden_layers": 40,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_MOE: dict[str, object] = {
    **QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 4, "num_hidden_layers": 48, "moe_intermediate_size": 768, "num_experts": 128, "decoder_sparse_step": 1,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "mlp_only_layers": [], "intermediate_size": 6144,
    "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A model as it is served. layers: 0: all."""

    config: dict[str, object]
    layers: int = LAYERS
    rank: int = 0
    ranks: int = 1
    flags: dict[str, object] = field(default_factory=dict)
    warms_up: bool = True
    """Whether its largest steps run at its start."""


FP8: dict[str, object] = {"quantization": "fp8", "kv_dtype": "fp8_e4m3"}
CASES = {
    "llama 70b, rank 7 of 8": Case(LLAMA_70B, 1, rank=7, ranks=8, warms_up=False),
    "qwen3 30b-a3b": Case(QWEN3_MOE, 1, warms_up=False),
}
MORE_CASES = {
    "llama 8b in fp8 over fp8 pages": Case(LLAMA, flags=FP8),
    "llama 8b": Case(LLAMA, 0, flags={"kv_memory": "auto", "graph_sizes": "auto", "max_running": 64}),
    "qwen3 0.6b": Case(QWEN3, 0),
    "qwen3 14b": Case(QWEN3_14B, 0),
    "qwen3 30b-a3b, more layers": Case(QWEN3_MOE, 6),
    "llama 8b, fp8 weights": Case(LLAMA, 0, flags={"quantization": "fp8"}),
    "llama 8b, fp8 pages": Case(LLAMA, 0, flags={"kv_dtype": "fp8_e4m3"}),
    **{f"llama 70b, rank {rank} of {ranks}": Case(LLAMA_70B, 8, rank, ranks) for ranks in (4, 8) for rank in range(ranks)},
    **{f"qwen3 14b, rank {rank} of 4": Case(QWEN3_14B, 4, rank, 4) for rank in range(4)},
    **{f"qwen3 30b-a3b, rank {rank} of 4": Case(QWEN3_MOE, 4, rank, 4) for rank in range(4)},
}


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCard]:
    with fake_card(tmp_path_factory.mktemp("guard")) as made:
        yield made


def runner(card: FakeCard, folder: Path, case: Case) -> ModelRunner:
    layers = {"num_hidden_layers": case.layers} if case.layers else {}
    (folder / "config.json").write_text(json.dumps(case.config | layers))
    fields: dict[str, object] = {
        "device": "cuda", "load_format": "dummy", "grammar": "off", "kv_memory": "8GiB", "graph_sizes": FEW_ROWS,
        "max_running": 8, "chunk_tokens": 256, "context_tokens": 4096,
    }  # fmt: skip
    engine = EngineConfig(**(fields | case.flags))  # type: ignore[arg-type]
    group = fake_group(card, case.rank, case.ranks)
    with contextlib.ExitStack() as stack:
        if not case.warms_up:
            stack.enter_context(mock.patch.object(ModelRunner, "_warm_up", lambda *given: None))
        return ModelRunner(ModelConfig(model=str(folder)), engine, lambda text: None, group)


def serving(card: FakeCard, made: ModelRunner) -> Callable[[StepPlan], StepResult]:
    """Runs plans, in which the host waits for nothing."""

    def run(plan: StepPlan) -> StepResult:
        with card.steps():
            return made.run(plan, lambda layers: None)

    return run


def a_prompt(tokens: int) -> np.ndarray:
    return np.arange(tokens, dtype=np.int32) % 1000


PLAIN = SamplingParams(max_new_tokens=99, temperature=0.0)
KINDS = [
    SamplingParams(max_new_tokens=99, temperature=0.9, top_k=7, top_p=0.9, min_p=0.02, prompt_logprobs=2),
    SamplingParams(max_new_tokens=99, temperature=0.9, seed=5),
    SamplingParams(max_new_tokens=99, temperature=0.8, top_p=0.9),
    SamplingParams(
        max_new_tokens=99, temperature=0.9, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.2, logprobs=2,
        logit_bias=((3, 1.0), (70000, -2.0)), min_tokens=9, stop_token_ids=(5, 6), bad_words=((7,), (8, 9)),
    ),
    PLAIN,
]  # fmt: skip
LENGTHS = (16, 700, 3, 48, 9)
"""Two of them end with a page, so that their rows grow with the first token."""


def test_every_kind_of_step_and_request_runs_at_the_size_of_llama_8b(card: FakeCard, tmp_path: Path) -> None:
    made = runner(card, tmp_path, Case(LLAMA))
    card.started.clear()
    run, replays = serving(card, made), card.replays
    Driver(run, made.description, growing=True).answers([a_prompt(n) for n in LENGTHS], 3, KINDS, chunk_tokens=512)
    assert card.replays > replays, "the last rows are a graph's"
    per_row = {"add_rms_norm": 2, "rms_norm": 1, "silu_and_mul": 1, "rotate_and_write": 1, "paged_run": 1}
    assert all(card.started.count(name) > times for name, times in per_row.items())
    embeddings = tuple(SamplingParams(max_new_tokens=1, pooling=pooling) for pooling in ("mean", "last", "cls"))
    pages = np.arange(48, dtype=np.int32).reshape(3, 16)
    for start, last in ((0, False), (100, True)):
        starts = () if start else tuple(RowStart(row, pages[row], each) for row, each in enumerate(embeddings))
        chunks = tuple(Chunk(row, start, a_prompt(100), last=last) for row in range(3))
        result = run(StepPlan(1, starts=starts, chunks=chunks))
    assert {row: len(each) for row, each in result.embeddings.items()} == dict.fromkeys(range(3), 4 * 4096)


def two_steps(card: FakeCard, made: ModelRunner) -> None:
    """A chunk; a last chunk beside a decode row; decode rows by a graph, and without one."""
    run, rows = serving(card, made), np.arange(5, dtype=np.int32)
    pages = np.arange(5 * 50, dtype=np.int32).reshape(5, 50)
    running = [RowStart(row, pages[row], KINDS[1], length=40 + row, last_token=1) for row in range(1, 5)]
    run(StepPlan(1, (RowStart(0, pages[0], PLAIN), *running), (Chunk(0, 0, a_prompt(200), last=False),)))
    run(StepPlan(2, chunks=(Chunk(0, 200, a_prompt(100), last=True),), decode_rows=rows[1:]))
    replays = card.replays
    run(StepPlan(3, decode_rows=rows[:3]))
    assert card.replays == replays + 1
    run(StepPlan(4, decode_rows=rows))
    drafts = np.zeros(2, dtype=np.int32)
    for step, some in ((5, rows[:2]), (6, rows)):  # with two drafts of row 0: four rows by a graph, and seven without one
        run(StepPlan(step, decode_rows=some, draft_rows=drafts, draft_tokens=drafts + 7))
        assert card.replays == replays + 2


@pytest.mark.parametrize("name", CASES)
def test_a_model_steps_at_its_real_width(card: FakeCard, tmp_path: Path, name: str) -> None:
    two_steps(card, runner(card, tmp_path, CASES[name]))


@pytest.mark.soak
@pytest.mark.parametrize("name", MORE_CASES)
def test_a_model_steps_with_all_its_layers_and_on_every_rank(card: FakeCard, tmp_path: Path, name: str) -> None:
    two_steps(card, runner(card, tmp_path, MORE_CASES[name]))


def test_rows_with_adapters_step_eagerly_and_by_graphs(card: FakeCard, tmp_path: Path) -> None:
    """One rank has what another one has not, and a step has rows of both, and one without."""
    flags: dict[str, object] = {"max_loaded_loras": 2, "max_lora_rank": 64}
    config = {**LLAMA, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8}
    made = runner(card, tmp_path, Case(config, 1, flags=flags, warms_up=False))
    digests = [Digest("a" * 64), Digest("b" * 64)]
    for digest, rank in zip(digests, (8, 64), strict=True):
        factors = {
            name: Factors(*(torch.zeros(size, dtype=torch.bfloat16) for size in ((rank, len(at.columns)), (rank, len(at.rows)))))
            for name, at in list(made.adapters.targets.items())[rank == 64 :]
        }
        made.adapters.hold(Adapter(digest, rank, factors).pinned())
    card.started.clear()
    driver = Driver(serving(card, made), made.description, growing=True, adapters=[digests[0], digests[1], Digest("")])
    driver.answers([a_prompt(n) for n in (16, 300, 5)], 2, [KINDS[1], PLAIN, KINDS[3]], chunk_tokens=200)
    assert {"shrink", "expand"} <= set(card.started)


# --- mistakes, each of which must be found -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(card: FakeCard, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    made = runner(card, tmp_path_factory.mktemp("small"), Case(QWEN3, 1, flags=FP8, warms_up=False))
    two_steps(card, made)  # without a mistake
    return made


def an_index_on_the_host(hidden: Tensor) -> Tensor:
    return hidden[torch.zeros(len(hidden), dtype=torch.int64)]


def a_size_that_depends_on_data(hidden: Tensor) -> Tensor:
    return hidden[(hidden[:, 0] > 0).nonzero()[:, 0]]


def a_mask_that_is_counted(hidden: Tensor) -> Tensor:
    hidden[hidden > 0] = hidden.new_empty(3)
    return hidden


def a_number_that_is_read(hidden: Tensor) -> Tensor:
    return hidden * float(hidden.amax())


def a_copy_for_which_the_host_waits(hidden: Tensor) -> Tensor:
    return hidden + torch.ones(1).to(CARD)


def a_copy_from_pageable_memory(hidden: Tensor) -> Tensor:
    return hidden + torch.ones(100, hidden.shape[1]).to(CARD, non_blocking=True)[0]


def another_shape(hidden: Tensor) -> Tensor:
    return hidden[:, 1:]


def of_logits(mistake: Callable[[Tensor], Tensor]) -> tuple[type, str, Callable[..., object]]:
    original = Decoder.logits
    return Decoder, "logits", lambda self, hidden: original(self, mistake(hidden))


MISTAKES = [
    *(an_index_on_the_host, a_size_that_depends_on_data, a_mask_that_is_counted, a_number_that_is_read),
    *(a_copy_for_which_the_host_waits, a_copy_from_pageable_memory, another_shape),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_model_is_found(
    card: FakeCard, small: ModelRunner, monkeypatch: pytest.MonkeyPatch, mistake: Callable[[Tensor], Tensor]
) -> None:
    monkeypatch.setattr(*of_logits(mistake))
    with pytest.raises((Refused, RuntimeError)):
        two_steps(card, small)


def test_products_of_another_dtype_than_fp8_are_found(
    card: FakeCard, small: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TritonKernels, "quantise", lambda self, x: (x, x.new_ones((len(x), 1), dtype=torch.float32)))
    with pytest.raises((RuntimeError, ValueError), match=r"scaled_mm|[Ff]loat8"):
        two_steps(card, small)


class Normed:
    """A kernel of Triton, as far as its parameters."""

    @staticmethod
    def fn(x: object, weight: object, out: object, rows: object, x_row: object, eps: object, BLOCK: "constexpr") -> None: ...  # type: ignore[name-defined]  # noqa: F821


def started(card: FakeCard, **changes: object) -> None:
    """A norm of four rows, as it is to be started, but for the changes."""
    x, weight = torch.empty(4, 64, device=CARD), torch.empty(64, device=CARD)
    given: dict[str, object] = {"x": x, "weight": weight, "out": x, "rows": 4, "x_row": 64, "eps": 1e-6, "BLOCK": 64}
    grid = changes.pop("grid", (1,))
    assert isinstance(grid, tuple)
    CheckedKernel(card, "norm", Normed)[grid](**(given | changes))


@pytest.mark.parametrize(
    "change",
    [
        lambda: {"weight": torch.empty(64)},
        lambda: {"x": torch.empty(64, 4, device=CARD).t()},
        lambda: {"x": torch.empty(4, 65, device=CARD)[:, :64]},
        lambda: {"out": torch.empty(4, 65, device=CARD)[:, :64]},
        lambda: {"columns": 64},
        lambda: {"rows": 2**31},
        lambda: {"BLOCK": torch.empty(64, device=CARD)},
        lambda: {"grid": (1, 2**16)},
        lambda: {"grid": (0,)},
        lambda: {"num_warps": 3},
    ],
)
def test_a_kernel_that_is_started_wrongly_is_found(card: FakeCard, change: Callable[[], dict[str, object]]) -> None:
    started(card, num_warps=8, num_stages=2)
    started(card, x=torch.empty(4, 65, device=CARD)[:, :64], x_row=65)
    with pytest.raises(Refused):
        started(card, **change())


@pytest.mark.parametrize(
    "run",
    [
        lambda card: torch.empty(3, pin_memory=True).to(CARD, non_blocking=True),
        lambda card: torch.empty(3, pin_memory=True).copy_(torch.empty(3, device=CARD), non_blocking=True),
        lambda card: torch.tensor([1], device=CARD),
        lambda card: torch.cuda.synchronize(),
    ],
)
def test_a_capture_refuses_what_crosses_to_the_host(card: FakeCard, run: Callable[[FakeCard], object]) -> None:
    run(card)

    def captured() -> None:
        run(card)

    with pytest.raises(Refused):
        card.capture(captured)
