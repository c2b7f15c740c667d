"""The model runner: one step on one device, over persistent batch tensors.

Owns the model, the KV memory and one entry per row: page table, length, last token and sampling parameters. A plan changes only
the rows that start or grow; everything else stays on the device. Knows no threads, requests or messages.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.config import Dtype, EngineConfig, ModelConfig
from common.engine.attention.choice import AttentionNeeds, make_attention
from common.engine.attention.port import Segment, StepTokens
from common.engine.checkpoint import fingerprint
from common.engine.executor import EngineDescription
from common.engine.kernels.choice import make_kernels
from common.engine.kv_budget import KVBudget, auto_kv_bytes, given_kv_bytes, kv_budget, workspace_bytes
from common.engine.kv_memory import KVMemory, torch_dtype
from common.engine.layer_progress import LayerProgress
from common.engine.models.port import ServedShape
from common.engine.models.registry import Loading, load_model, read_served_shape
from common.engine.plan import Plan, RowStart, StepResult
from common.engine.sampler import Sampler
from common.engine.step import PagedStep
from common.errors import ConfigError
from common.ids import Int32Array
from common.messages import ModelIdentity
from common.model_path import model_name, resolve_model_path
from common.pages.layout import KVDtype, KVLayout


class ModelRunner:
    """Loads a checkpoint and runs plans. Raises ConfigError for a checkpoint that it cannot serve."""

    def __init__(self, model: ModelConfig, engine: EngineConfig, progress: Callable[[str], None]) -> None:
        path = resolve_model_path(model.model)
        self._device = _device_of(engine.device)
        self._layer_groups = engine.layer_groups
        dtype_name = _dtype_of(engine.dtype, self._device)
        dtype = torch_dtype(dtype_name)
        shape = read_served_shape(path)
        layout = KVLayout(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            page_size=engine.page_size,
            dtype=dtype_name if engine.kv_dtype == "auto" else "float8_e4m3fn",
        )
        given = given_kv_bytes(engine.kv_memory, self._device)
        if given is not None:
            kv_budget(layout, given, shape.context_tokens, engine.context_tokens)  # refused before the weights are loaded
        self._kernels = make_kernels(self._device)
        loading = Loading(dtype, self._device, engine.context_tokens or shape.context_tokens)
        self._model = load_model(path, shape, loading, self._kernels, progress)
        budget = self._budget(shape, layout, engine, progress)
        progress(f"making {budget.total_pages} KV pages of {layout.page_bytes} bytes")
        self._memory = KVMemory(layout, budget.total_pages, self._device)
        pages_per_row = layout.pages_for(budget.context_tokens)
        self._attention = make_attention(
            AttentionNeeds(
                memory=self._memory,
                query_heads=shape.heads,
                layers=self._model.attention,
                dtype=dtype,
                max_rows=engine.max_running,
                pages_per_row=pages_per_row,
            ),
            engine.attention,
            self._kernels,
            progress,
        )
        self._make_rows(engine.max_running, pages_per_row)
        self._sampler = Sampler(shape.vocab_size, self._device)
        self.description = EngineDescription(
            model=ModelIdentity(
                name=model.served_name or model_name(model.model),
                fingerprint=fingerprint(Path(path)),
                architecture=shape.architecture,
                dtype=dtype_name,
                vocab_size=shape.vocab_size,
                context_tokens=budget.context_tokens,
            ),
            layout=layout,
            total_pages=budget.total_pages,
            max_rows=engine.max_running,
            memory=self._memory.region,
            eos_token_ids=shape.eos_token_ids,
            device=str(self._device),
        )

    @torch.inference_mode()
    def run(self, plan: Plan, layers_done: Callable[[int], None] | None = None) -> StepResult:
        """One forward: rows that start, rows that grow, then chunks and decode rows together.

        layers_done: called a few times during a last chunk, with the number of layers whose KV is in the pages; None: not wanted.
        """
        progress = LayerProgress(
            self._device,
            self._memory.layout.layers,
            self._layer_groups,
            layers_done if any(chunk.last for chunk in plan.chunks) else None,
        )
        for start in plan.starts:
            self._start(start)
        self._grow(plan.grown_rows, plan.grown_pages)
        rows = torch.as_tensor(plan.sampled_rows.astype(np.int64), device=self._device)
        token_ids, positions, at_rows, last = self._inputs(plan)
        page_size = self._memory.layout.page_size
        pages, slots = self._page_table[at_rows, positions // page_size].long(), positions % page_size
        step = self._step_tokens(plan, at_rows)
        self._attention.plan(step)

        attention = PagedStep(self._memory, self._attention, self._kernels, pages, slots, progress.written)
        hidden = self._model.hidden(token_ids, positions, attention)
        tokens = np.empty(0, dtype=np.int32)
        progress.wait()
        if len(rows):
            tokens = self._sample(rows, self._model.logits(hidden[last]))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a result means that the KV is in the pages, also when nothing was sampled
        return StepResult(plan, tokens)

    def digest_pages(self, pages: Int32Array) -> bytes:
        """As `Executor.digest_pages`; from any thread."""
        return self._memory.digest_pages(pages)

    # --- making ------------------------------------------------------------------------------------------------------------

    def _budget(self, shape: ServedShape, layout: KVLayout, engine: EngineConfig, progress: Callable[[str], None]) -> KVBudget:
        """Pages and context. Call it after the weights are loaded: only then is it known what memory is left."""
        kv_bytes = given_kv_bytes(engine.kv_memory, self._device)
        own, asked = shape.context_tokens, engine.context_tokens
        if kv_bytes is None:
            workspace = workspace_bytes(shape, layout, engine.chunk_tokens, engine.max_running, asked or own)
            kv_bytes = auto_kv_bytes(self._device, workspace, engine.sharers)
        budget = kv_budget(layout, kv_bytes, own, asked)
        if budget.context_tokens < (asked or own):
            progress(
                f"context capped to {budget.context_tokens} tokens, because the KV memory cannot hold the model's {own}: give "
                f"more --kv-memory, or --context-tokens (the same for all instances of a fleet)"
            )
        return budget

    # --- the rows ----------------------------------------------------------------------------------------------------------

    def _make_rows(self, rows: int, pages: int) -> None:
        device = self._device
        self._page_table = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self._leased = np.zeros(rows, dtype=np.int64)
        self._length = torch.zeros(rows, dtype=torch.int64, device=device)
        self._last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self._temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self._top_p = torch.ones(rows, dtype=torch.float32, device=device)
        self._min_p = torch.zeros(rows, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self._seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self._host_length = np.zeros(rows, dtype=np.int64)

    def _start(self, start: RowStart) -> None:
        row, sampling = start.row, start.sampling
        self._leased[row] = len(start.pages)
        self._page_table[row, : len(start.pages)] = torch.as_tensor(start.pages, device=self._device)
        self._length[row] = self._host_length[row] = start.length
        if start.last_token is not None:
            self._last_token[row] = start.last_token
        self._temperature[row], self._top_p[row], self._min_p[row] = sampling.temperature, sampling.top_p, sampling.min_p
        self._top_k[row], self._seed[row] = sampling.top_k, sampling.seed

    def _grow(self, rows: Int32Array, pages: Int32Array) -> None:
        """Give each row one more page; rows are distinct. One copy to the device and one operation there; waits for neither."""
        held = self._leased[rows]
        assert (held < self._page_table.shape[1]).all(), "a row would hold more pages than its context has"
        grown = torch.from_numpy(np.stack([rows, held.astype(np.int32), pages])).to(self._device, non_blocking=True)
        self._page_table.index_put_((grown[0], grown[1]), grown[2])
        self._leased[rows] += 1

    # --- one step ----------------------------------------------------------------------------------------------------------

    def _inputs(self, plan: Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns token ids, positions and rows of the step's tokens, chunks first, and which tokens sample. All [...] int64."""
        device = self._device
        decode = torch.as_tensor(plan.decode_rows.astype(np.int64), device=device)
        lengths = np.array([len(chunk.token_ids) for chunk in plan.chunks], dtype=np.int64)
        ends = np.cumsum(lengths)
        chunk_rows = np.array([chunk.row for chunk in plan.chunks], dtype=np.int64)
        starts = np.array([chunk.start for chunk in plan.chunks], dtype=np.int64)
        empty = np.empty(0, dtype=np.int64)
        ids = np.concatenate([empty, *(chunk.token_ids.astype(np.int64) for chunk in plan.chunks)])
        at = np.arange(len(ids)) - np.repeat(ends - lengths - starts, lengths)
        token_ids = torch.cat([torch.as_tensor(ids, device=device), self._last_token[decode]])
        positions = torch.cat([torch.as_tensor(at, device=device), self._length[decode]])
        rows = torch.cat([torch.as_tensor(np.repeat(chunk_rows, lengths), device=device), decode])
        last = ends[[chunk.last for chunk in plan.chunks]] - 1 if plan.chunks else empty
        sampling = np.concatenate([last, np.arange(len(ids), len(token_ids))])
        return token_ids, positions, rows, torch.as_tensor(sampling, device=device)

    def _step_tokens(self, plan: Plan, rows: Tensor) -> StepTokens:
        """What each token attends to. The rows grow by the step's tokens."""
        page_size = self._memory.layout.page_size
        segments, begin = [], 0
        for chunk in plan.chunks:
            end = begin + len(chunk.token_ids)
            segments.append(Segment(begin, end, chunk.start, chunk.start + end - begin, chunk.row))
            begin = end
        grown = plan.rows.astype(np.int64)
        chunk_lengths = np.array([segment.context for segment in segments], dtype=np.int64)
        lengths = np.concatenate([chunk_lengths, self._host_length[plan.decode_rows] + 1])
        assert (lengths <= self._leased[grown] * page_size).all(), "a row would write beyond its pages"
        self._host_length[grown] = lengths
        self._length[torch.as_tensor(grown, device=self._device)] = torch.as_tensor(lengths, device=self._device)
        decode = rows[begin:]
        return StepTokens(
            chunks=segments,
            table=self._page_table,
            decode_rows=decode,
            decode_lengths=self._length[decode],
            host_lengths=self._host_length[plan.decode_rows],
        )

    def _sample(self, rows: Tensor, logits: Tensor) -> Int32Array:
        """Sample a token for each row. Its noise depends on its position in the sequence, not on where the row began."""
        tokens = self._sampler(
            logits,
            self._temperature[rows],
            self._top_k[rows],
            self._top_p[rows],
            self._min_p[rows],
            self._seed[rows],
            self._length[rows],
        )
        self._last_token[rows] = tokens
        sampled: Int32Array = tokens.to(dtype=torch.int32, device="cpu").numpy()
        return sampled


def _device_of(name: str) -> torch.device:
    """Raises ConfigError when the device is not there."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is not a device: use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name!r} is not supported: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: this host has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _dtype_of(name: Dtype, device: torch.device) -> KVDtype:
    if name == "auto":
        return "bfloat16" if device.type == "cuda" else "float32"
    return name
