"""Workloads that are made up: random prompts, prompts that share prefixes, and conversations.

Owns lengths and contents. Pure: the same seed makes the same prompts.
"""

import math
from collections.abc import Iterator

import numpy as np

from bench.serve.plan import Workload
from bench.serve.workloads.sessions import Session, Turn
from bench.serve.workloads.vocabulary import Ids, Vocabulary
from common.errors import ConfigError


def random_sessions(plan: Workload, words: Vocabulary, count: int) -> Iterator[Session]:
    """Each prompt: the prefix that all have, and tokens of its own."""
    random = np.random.default_rng(plan.seed)
    prefix = words.draw(random, plan.random_prefix_len)
    for _ in range(count):
        yield Session((_turn(plan, words, random, prefix),))


def conversations(plan: Workload, words: Vocabulary, count: int) -> Iterator[Session]:
    """The first turn has the prefix that all have; every turn has tokens of its own."""
    random = np.random.default_rng(plan.seed)
    prefix = words.draw(random, plan.random_prefix_len)
    for _ in range(count):
        first = _turn(plan, words, random, prefix)
        later = [_turn(plan, words, random, prefix[:0]) for _ in range(plan.conversation_turns - 1)]
        yield Session((first, *later))


def prefix_sessions(plan: Workload, words: Vocabulary, count: int) -> Iterator[Session]:
    """Groups of prompts with a common prefix, in random order. Every group has as many prompts as the others, or one more."""
    random = np.random.default_rng(plan.seed)
    groups = plan.prefix_repetition_num_prefixes
    prefixes = [words.draw(random, plan.prefix_repetition_prefix_len) for _ in range(groups)]
    for group in random.permutation(np.arange(count) % groups):
        ids = np.concatenate([prefixes[group], words.draw(random, plan.prefix_repetition_suffix_len)])
        yield Session((_write(words, ids, plan.prefix_repetition_output_len),))


def _turn(plan: Workload, words: Vocabulary, random: np.random.Generator, prefix: Ids) -> Turn:
    own = max(0, plan.random_input_len - words.added_tokens)
    tokens = _length(random, own, plan.random_range_ratio, 0)
    if not tokens and not len(prefix):
        raise ConfigError(f"--random-input-len {plan.random_input_len} leaves nothing for a prompt: make it larger")
    output = _length(random, plan.random_output_len, plan.random_range_ratio, 1)
    return _write(words, np.concatenate([prefix, words.draw(random, tokens)]), output)


def _write(words: Vocabulary, ids: Ids, output_tokens: int) -> Turn:
    return Turn(words.write(ids), output_tokens, len(ids) + words.added_tokens)


def _length(random: np.random.Generator, mean: int, ratio: float, least: int) -> int:
    return max(least, int(random.integers(math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio)) + 1)))
