"""Warm-up: the largest steps, run once before the instance is ready.

Compiles what is compiled at first use, and shows how much memory a step takes. Owns which steps those are; knows plans. What it
leaves in rows and pages does not count: a request starts its row anew, and writes a slot before it reads it.
"""

import numpy as np

from common.engine.plan import Chunk, Plan, RowStart
from common.engine.step_runner import StepRunner
from common.sampling_params import SamplingParams

_ANY = SamplingParams(max_new_tokens=1, temperature=1.0, top_p=0.9)
"""With a filter, which takes the most memory."""


WARM_UP_PAGES = 1


def warm_up(steps: StepRunner, page_size: int, chunk_tokens: int, max_rows: int, context_tokens: int) -> None:
    """A chunk that begins a prompt; the last chunk of the longest context beside as many decode rows as there can be, one of
    which is as long; and decode rows alone. All rows have their KV in page 0, again and again: WARM_UP_PAGES are enough."""
    tokens = min(chunk_tokens, context_tokens)
    prompt, longest = np.zeros(tokens, dtype=np.int32), np.zeros(-(-context_tokens // page_size), dtype=np.int32)
    decoding = [
        RowStart(row, longest if row == 1 else longest[:1], _ANY, length=context_tokens - 1 if row == 1 else 0, last_token=0)
        for row in range(1, max_rows)
    ]
    rows = np.arange(1, max_rows, dtype=np.int32)
    beginning, ending = (RowStart(0, longest, _ANY, length=length) for length in (0, context_tokens - tokens))
    steps.launch(Plan(0, starts=(beginning,), chunks=(Chunk(0, 0, prompt, last=True),))).wait()
    last = Chunk(0, context_tokens - tokens, prompt, last=True)
    steps.launch(Plan(0, starts=(ending, *decoding), chunks=(last,), decode_rows=rows)).wait()
    alone = RowStart(0, longest[:1], _ANY, length=0, last_token=0)
    steps.launch(Plan(0, starts=(alone, *decoding), decode_rows=np.arange(max_rows, dtype=np.int32))).wait()
