"""The decode step as a graph: recorded once for each batch size, it gives the tokens of the eager step for every later batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.errors import ConfigError
from common.executor import EngineDescription, ExecutorFailed, StepPlan, StepResult
from common.ids import Int32Array
from common.messages import EngineChoices, ModelIdentity
from common.pages.layout import KVDtype, KVLayout
from common.sampling_params import SamplingParams
from engine import model_runner
from engine.backends import make_kernels
from engine.gpu.flashinfer import AttentionNeeds, FlashInferAttention
from engine.kv_memory import KVMemory
from engine.logits_processors import make_processors
from engine.model_runner import ModelRunner
from engine.models.registry import load_model
from engine.models.served_shape import read_served_shape
from engine.models.weights import Loading
from engine.ports import Attention, LayerAttention, RowSampling
from engine.replay import CudaGraphs, GraphMaker, fitting, ladder
from engine.step_runner import StepRunner
from engine.torch_kernels import Kernels
from tests.engine import exact
from tests.engine.attention.flashinfer_double import FlashInferDouble
from tests.engine.checkpoints import VOCAB, llama, mistral, prompts_of, qwen3, saved
from tests.engine.driver import Driver
from tests.engine.graph_recorder import NotCapturable, RecordedGraphs
from tests.engine.padded_attention import CapturablePaged, as_on_a_card

CPU = torch.device("cpu")
ROWS, PAGES, CONTEXT, TOKENS = 8, 200, 96, 14
EOS = (2,)
EVERY_KIND = [
    SamplingParams(max_new_tokens=99, temperature=0.0),
    SamplingParams(max_new_tokens=99, temperature=0.9, seed=5),
    SamplingParams(max_new_tokens=99, temperature=1.1, top_k=7, seed=6),
    SamplingParams(max_new_tokens=99, temperature=0.8, top_p=0.9, min_p=0.02, seed=7),
    SamplingParams(max_new_tokens=99, temperature=0.9, seed=8, repetition_penalty=1.4, frequency_penalty=0.5, logprobs=2),
    SamplingParams(max_new_tokens=99, temperature=0.0, min_tokens=9, stop_token_ids=tuple(range(0, VOCAB, 2)), bad_words=((7,),)),
]


Attend = Callable[[KVMemory, int, Sequence[LayerAttention]], Attention]


def torch_attention(memory: KVMemory, heads: int, layers: Sequence[LayerAttention]) -> Attention:
    return CapturablePaged(memory, heads, layers, torch.float32)


def flashinfer_attention(memory: KVMemory, heads: int, layers: Sequence[LayerAttention]) -> Attention:
    needs = AttentionNeeds(memory, heads, layers, torch.float32, ROWS, CONTEXT // 8, "fa2")
    return FlashInferAttention(needs, Kernels(), FlashInferDouble((torch.float32,)))


class Engine:
    """A step runner over a small model, with or without graphs. replays: how often each batch size was replayed. maker: of the
    graphs."""

    def __init__(
        self,
        path: Path,
        sizes: tuple[int, ...] = (),
        attend: Attend = torch_attention,
        device: torch.device = CPU,
        maker: GraphMaker | None = None,
        kv_dtype: KVDtype = "float32",
        kernels: Kernels | None = None,
    ) -> None:
        shape = read_served_shape(path)
        # Recorded graphs see torch's operations alone.
        kernels = kernels or (Kernels() if device.type == "cpu" else make_kernels(device))
        model = load_model(path, shape, Loading(torch.float32, device, CONTEXT), kernels, lambda text: None)
        layout = KVLayout(layers=shape.layers, kv_heads=shape.kv_heads, head_dim=shape.head_dim, page_size=8, dtype=kv_dtype)
        self.memory = KVMemory(layout, PAGES, device)
        attention = attend(self.memory, shape.heads, model.attention)
        self.steps = StepRunner(
            model,
            kernels,
            self.memory,
            attention,
            max_rows=ROWS,
            pages_per_row=CONTEXT // 8,
            layer_groups=0,
            vocab_size=VOCAB,
            processors=make_processors(ROWS, VOCAB, EOS, device),
        )
        self.replays: dict[int, int] = {}
        self._size = 0
        self._maker = RecordedGraphs() if maker is None else maker
        if sizes:
            assert self.steps.capture(self, sizes, self._told) is None
        identity = ModelIdentity(
            name="", fingerprint="", architecture="", dtype="float32", vocab_size=VOCAB, context_tokens=CONTEXT
        )
        self.description = EngineDescription(identity, layout, PAGES, ROWS, self.memory.region, (), str(device))

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        size, replay = self._size, self._maker.capture(run)

        def counted() -> None:
            self.replays[size] = self.replays.get(size, 0) + 1
            replay()

        return counted

    def _told(self, text: str) -> None:
        self._size = int(text.split("batch size ")[1].split()[0])

    def run(self, plan: StepPlan) -> StepResult:
        return self.steps.launch(plan).wait()

    def answers(self, prompts: list[Int32Array], sampling: list[SamplingParams]) -> list[list[int]]:
        return Driver(self.run, self.description, growing=True).answers(prompts, TOKENS, sampling, chunk_tokens=20)


def prompts(count: int) -> list[Int32Array]:
    return prompts_of(*range(1, 9 * count, 9))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose heads are as wide as FlashInfer's."""
    return saved(qwen3(head_dim=64), tmp_path_factory.mktemp("model"))


