"""The model runner: a loaded checkpoint on one device, its pages, and the step runner over them.

Owns the order of the start: weights, what memory is left, pages, graphs or recordings, and the warm-up, which runs the largest
steps once, to compile what is compiled at first use and to show how much memory a step takes. Owns as well what the C library
does with memory that a step has given back, on CPU. Knows no threads, requests or messages.
"""

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from common.config import LORAS_PER_BATCH, EngineConfig, ModelConfig
from common.drafting import HEAD_TAIL, HEAD_WINDOW, MOST_DRAFTS, Drafting
from common.errors import ConfigError, MemoryShort, Unavailable, first_line
from common.executor import Chunk, RowStart, StepPlan, StepResult
from common.host import mps_is_there, sharers_of_host
from common.messages import EngineChoices
from common.model_path import resolve_model_path
from common.sampling_params import MAX_BAD_WORD, MAX_BAD_WORDS, MAX_BIASED_TOKENS, MAX_LOGPROB_IDS, MAX_LOGPROBS, SamplingParams
from engine.backends import (
    check_attention,
    check_device,
    device_of,
    dtype_of,
    first_reason,
    make_attention,
    make_kernels,
    sharing_of,
    with_device_defaults,
)
from engine.checkpoint import weight_files
from engine.draft_models import DraftHead, DraftModel
from engine.gpu.flashinfer import AttentionNeeds, PrefillKernels
from engine.grammar.compiler import vocabulary_of
from engine.grammar.compiler_process import CompilerProcess
from engine.grammar.grammars import Grammars
from engine.grammar.masks import load_mask_kernel
from engine.kv_budget import (
    Agree,
    KVBudget,
    agreed_budget,
    as_offered,
    auto_host_kv_bytes,
    check_context,
    describe,
    given_kv_bytes,
    kv_budget,
    layout_of,
)
from engine.kv_memory import KVMemory, KVMemoryMeter, torch_dtype, total_bytes
from engine.logits_processors import make_processors
from engine.lora.adapter_slots import AdapterSlots
from engine.models.decoder import Decoder
from engine.models.eagle3 import Eagle3Head, HeadShape, load_head, read_head_shape
from engine.models.registry import load_model, model_digests
from engine.models.served_shape import read_served_shape
from engine.models.shape import check_ranks
from engine.models.staging import ModelWeights, last_changes
from engine.models.weights import Loading
from engine.parallel import ALONE, Group
from engine.ports import Model
from engine.replay import CudaGraphs, GraphMaker, ladder, load_recorder
from engine.rows import RowFeatures
from engine.step_runner import PendingStep, StepRunner

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_BYTES = 2**30
_NEVER = 2**31 - 1


