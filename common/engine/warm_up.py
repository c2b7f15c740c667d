"""Warm-up: the largest steps, run once before the instance is ready.

Compiles what is compiled at first use, and shows how much memory a step takes. Owns which steps those are; knows plans. What it
leaves in rows and pages does not count: a request starts its row anew, and writes a slot before it reads it.
"""

import numpy as np

from common.engine.kv_memory import KVMemory
from common.engine.plan import Chunk, Plan, RowStart
from common.engine.step_runner import StepRunner
from common.pages.layout import KVLayout
from common.sampling_params import SamplingParams

_ANY = SamplingParams(max_new_tokens=1, temperature=1.0, top_p=0.9)
"""With a filter, which takes the most memory."""


def pages_to_warm_up(layout: KVLayout, chunk_tokens: int) -> int:
    """Pages that hold two chunks, and the page of the decode rows."""
    return layout.pages_for(2 * chunk_tokens) + 1


def warm_up(steps: StepRunner, memory: KVMemory, chunk_tokens: int, max_rows: int, context_tokens: int) -> None:
    """A chunk that begins a prompt, a chunk that goes on beside as many decode rows as there can be, and these rows alone, all
    with the decode rows on one page. Shorter chunks where the pool or the context is smaller."""
    held = min((memory.total_pages - 1) * memory.layout.page_size, context_tokens)
    tokens = min(chunk_tokens, held // 2)
    page = np.array([memory.total_pages - 1], dtype=np.int32)
    decoding = tuple(RowStart(row, page, _ANY, length=0, last_token=0) for row in range(1, max_rows))
    rows = np.arange(1, max_rows, dtype=np.int32)
    if tokens:
        prompt = np.zeros(tokens, dtype=np.int32)
        start = RowStart(0, np.arange(memory.layout.pages_for(2 * tokens), dtype=np.int32), _ANY)
        steps.launch(Plan(0, starts=(start,), chunks=(Chunk(0, 0, prompt, last=True),))).wait()
        steps.launch(Plan(0, starts=decoding, chunks=(Chunk(0, tokens, prompt, last=True),), decode_rows=rows)).wait()
    first = RowStart(0, page, _ANY, length=0, last_token=0)
    steps.launch(Plan(0, starts=(first, *decoding), decode_rows=np.arange(max_rows, dtype=np.int32))).wait()
