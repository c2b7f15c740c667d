"""The engine on a card: the contract of every device, CUDA graphs, long prompts in large batches, and memory that is measured."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from common.config import EngineConfig, ModelConfig
from common.errors import ConfigError
from common.executor import Chunk, RowStart, StepPlan, StepResult
from common.messages.variants import WeightsOnDisk
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.replay import CudaGraphs
from tests.engine import exact
from tests.engine.checkpoints import llama, prompts_of, qwen3, saved
from tests.engine.device_contract import SAMPLED, EngineContract
from tests.engine.driver import Driver
from tests.engine.exact import GREEDY
from tests.engine.test_graphs import EVERY_KIND, Engine, check_any_later_batch, check_spare_page, every_model

CARD = "cuda:0"
GIB = 2**30
LEFT_BYTES = 2 * GIB
"""What may stay free besides: memory that was measured for steps, and is not taken yet."""
START_S = 240.0
PARTNER = """
import json, sys
import numpy as np
from common.config import EngineConfig, ModelConfig
from engine.model_runner import ModelRunner
from tests.engine.driver import Driver
from tests.engine.exact import GREEDY
made = ModelRunner(ModelConfig(), EngineConfig(device="cuda:0", sharers=2, attention="torch"), lambda text: None)
(answer,) = Driver(made.run, made.description).answers([np.arange(300, 340, dtype=np.int32)], 8, GREEDY)
print(json.dumps({"pool_bytes": made.description.memory.region_bytes, "answer": answer}), flush=True)
sys.stdin.read()
"""
"""An instance that shares its card with another: it says what it got, and keeps it until its input ends."""


class TestEngineOnACard(EngineContract):
    device = CARD

    @pytest.mark.parametrize("make", [llama, qwen3])
    def test_long_prompts_in_a_batch_of_32_answer_as_transformers_does(
        self, tmp_path: Path, make: Callable[..., PreTrainedModel]
    ) -> None:
        model = make(max_position_embeddings=2048)
        made = self.runner(saved(model, tmp_path), kv_memory="256MiB", max_running=32)
        asked = prompts_of(2000, *np.random.default_rng(6).integers(1, 600, 31))
        exact.assert_exact(model, exact.answers(made, asked, 5, chunk_tokens=512))


@pytest.fixture
def own_stream() -> Iterator[None]:
    """Graphs cannot be captured on a card's default stream."""
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        yield
        torch.cuda.synchronize()


@pytest.mark.usefixtures("own_stream")
@every_model
def test_a_captured_decode_step_gives_the_tokens_of_the_eager_one_for_any_later_batch(
    tmp_path: Path, make: Callable[[], PreTrainedModel]
) -> None:
    check_any_later_batch(saved(make(), tmp_path), torch.device(CARD), CudaGraphs())


@pytest.mark.usefixtures("own_stream")
def test_rows_that_fill_a_graph_write_to_the_spare_page_alone(tmp_path: Path) -> None:
    check_spare_page(Engine(saved(qwen3(), tmp_path), (8,), device=torch.device(CARD), maker=CudaGraphs()))


