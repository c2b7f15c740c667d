"""Replay of a trace in Mooncake's format: when requests came, how long they were, and which blocks of tokens they had in common.

Owns the scaling of times and lengths, and the contents of blocks. Blocks with the same id have the same tokens, so requests that
share a prefix in the trace share it here. (Mooncake: https://github.com/kvcache-ai/Mooncake, FAST'25 traces.)
"""

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from bench.serve.plan import Workload
from bench.serve.workloads.files import read_lines, refused
from bench.serve.workloads.sessions import Session, Turn
from bench.serve.workloads.vocabulary import Ids, Vocabulary
from common.errors import ConfigError


class Line(msgspec.Struct):
    """timestamp: milliseconds. hash_ids: of the prompt's blocks; the last one may be cut short."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def trace_lines(plan: Workload) -> list[Line]:
    """The part of the trace that is asked for, in the order of its times. Raises ConfigError."""
    kept: list[Line] = []
    for number, line in read_lines(plan.dataset_path, Line):
        if line.input_length < 1 or line.output_length < 1 or line.timestamp < 0 or any(block < 0 for block in line.hash_ids):
            raise refused(plan.dataset_path, number, "lengths must be at least 1, times and ids at least 0")
        if len(line.hash_ids) * plan.trace_block_tokens < line.input_length:
            raise refused(plan.dataset_path, number, f"it has too few hash_ids for {line.input_length} tokens")
        kept.append(line)
    kept.sort(key=lambda line: line.timestamp)
    first_ms = kept[0].timestamp
    if plan.trace_duration_s:
        kept = [line for line in kept if line.timestamp - first_ms < 1000 * plan.trace_duration_s]
    if plan.num_prompts > len(kept):
        raise ConfigError(f"--num-prompts {plan.num_prompts}: this part of the trace has only {len(kept)} requests")
    return kept[: plan.num_prompts or None]


def trace_sessions(plan: Workload, words: Vocabulary, lines: Sequence[Line]) -> Iterator[Session]:
    """The first request is due at 0."""
    for line in lines:
        yield trace_session(plan, words, line, (line.timestamp - lines[0].timestamp) / 1000 / plan.trace_speed)


def trace_session(plan: Workload, words: Vocabulary, line: Line, due_s: float | None) -> Session:
    """One request. Its prompt has the scaled length, less what the server adds by itself."""
    tokens = max(1, round(line.input_length * plan.trace_length_scale))
    ids = prompt_of(words, line.hash_ids, max(1, tokens - words.added_tokens), plan.trace_block_tokens * plan.trace_length_scale)
    output = max(1, round(line.output_length * plan.trace_length_scale))
    return Session((Turn(words.write(ids), output, len(ids) + words.added_tokens),), due_s)


def prompt_of(words: Vocabulary, blocks: list[int], tokens: int, block_tokens: float) -> Ids:
    """The first `tokens` tokens of these blocks, [tokens] int32. block_tokens: where it is not whole, block k ends at k + 1
    times it, rounded up, so that a prompt always has blocks enough."""
    ends = np.ceil(block_tokens * np.arange(len(blocks) + 1)).astype(np.int64)
    parts: list[Ids] = []
    for block, begin, end in zip(blocks, ends[:-1], ends[1:], strict=True):
        if begin >= tokens:
            break
        parts.append(words.draw(np.random.default_rng(block), math.ceil(block_tokens))[: end - begin])
    return np.concatenate(parts)[:tokens]