every_model = pytest.mark.parametrize("make", [lambda: llama(attention_bias=True), qwen3], ids=["llama", "qwen3"])


def check_any_later_batch(path: Path, device: torch.device = CPU, maker: GraphMaker | None = None) -> None:
    """Greedy rows, noisy ones and such that filter, in float32."""
    eager, graphed = Engine(path, device=device), Engine(path, (1, 2, 4, 6), device=device, maker=maker)
    for count in (1, 2, 3, 5, 8):
        sampling = [EVERY_KIND[(row + count) % len(EVERY_KIND)] for row in range(count)]
        answers = graphed.answers(prompts(count), sampling)
        assert answers == eager.answers(prompts(count), sampling)
        assert len({token for answer in answers for token in answer}) > 5
    assert set(graphed.replays) == {1, 2, 4, 6}, "three rows run as four, five as six, and eight without a graph"


def check_spare_page(engine: Engine) -> None:
    """The rows that fill a batch of eight write there, and nowhere else."""
    pool = engine.memory.pool
    pool.fill_(7.0)
    engine.answers(prompts(3), EVERY_KIND[:3])
    touched = torch.nonzero((pool != 7.0).any(dim=1)).flatten().tolist()
    leased = np.random.default_rng(5).permutation(PAGES)[:20].tolist()
    assert PAGES in touched and set(touched) <= {PAGES, *leased}
    assert engine.steps.batch.length[ROWS] == 0


@every_model
def test_a_decode_step_recorded_once_gives_the_tokens_of_the_eager_one_for_any_later_batch(
    tmp_path: Path, make: Callable[[], PreTrainedModel]
) -> None:
    check_any_later_batch(saved(make(), tmp_path))


def test_a_graph_draws_rows_that_filter_and_only_those_that_a_processor_changes_are_drawn_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, drawn, behind = Engine(path, (4,)), list[int](), list[int]()
    sample = Kernels.sample

    def noted(self: Kernels, logits: Tensor, rows: RowSampling | None = None) -> Tensor:
        drawn.append(len(logits))
        return sample(self, logits, rows)

    def run(plan: StepPlan) -> StepResult:
        drawn.clear()
        result = engine.run(plan)
        behind.extend(drawn if not plan.chunks else [])
        return result

    monkeypatch.setattr(Kernels, "sample", noted)
    for kinds in (EVERY_KIND[:4], EVERY_KIND[2:5]):
        Driver(run, engine.description, growing=True).answers(prompts(len(kinds)), TOKENS, kinds, chunk_tokens=99)
        assert set(behind) == ({1} if kinds[-1].changes_logits else set())
    assert engine.replays[4] > 20


def test_flashinfer_in_a_graph_gives_the_tokens_of_torch_without_one(tmp_path: Path) -> None:
    """Three rows run as four; their prompts and answers grow beyond the window."""
    path = saved(mistral(head_dim=64, sliding_window=11), tmp_path)
    eager, graphed = Engine(path), Engine(path, (4,), flashinfer_attention)
    assert graphed.answers(prompts(3), EVERY_KIND[:3]) == eager.answers(prompts(3), EVERY_KIND[:3])
    assert graphed.replays[4] > 5


def test_a_graph_over_fp8_pages_gives_the_tokens_of_the_eager_step(path: Path) -> None:
    eager, graphed = (Engine(path, sizes, kv_dtype="float8_e4m3fn") for sizes in ((), (4,)))
    assert graphed.answers(prompts(3), EVERY_KIND[:3]) == eager.answers(prompts(3), EVERY_KIND[:3])
    assert graphed.replays[4] > 5


def test_rows_that_fill_a_batch_write_to_the_spare_page_alone(path: Path) -> None:
    check_spare_page(Engine(path, (8,)))