def keep_step_memory() -> None:
    """The memory of a step's tensors stays with this process, for the next step. Else glibc gives large tensors back to the
    system at once. Then the system clears each page again when it is next touched, which takes 5 % of a prefill. Threads share
    one arena, because glibc gives back those of threads whatever is set.

    It holds for what is allocated from now on: call it when the weights are loaded. Does nothing where the C library is another.
    Source: mallopt(3).
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    try:
        mallopt = library.mallopt
    except AttributeError:  # musl
        return
    for parameter, value in ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _LARGEST_BYTES), (_M_TRIM_THRESHOLD, _NEVER)):
        mallopt(parameter, value)


_ANY = SamplingParams(
    max_new_tokens=1,
    temperature=1.0,
    top_p=0.9,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),) * MAX_BIASED_TOKENS,
    min_tokens=2,
    bad_words=((0,) * MAX_BAD_WORD,) * MAX_BAD_WORDS,
    logprobs=MAX_LOGPROBS,
    prompt_logprobs=MAX_LOGPROBS,
    logprob_ids=(0,) * MAX_LOGPROB_IDS,
)
"""With all that a request may ask for, because that takes the most memory."""

WARM_UP_PAGES = 1


def warm_up(steps: StepRunner, page_size: int, chunk_tokens: int, max_rows: int, context_tokens: int) -> None:
    """A chunk that begins a prompt; the last chunk of the longest context beside as many decode rows as there can be, one of
    which is as long; and decode rows alone. All rows have their KV in page 0, again and again: WARM_UP_PAGES are enough."""
    tokens = min(chunk_tokens, context_tokens)
    prompt, longest = np.zeros(tokens, dtype=np.int32), np.zeros(-(-context_tokens // page_size), dtype=np.int32)
    known = (np.arange(context_tokens) % steps.vocab_size).astype(np.int32)
    one, decoding = RowStart(0, longest[:1], _ANY, last_token=0, token_ids=known[:1], answer_tokens=1), list[RowStart]()
    for row in range(1, max_rows):
        is_long = row == 1
        decoding.append(replace(one, row=row, pages=longest, length=context_tokens - 1) if is_long else replace(one, row=row))
    rows = np.arange(1, max_rows, dtype=np.int32)
    beginning, ending = (RowStart(0, longest, _ANY, length=length, token_ids=known) for length in (0, context_tokens - tokens))
    steps.launch(StepPlan(0, starts=(beginning,), chunks=(Chunk(0, 0, prompt, last=True),))).wait()
    last = Chunk(0, context_tokens - tokens, prompt, last=True)
    steps.launch(StepPlan(0, starts=(ending, *decoding), chunks=(last,), decode_rows=rows)).wait()
    steps.launch(StepPlan(0, starts=(one, *decoding), decode_rows=np.arange(max_rows, dtype=np.int32))).wait()


SayProgress = Callable[[str], None]
_log = logging.getLogger(__name__)


class ModelRunner:
    """Loads a checkpoint and runs plans. Raises ConfigError for a checkpoint that it cannot serve, and MemoryShort.

    warms_grammars: load the compiler of grammars meanwhile, on threads and a process of its own.
    drafting: with a model, or a head, that proposes tokens. draft_of: it is such a model itself, of this one.
    group: the ranks that compute the model together. Each has a runner, which loads its share of the weights and has its share of
    the KV heads in its pages; all run the same plans in the same order. agree: of a number of pages that differs between ranks,
    the least of all ranks. Every rank calls it equally often, with numbers of the same meaning.
    """

    _graphs: str
    """Whether decode steps are replayed, for people: "on", "off", or that and why."""
    _chosen: tuple[str, PrefillKernels | None] | None = None
    """Which attention was had first: its name and kernels. What has failed then is not tried, nor told, again."""
    draft_model: DraftModel | DraftHead | None = None
    _features: RowFeatures | None = None
    _head_bytes = 0
    """What the KV of a draft head takes, over all rows."""
    _given_budget: KVBudget | None = None
    """That of two models which has been decided for both."""

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        progress: SayProgress,
        group: Group = ALONE,
        agree: Agree = as_offered,
        warms_grammars: bool = False,
        drafting: Drafting | None = None,
        draft_of: "ModelRunner | None" = None,
    ) -> None:
        path = resolve_model_path(model.model, weights=engine.load_format != "dummy")
        self._engine = engine = with_device_defaults(engine)
        self._group, self._agree, self._progress = group, agree, progress
        self._device = device_of(engine.device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        dtype_name = dtype_of(engine.dtype, self._device)
        self._dtype = torch_dtype(dtype_name)
        self.drafting = drafting
        self._head = None if draft_of is None else draft_of.head_in(path)
        self._shape = shape = read_served_shape(path) if self._head is None else self._head.shape
        check_ranks(shape, group.ranks, engine.quantization)
        vocabulary = partial(vocabulary_of, path, shape.vocab_size, shape.eos_token_ids)
        self.grammars = None if engine.grammar == "off" else Grammars(vocabulary, CompilerProcess)
        self.warming = self.grammars.warm() if self.grammars is not None and warms_grammars else None
        self._layout = layout = layout_of(shape, engine, group.rank, group.ranks, dtype_name)
        check_attention(engine.attention, layout, self._dtype, self._device)
        self._given_bytes = given = given_kv_bytes(engine.kv_memory, str(self._device), total_bytes(self._device))
        check_context(shape.context_tokens, engine.context_tokens)  # refused before the weights are loaded
        if given is not None:
            kv_budget(layout, given, shape.context_tokens, engine.context_tokens)
        self._graph_sizes = ladder(engine.graph_sizes, engine.max_running)
        self._graphs = "off" if engine.graphs == "off" else "on"
        self._maker = self._graph_maker()
        context = engine.context_tokens or shape.context_tokens
        sharers = sharers_of_host(engine.sharers, engine.threads, group.ranks)
        loading = Loading(self._dtype, self._device, context, engine.load_format, engine.quantization, group, sharers)
        with self.on_device():
            self._kernels = make_kernels(self._device)
            self.model, self.weights = self._load(path, loading, draft_of)
            self.adapters = self._make_adapters()
            if drafting is not None and drafting.model:
                self.draft_model = self._make_draft_model(drafting)
            elif draft_of is not None:
                self._given_budget = draft_of.budget_beside(self)
            budget = self._given_budget or self._budget()
            self.memory = KVMemory(layout, budget.total_pages, self._device)
            self.steps = self._make_ready_steps(budget.context_tokens)
        self.description = describe(
            model,
            engine,
            shape,
            layout,
            budget,
            self.memory.region,
            digests=model_digests(path, shape, loading),
            weights=self.weights.digest,
            dtype=dtype_name,
            choices=self._choices(),
        )

    def on_device(self) -> AbstractContextManager[object]:
        """The device and its stream, for the thread that launches steps. Only one thread launches at a time."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def launch(
        self, plan: StepPlan, report: Callable[[int], None] | None = None, between: Callable[[], None] | None = None
    ) -> PendingStep:
        """As `StepRunner.launch`, behind what the draft model has to propose."""
        if self.draft_model is None:
            return self.steps.launch(plan, report, between)
        plan, drafting_s = self.draft_model.complete(plan)
        pending = self.steps.launch(plan, report, between)
        pending.drafting_s = drafting_s
        return pending

    def run(self, plan: StepPlan, report: Callable[[int], None] | None = None) -> StepResult:
        """Launch one step and wait for it."""
        with self.on_device():
            return self.launch(plan, report).wait()

    def _choices(self) -> EngineChoices:
        sharing = sharing_of(self._engine, self._device, mps_is_there(os.environ))
        if sharing:
            self._progress(sharing)
        attention = self._chosen[0] if self._chosen else ""
        return EngineChoices(attention=attention, graphs=self._graphs, sharing=sharing, sums=self._group.sums)

    # --- making ------------------------------------------------------------------------------------------------------------

    def _load(self, path: Path, loading: Loading, draft_of: "ModelRunner | None") -> tuple[Model, ModelWeights]:
        """Raises Unavailable when somebody writes the files meanwhile: their digest may then be that of other weights."""
        files = [] if loading.load_format == "dummy" else weight_files(path)
        before = last_changes(files)
        if self._head is not None and draft_of is not None and isinstance(draft_of.model, Decoder):
            model: Model = load_head(path, self._head, loading, self._kernels, draft_of.model)
        else:
            model = load_model(path, self._shape, loading, self._kernels, self._progress)
        weights = ModelWeights(model, path, self._shape, loading, self._kernels)
        if not all(map(Path.exists, files)) or last_changes(files) != before:
            raise Unavailable(f"the weights in {path} changed while they were read: start again when they are complete")
        return model, weights

    def _make_draft_model(self, drafting: Drafting) -> DraftModel | DraftHead:
        """The draft model, with as many pages as this one gets, or head. Its weights are loaded before that is known."""
        plain = replace(self._engine, lora="", max_loaded_loras=0, max_lora_rank=64, max_loras_per_batch=LORAS_PER_BATCH)
        engine = replace(plain, grammar="off", kv_memory="auto", memory_part=0, context_tokens=0)
        if drafting.is_head:
            engine = replace(engine, quantization="none", graphs="off")
        kind = "head" if drafting.is_head else "model"
        self._progress(f"loading the draft {kind} {drafting.model}")
        shared = self._progress, self._group, self._agree
        try:
            runner = ModelRunner(ModelConfig(model=drafting.model), engine, *shared, draft_of=self)
        except ConfigError as error:
            raise type(error)(f"--speculative-config: with the draft {kind} {drafting.model}: {error}") from error
        if self._features is None or not isinstance(runner.model, Eagle3Head):
            return DraftModel(runner.steps, self._shape.vocab_size)

        def reread(plan: StepPlan) -> PendingStep:
            return self.steps.launch(plan, rereads=True)

        return DraftHead(runner.model, runner.steps, self._features, reread)

    def head_in(self, path: Path) -> HeadShape | None:
        """The shape of the draft head in a folder; None: what is there is asked to be a draft model. Raises ConfigError."""
        if self.drafting is None or not self.drafting.is_head:
            return None
        if not isinstance(self.model, Decoder):
            raise ConfigError("it reads hidden states, which only Tandem's own decoders give, not transformers' models")
        return read_head_shape(path, self.model.shape)

    def budget_beside(self, draft: "ModelRunner") -> KVBudget:
        """That of the draft model or head, which is loaded. A draft model's pages are shared out with this one's, so it decides
        both; a head has some for each row. Raises ConfigError."""
        rows, layout, own_context = self._engine.max_running, draft._layout, draft._shape.context_tokens
        if isinstance(draft.model, Eagle3Head):
            self._features = RowFeatures(draft.model.combine, rows, HEAD_TAIL + MOST_DRAFTS, draft.model.like)
            pages = rows * layout.pages_for(HEAD_WINDOW)
            self._head_bytes = pages * layout.page_bytes
            return KVBudget(pages, HEAD_WINDOW)
        self._given_budget = budget = self._budget(layout.page_bytes)
        if own_context < budget.context_tokens:
            raise ConfigError(
                f"it has a context of {own_context} tokens, and this instance "
                f"one of {budget.context_tokens}: give --context-tokens {own_context}, or another draft model"
            )
        return budget

    def _budget(self, beside_bytes: int = 0) -> KVBudget:
        """Pages and context. Call it after the weights are loaded: only then is it known what memory is left. beside_bytes: what
        another model's KV takes beside each page."""
        layout, own, asked, given = self._layout, self._shape.context_tokens, self._engine.context_tokens, self._given_bytes
        if given is not None:
            kv_bytes = given
        elif self._device.type == "cpu":
            spared = self.model.spared_bytes + self.adapters.host_bytes + self._head_bytes
            sizes = layout, asked or own
            kv_bytes = auto_host_kv_bytes(self._engine, self._group.ranks, *sizes, self._progress, spared, beside_bytes)
        else:
            kv_bytes = self._measured_kv_bytes()
        budget = agreed_budget(layout, kv_bytes, own, asked, given is None, self._agree, beside_bytes)
        if budget.context_tokens < (asked or own):
            self._progress(
                f"context capped to {budget.context_tokens} tokens, because the KV memory cannot hold the model's {own}: give "
                f"more --kv-memory, or --context-tokens (the same for all instances of a fleet)"
            )
        self._progress(f"making {budget.total_pages} KV pages of {layout.page_bytes} bytes")
        return budget

    def _measured_kv_bytes(self) -> int:
        """Run the largest steps on a small pool, to see how much memory they take besides the pages. Raises MemoryShort."""
        self._progress("measuring the memory of the largest step")
        meter = KVMemoryMeter(self._device, max(1, self._engine.sharers))
        limits = self._shape.context_tokens, self._engine.context_tokens
        context = agreed_budget(self._layout, meter.left_bytes(), *limits, True, self._agree).context_tokens
        with self._memory_errors(f"lower --chunk-tokens, --max-running or --context-tokens; {meter}"):
            memory = KVMemory(self._layout, WARM_UP_PAGES, self._device)
            trial = self._make_steps(memory, context)
            self._warm_up(trial, context)
            workspace = meter.peak_bytes() - memory.region.region_bytes
            if self._maker is not None:
                workspace += self._measured_graph_bytes(trial, meter)
        del memory, trial
        return meter.left_for_pages(workspace, self._progress)

    def _measured_graph_bytes(self, trial: StepRunner, meter: KVMemoryMeter) -> int:
        """Graphs share the memory of the largest, but each has some of its own: as much as the smallest."""
        maker, sizes, before = CudaGraphs(), self._graph_sizes, meter.held_bytes()
        self._capture(trial, maker, sizes[-1:])
        largest = meter.held_bytes() - before
        if len(sizes) == 1 or self._graphs != "on":
            return largest
        self._capture(trial, maker, sizes[:1])
        own = max(0, meter.held_bytes() - before - largest)
        return largest + own * (len(sizes) - 1)

    @contextlib.contextmanager
    def _memory_errors(self, fix: str) -> Iterator[None]:
        """Out of memory is one line that says what to do."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            reason = first_line(error)
            raise MemoryShort(f"the largest steps do not fit in the memory of {self._device} ({reason}): {fix}") from error

    # --- steps -------------------------------------------------------------------------------------------------------------

    def _make_adapters(self) -> AdapterSlots:
        made = AdapterSlots(self._engine.lora_slots, self._engine.lora_places, self._engine.max_lora_rank)
        made.attach(self.model, self._shape, self._kernels, self._dtype, self._device, self._group)
        return made

    def _make_steps(self, memory: KVMemory, context_tokens: int) -> StepRunner:
        engine, shape, pages_per_row = self._engine, self._shape, self._layout.pages_for(context_tokens)
        if self._device.type == "cpu":
            keep_step_memory()
        needs = AttentionNeeds(
            memory=memory,
            query_heads=shape.heads // self._group.ranks,
            layers=self.model.attention,
            dtype=self._dtype,
            max_rows=engine.max_running,
            pages_per_row=pages_per_row,
            prefill=None if self._chosen is None else self._chosen[1],
        )
        chosen = make_attention(needs, engine.attention, self._kernels, self._progress)
        self._chosen = self._chosen or (chosen.name, chosen.prefill)
        compiled = None if self.grammars is None else self.grammars.compiled
        return StepRunner(
            self.model,
            self._kernels,
            memory,
            chosen.attention,
            max_rows=engine.max_running,
            pages_per_row=pages_per_row,
            layer_groups=engine.layer_groups,
            vocab_size=shape.vocab_size,
            processors=make_processors(engine.max_running, shape.vocab_size, shape.eos_token_ids, self._device, compiled),
            adapters=self.adapters,
            features=self._features,
        )

    def _make_ready_steps(self, context_tokens: int) -> StepRunner:
        """The runner of steps over the pages, with its graphs or recordings."""
        with self._memory_errors("lower --kv-memory, --chunk-tokens, --max-running or --context-tokens"):
            steps = self._make_steps(self.memory, context_tokens)
            if self._maker is not None and self._graphs == "on":
                self._capture(steps, self._maker, self._graph_sizes)
            elif self._device.type == "cpu" and self._engine.graphs != "off":
                self._record(steps)
            self._warm_up(steps, context_tokens)  # last: a capture gives back what torch keeps for steps
            return steps

    def _warm_up(self, steps: StepRunner, context_tokens: int) -> None:
        if self._device.type == "cuda":
            warm_up(steps, self._layout.page_size, self._engine.chunk_tokens, self._engine.max_running, context_tokens)
            if self.grammars is not None:
                load_mask_kernel(steps.vocab_size, self._device)

    def _capture(self, steps: StepRunner, maker: GraphMaker, sizes: Sequence[int]) -> None:
        """With --graphs auto, steps run without graphs where they cannot be captured. Raises ConfigError if they were asked for,
        and ExecutorFailed if the device cannot go on after a capture that failed."""
        try:
            refused = steps.capture(maker, sizes, self._progress)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            _log.warning("a CUDA graph could not be captured", exc_info=True)
            steps.forget_graphs()
            check_device(self._device, error)
            refused = f"a capture failed with: {first_reason(error)}"
            if self._group.ranks > 1:  # the others go on capturing, and wait for this one in each step
                raise ConfigError(f"--graphs {self._engine.graphs}: {refused}; give --graphs off to all ranks") from error
        if refused is not None and self._engine.graphs == "on":
            raise ConfigError(f"--graphs on: {refused}; give --graphs off")
        if refused is not None:
            self._graphs = f"off, because {refused}"
            _log.warning("CUDA graphs are off, so decode steps are slower: %s", refused)

    def _record(self, steps: StepRunner) -> None:
        """On CPU, what graphs are on CUDA. Raises ConfigError as `_capture` does."""
        recorder = load_recorder()
        if self._group.ranks > 1:
            refused: str | None = "ranks wait for each other in a step"
        else:
            refused = "there is no C compiler" if recorder is None else steps.record(recorder, self._progress)
        if refused is not None and self._engine.graphs == "on":
            raise ConfigError(f"--graphs on: decode steps cannot be recorded ({refused}); give --graphs auto or off")
        if refused is not None:
            self._graphs = f"off, because {refused}"
            self._progress(f"decode steps are not recorded: {refused}")

    def _graph_maker(self) -> GraphMaker | None:
        return CudaGraphs() if self._device.type == "cuda" and self._engine.graphs != "off" else None