def demo(**changes: object) -> ModelRunner:
    """Skips the test where what is asked for cannot be had on this host, such as FlashInfer without a compiler."""
    fields: dict[str, object] = {"device": CARD, "max_running": 8, "context_tokens": 1024}
    try:
        return ModelRunner(ModelConfig(), EngineConfig(**(fields | changes)), lambda text: None)  # type: ignore[arg-type]
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_served_engine_with_graphs_mostly_answers_as_without(sampling: object) -> None:
    """In bfloat16 with FlashInfer, which may divide a context differently, so a near tie may fall otherwise."""
    graphed = demo(graphs="on", graph_sizes="8", kv_memory="256MiB")
    random = np.random.default_rng(4)
    asked = [random.integers(300, 2000, length).astype(np.int32) for length in range(1, 400, 50)]
    eager = demo(graphs="off", kv_memory="256MiB")
    ours, theirs = (Driver(made.run, made.description).answers(asked, 16, sampling) for made in (graphed, eager))  # type: ignore[arg-type]
    equal = sum(mine == other for mine, other in zip(ours, theirs, strict=True))
    assert equal >= len(asked) // 2, f"{equal} of {len(asked)} answers are equal"


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_a_step_is_launched_and_layers_are_reported_while_another_step_runs(
    monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    """Half a second passes on the card between the last layer of a step and its logits. Everything of the host comes before."""
    made = demo(attention=attention, graphs="off", kv_memory="64MiB")
    start = RowStart(0, np.arange(20, dtype=np.int32), GREEDY)
    plans = [
        StepPlan(1, starts=(start,), chunks=(Chunk(0, 0, np.arange(300, 500, dtype=np.int32), last=True),)),
        StepPlan(2, decode_rows=np.zeros(1, dtype=np.int32)),
    ]
    expected = [made.run(plan).tokens.tolist() for plan in plans]  # memory is allocated, and kernels are loaded
    logits = Decoder.logits

    def late(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]
        return logits(self, hidden)

    monkeypatch.setattr(Decoder, "logits", late)
    reported: list[tuple[int, bool]] = []
    with made.on_device():
        stream = torch.cuda.current_stream()
        pending = [made.steps.launch(plan, lambda layers: reported.append((layers, stream.query()))) for plan in plans]
        assert not stream.query(), "a launch waited for the step before it"
        results = [step.wait().tokens.tolist() for step in pending]
    assert reported == [(2, False), (4, False)]
    assert results == expected


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_no_launch_does_what_makes_the_host_wait(attention: str) -> None:
    """Greedy, noisy and filtering rows, in chunks beside decode steps, and in graphs whose last rows are null. torch refuses what
    would wait for the card: reads, copies from pageable memory, sizes that depend on data."""
    made = demo(attention=attention, graph_sizes="4,8", kv_memory="64MiB")
    random = np.random.default_rng(8)
    asked = [random.integers(300, 2000, length).astype(np.int32) for length in (3, 30, 90, 200, 45)]
    sampling = [EVERY_KIND[row % len(EVERY_KIND)] for row in range(len(asked))]

    def launched(plan: StepPlan) -> StepResult:
        with made.on_device():
            torch.cuda.set_sync_debug_mode("error")
            try:
                pending = made.steps.launch(plan, lambda layers: None)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            return pending.wait()

    expected, answers = (
        Driver(run, made.description, growing=True).answers(asked, 12, sampling, chunk_tokens=40) for run in (made.run, launched)
    )
    assert answers == expected


@pytest.mark.parametrize("changes", [{"quantization": "fp8"}, {"kv_dtype": "fp8_e4m3"}], ids=["weights", "pages"])
def test_fp8_begins_most_answers_as_bfloat16_does(changes: dict[str, object]) -> None:
    random = np.random.default_rng(9)
    asked = [random.integers(300, 2000, length).astype(np.int32) for length in range(5, 325, 40)]
    runners = demo(kv_memory="256MiB"), demo(kv_memory="256MiB", **changes)
    whole, small = (Driver(made.run, made.description).answers(asked, 1, GREEDY) for made in runners)
    assert sum(ours == theirs for ours, theirs in zip(small, whole, strict=True)) >= len(asked) // 2


@pytest.mark.parametrize("free_bytes", [0, 2**40], ids=["from the host", "from the card"])
def test_weights_that_change_are_copied_into_what_graphs_read(
    free_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = qwen3(max_position_embeddings=512)
    made = exact.runner(saved(model, tmp_path / "old"), device=CARD, dtype="float32", attention="torch")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8)
    model.save_pretrained(tmp_path / "new")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 2**40))
    with made.on_device():
        made.weights.switch(made.weights.stage(WeightsOnDisk(str(tmp_path / "new")), lambda _: None))
    asked = [np.arange(10, 10 + length, dtype=np.int32) for length in (5, 40, 23)]
    exact.assert_exact(model, exact.answers(made, asked, 6, 16))


# --- memory ------------------------------------------------------------------------------------------------------------------


def test_pages_take_what_is_left_and_the_largest_step_still_fits(tmp_path: Path) -> None:
    """`--kv-memory auto`: 2 % of the card stay free, or 1 GiB, and little more. A full chunk beside every row needs no more."""
    torch.cuda.empty_cache()
    model = saved(qwen3(max_position_embeddings=2048), tmp_path)
    made = exact.runner(
        model, device=CARD, kv_memory="auto", max_running=256, chunk_tokens=2048, dtype="bfloat16", attention="torch"
    )
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    kept = max(GIB, 0.02 * total_bytes)
    assert 0.25 * kept < free_bytes < kept + LEFT_BYTES
    asked = [np.full(length, 7, dtype=np.int32) for length in (2048 - 255, *[1] * 255)]
    answers = Driver(made.run, made.description).answers(asked, 2, SAMPLED, chunk_tokens=2048)
    assert all(len(answer) == 2 for answer in answers)
    after, _ = torch.cuda.mem_get_info()
    assert after > 0.25 * kept, "steps take no more than was measured"


def test_two_instances_that_start_on_one_card_get_equal_parts_and_the_same_answers() -> None:
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.mem_get_info()[1]
    command = [sys.executable, "-c", PARTNER]
    root = str(Path(__file__).parents[2])
    partners = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(2)]
    try:
        told = []
        for partner in partners:
            assert partner.stdout is not None
            line = partner.stdout.readline()
            assert line, f"an instance ended with {partner.wait(START_S)}"
            told.append(json.loads(line))
    finally:
        for partner in partners:
            partner.communicate(timeout=START_S)
    first, second = told
    assert first["answer"] == second["answer"]
    assert first["pool_bytes"] == second["pool_bytes"]
    assert 0.3 * total_bytes < first["pool_bytes"] < 0.5 * total_bytes
