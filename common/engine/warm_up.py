"""Warm-up: the largest steps, run once before the instance is ready.

Compiles what is compiled at first use, and shows how much memory a step takes. Owns which steps those are; knows plans. What it
leaves in rows and pages does not count: a request starts its row anew, and writes a slot before it reads it.
"""

from dataclasses import replace

import numpy as np

from common.engine.plan import Chunk, Plan, RowStart
from common.engine.step_runner import StepRunner
from common.sampling_params import MAX_BAD_WORD, MAX_BAD_WORDS, MAX_BIASED_TOKENS, MAX_LOGPROBS, SamplingParams

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
    steps.launch(Plan(0, starts=(beginning,), chunks=(Chunk(0, 0, prompt, last=True),))).wait()
    last = Chunk(0, context_tokens - tokens, prompt, last=True)
    steps.launch(Plan(0, starts=(ending, *decoding), chunks=(last,), decode_rows=rows)).wait()
    steps.launch(Plan(0, starts=(one, *decoding), decode_rows=np.arange(max_rows, dtype=np.int32))).wait()