def test_a_model_that_cannot_be_captured_says_so_and_runs_eagerly(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(path)
    monkeypatch.setattr(CapturablePaged, "for_graph", lambda self, rows: None)
    assert engine.steps.capture(RecordedGraphs(), (4,), lambda text: None) == "the attention backend cannot be captured"
    assert len(engine.answers(prompts(2), EVERY_KIND[:2])[0]) == TOKENS


class FailsAt:
    """A maker of graphs whose capture of that number fails, as one does in which something waits for the card."""

    def __init__(self, number: int) -> None:
        self._left = number

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand advice")
        return RecordedGraphs().capture(run)


def captured_runner(path: Path, monkeypatch: pytest.MonkeyPatch, maker: GraphMaker, graphs: str = "auto") -> ModelRunner:
    as_on_a_card(monkeypatch, maker)
    return exact.runner(path, graph_sizes="1,2,4", max_running=4, graphs=graphs)


def test_a_capture_that_fails_leaves_eager_steps_and_a_warning(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = prompts(3)
    graphed = captured_runner(path, monkeypatch, FailsAt(99))
    assert graphed.description.choices == EngineChoices(attention="padded", graphs="on") and not caplog.records
    reason = "a capture failed with: CUDA error: operation not permitted when stream is capturing"
    for number in (1, 3):
        eager = captured_runner(path, monkeypatch, FailsAt(number))
        assert eager.description.choices.graphs == f"off, because {reason}"
        assert caplog.records[-1].levelname == "WARNING" and reason in caplog.messages[-1]
        ours, theirs = (
            Driver(made.run, made.description, growing=True).answers(asked, TOKENS, EVERY_KIND[:3]) for made in (eager, graphed)
        )
        assert ours == theirs
    with pytest.raises(ConfigError, match=f"--graphs on: {reason}; give --graphs off"):
        captured_runner(path, monkeypatch, FailsAt(2), graphs="on")


def test_a_capture_after_which_the_card_computes_nothing_ends_the_start_with_its_reason(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(device: torch.device, error: Exception) -> None:
        raise ExecutorFailed(f"{device} is lost: {error}")

    monkeypatch.setattr(model_runner, "check_device", lost)
    with pytest.raises(ExecutorFailed, match="is lost: CUDA error: operation not permitted"):
        captured_runner(path, monkeypatch, FailsAt(2))


@pytest.mark.parametrize("is_ended", [True, False])
def test_what_made_a_capture_fail_is_told_and_torch_hands_out_memory_again(
    monkeypatch: pytest.MonkeyPatch, is_ended: bool
) -> None:
    """A capture that CUDA has given up fails again when torch ends it, and torch's allocator goes on waiting for its end."""
    ended: list[tuple[int, object]] = []

    @contextmanager
    def capturing(graph: object, **named: object) -> Iterator[None]:
        try:
            yield
        finally:
            if not is_ended:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def end(device: int, pool: object) -> None:
        if is_ended:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        ended.append((device, pool))

    def run() -> None:
        if stream.synchronize.called:  # the second time, which is captured
            raise RuntimeError("first")

    stream = mock.Mock(device_index=3)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.Mock)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    with pytest.raises(RuntimeError, match=r"^first$"):
        CudaGraphs().capture(run)
    assert ended == ([] if is_ended else [(3, (0, 7))])


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: bool(x.any()),
        lambda x: torch.nonzero(x),
        lambda x: x[x > 0],
        lambda x: x.__setitem__(x > 0, torch.ones(3)),
        lambda x: torch.tensor([1]),
        lambda x: x.new_tensor([1]),
        lambda x: torch.asarray([1]),
        lambda x: torch.from_numpy(np.ones(1)),
        lambda x: torch.frombuffer(bytearray(8), dtype=torch.float32),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.to(device="cpu"),
        lambda x: np.asarray(x),
    ],
)
def test_the_recorder_refuses_what_a_capture_refuses(run: Callable[[Tensor], object]) -> None:
    def body() -> None:
        run(values)

    values = torch.ones(3)
    with pytest.raises(NotCapturable):
        RecordedGraphs().capture(body)


def test_the_recorder_lets_a_mask_put_one_number() -> None:
    values = torch.tensor([1.0, -1.0])
    replay = RecordedGraphs().capture(lambda: values.__setitem__(values > 0, 0.0))
    values.copy_(torch.tensor([-2.0, 2.0]))
    replay()
    assert values.tolist() == [-2.0, 0.0]


def test_the_ladder_of_batch_sizes_ends_at_the_most_rows() -> None:
    assert ladder("auto", 64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert ladder("auto", 3) == (1, 2, 3)
    assert ladder("auto", 1) == (1,)
    assert ladder("8,2,2", 64) == (2, 8)
    for size in range(1, 300):
        padded = fitting(ladder("auto", 300), size)
        assert padded is not None and size <= padded <= max(size * 1.6, size + 7)
    assert fitting((1, 2), 3) is None
    for asked in ("0", "", "a", "1,,2", "-1"):
        with pytest.raises(ConfigError, match="--graph-sizes must be"):
            ladder(asked, 64)
    with pytest.raises(ConfigError, match="--max-running 4"):
        ladder("8", 4)
