"""The sequences of `launch bench offline`: those that nano-vllm and mini-sglang publish figures of.

Owns the draw of lengths and token ids. Knows no model beyond the size of its vocabulary, and no engine.

Source: https://github.com/GeeeekExplorer/nano-vllm, `bench.py`. With seed 0 and the lengths of the defaults the answers have
133,966 tokens together, which is what its README reports.
"""

import random
from dataclasses import dataclass

import numpy as np

from bench.offline.plan import OfflineBench
from common.ids import Int32Array

LARGEST_ID = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A sequence. prompt: [tokens] int32. answer_tokens: how long the answer is; nothing ends it before."""

    prompt: Int32Array
    answer_tokens: int


def sequences(bench: OfflineBench, vocab_size: int) -> list[Asked]:
    """Lengths do not depend on vocab_size: a smaller vocabulary folds the same ids."""
    draw = random.Random(bench.seed)
    prompts = [[draw.randint(0, LARGEST_ID) for _ in range(draw.randint(*bench.prompt_range))] for _ in range(bench.num_prompts)]
    answers = [draw.randint(*bench.answer_range) for _ in range(bench.num_prompts)]
    return [Asked(np.array(ids, dtype=np.int32) % vocab_size, tokens) for ids, tokens in zip(prompts, answers, strict=True)]
