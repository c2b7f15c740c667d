"""The load of a simulated fleet: which requests come when, drawn at random or read from a trace.

Owns arrival times, lengths and made-up prompts. Knows no fleet. Prompts consist of blocks; blocks with the same id have the same
tokens, so requests that share a prefix in the trace share it here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from common.ids import pack_ids
from simulation.plan import LoadPlan

BLOCK_TOKENS = 512
"""Tokens that one of a trace's hash_ids stands for."""
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when it comes, and its lengths in tokens. blocks: ids of its prompt's blocks; the last may be cut short."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]

    def prompt(self, vocab_size: int) -> bytes:
        """Packed token ids, [input_tokens]."""
        return pack_ids(prompt_tokens(self.blocks, self.input_tokens, vocab_size))


class _Line(msgspec.Struct):
    """A line of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def workload(plan: LoadPlan) -> Iterator[Asked]:
    """The requests in the order of their times, which begin near 0. Raises ConfigError for a trace that cannot be read."""
    asked = read_trace(plan.trace, plan.speed) if plan.trace else islice(random_load(plan), plan.requests)
    return takewhile(lambda each: each.at_s < plan.duration_s, asked) if plan.duration_s else asked


def random_load(plan: LoadPlan) -> Iterator[Asked]:
    """Requests without end; every prompt is of its own."""
    random = np.random.default_rng(plan.seed)
    at_s, block = 0.0, 0
    while True:
        at_s += float(random.exponential(1 / plan.rate)) if plan.arrivals == "poisson" else 1 / plan.rate
        lengths = (plan.mean_input, plan.mean_output)
        if plan.lengths == "exponential":
            lengths = (max(1, round(random.exponential(lengths[0]))), max(1, round(random.exponential(lengths[1]))))
        blocks = -(-lengths[0] // BLOCK_TOKENS)
        yield Asked(at_s, *lengths, tuple(range(block, block + blocks)))
        block += blocks


def read_trace(path: str, speed: float) -> Iterator[Asked]:
    """The requests of a trace in Mooncake's format. Raises ConfigError, which names the line."""
    decoder, latest_s = msgspec.json.Decoder(_Line), 0.0
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace: {path} cannot be read: {error.strerror}") from error
    asked: list[Asked] = []
    for number, line in enumerate(lines, start=1):
        try:
            read = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--trace: line {number} of {path} is no request: {error}") from error
        at_s = read.timestamp / 1000 / speed
        if at_s < latest_s or read.input_length < 1 or read.output_length < 1:
            raise ConfigError(f"--trace: line {number} of {path}: times must not fall, and lengths must be at least 1")
        if len(read.hash_ids) * BLOCK_TOKENS < read.input_length:
            raise ConfigError(f"--trace: line {number} of {path}: too few hash_ids for {read.input_length} tokens")
        latest_s = at_s
        asked.append(Asked(at_s, read.input_length, read.output_length, read.hash_ids))
    return iter(asked)


def prompt_tokens(blocks: tuple[int, ...], tokens: int, vocab_size: int) -> NDArray[np.int32]:
    """The first `tokens` tokens of these blocks, [tokens] int32: a hash (splitmix64) of the block's id and the place in it."""
    first: NDArray[np.uint64] = np.array(blocks, dtype=np.uint64) * np.uint64(BLOCK_TOKENS)
    ids: NDArray[np.uint64] = np.add.outer(first, np.arange(BLOCK_TOKENS, dtype=np.uint64)).reshape(-1)[:tokens]
    mixed: NDArray[np.uint64] = (ids + np.uint64(1)) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[1]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[2]
    mixed = (mixed ^ (mixed >> np.uint64(31))) % np.uint64(vocab_size)
    return mixed.astype(np.int32)
