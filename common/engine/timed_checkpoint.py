"""A timed executor in the place of a checkpoint's model: `--executor timed`.

Owns the pool, which is real memory of the layout that the model would have, so pushes move as many bytes. Reads the checkpoint's
config and tokenizer, but no weights. Imports no torch: an instance starts in a fraction of a second.
"""

import queue
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from common.config import EngineConfig, ModelConfig, parse_step_cost
from common.engine.checkpoint import fingerprint
from common.engine.executor import EngineDescription
from common.engine.kv_budget import Agree, as_offered, given_kv_bytes, kv_budget
from common.engine.kv_dtype import kv_dtype_of
from common.engine.kv_host import auto_host_kv_bytes
from common.engine.models.end_of_sequence import TOKENIZER
from common.engine.models.served_shape import read_served_shape
from common.engine.plan import Plan
from common.engine.timed import Pace, StepCost, TimedExecutor, TimedStep
from common.errors import ConfigError, MemoryShort
from common.host_limits import host_memory_now
from common.messages import ModelIdentity
from common.model_path import model_name, read_json, resolve_model_path
from common.pages.heads import heads_of
from common.pages.host_memory import host_memory
from common.pages.layout import SPARE_PAGES, KVDtype, KVLayout, MemoryRegion

COMPUTES_NOTHING = "the timed executor, which computes nothing"
"""Part of the fingerprint, so that such an instance never joins a fleet that computes."""
_WORD = re.compile(r"[\u0120\u2581][a-z]+")
"""A word with a space before it, as byte-level BPE (\u0120) and SentencePiece (\u2581) spell that."""
_STOP_S = 5.0


class TimedCheckpoint(TimedExecutor):
    """wake: called when a step ends, on a thread of its own: a loop that only waits for its deadline is woken up to 1 ms late.
    rank, ranks, agree: of an instance with several ranks; the pages hold this rank's heads."""

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        wake: Callable[[], None],
        progress: Callable[[str], None],
        rank: int = 0,
        ranks: int = 1,
        agree: Agree = as_offered,
    ) -> None:
        """Raises ConfigError for a checkpoint that cannot be described, and MemoryShort."""
        path = resolve_model_path(model.model, weights=False)
        shape = read_served_shape(path)
        layout = KVLayout(
            layers=shape.layers,
            kv_heads=len(heads_of(rank, ranks, shape.kv_heads)),
            head_dim=shape.head_dim,
            page_size=engine.page_size,
            dtype=kv_dtype_of(engine, _dtype(engine)),
        )
        given = given_kv_bytes(engine.kv_memory, "cpu", host_memory_now().total_bytes)
        context = engine.context_tokens or shape.context_tokens
        kv_bytes = auto_host_kv_bytes(engine, ranks, layout, context, progress) if given is None else given
        limits = shape.context_tokens, engine.context_tokens, given is None
        pages = agree(kv_budget(layout, kv_bytes, *limits).total_pages)
        budget = kv_budget(layout, pages * layout.page_bytes, *limits)
        pool_bytes = (budget.total_pages + SPARE_PAGES) * layout.page_bytes
        try:
            memory = host_memory(pool_bytes)
        except MemoryError as error:
            raise MemoryShort(f"--kv-memory: cannot allocate {pool_bytes} bytes for KV pages: {error}") from error
        identity = ModelIdentity(
            name=model.served_name or model_name(model.model),
            fingerprint=fingerprint(path, weights=False, ways=[COMPUTES_NOTHING]),
            architecture=shape.architecture,
            dtype=_dtype(engine),
            vocab_size=shape.vocab_size,
            context_tokens=budget.context_tokens,
            kv_heads=shape.kv_heads,
        )
        description = EngineDescription(
            model=identity,
            layout=layout,
            total_pages=budget.total_pages,
            max_rows=engine.max_running,
            memory=MemoryRegion(address=memory.ctypes.data, region_bytes=pool_bytes, device="cpu"),
            eos_token_ids=shape.eos_token_ids,
            device="cpu",
        )
        pace = Pace(StepCost(*parse_step_cost(engine.step_cost)), time.monotonic)
        words = plain_words(path, shape.vocab_size, shape.eos_token_ids)
        super().__init__(description, pace, words, memory.reshape(-1, layout.page_bytes))
        self._wake = wake
        self._ends: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wake_at_ends, name="step ends", daemon=True)
        self._thread.start()

    def launch(self, plan: Plan) -> TimedStep:
        step = super().launch(plan)
        self._ends.put(step.ends_s)
        return step

    def close(self) -> None:
        self._ends.put(None)
        self._thread.join(_STOP_S)

    def _wake_at_ends(self) -> None:
        while (ends_s := self._ends.get()) is not None:
            time.sleep(max(0.0, ends_s - time.monotonic()))
            self._wake()


def plain_words(path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> list[int]:
    """Ids of a tokenizer's lower-case words, in order: each is whole text, and none is special. Raises ConfigError."""
    try:
        vocab = read_json(path / TOKENIZER)["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: [[piece, score], ...], the id is the place
            vocab = {piece: token for token, (piece, _) in enumerate(vocab)}
        words = sorted(token for piece, token in vocab.items() if _WORD.fullmatch(piece))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path / TOKENIZER} is not in the tokenizers library's format: {error!r}") from error
    words = [token for token in words if token < vocab_size and token not in eos_token_ids]
    if not words:
        raise ConfigError(f"--executor timed: {path / TOKENIZER} has no words to make answers of")
    return words


def _dtype(engine: EngineConfig) -> KVDtype:
    return "float32" if engine.dtype == "auto" else engine.dtype
