"""The load of a simulated fleet: which conversations come when, drawn at random or read from a trace.

Owns arrival times, lengths and made-up prompts. Knows no fleet. Prompts consist of blocks; blocks with the same id have the same
tokens, so requests that share a prefix in the trace share it here. A request of a trace is a conversation of one turn.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice, takewhile
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError, needs_file
from common.ids import pack_ids
from router.timelines import BLOCK_TOKENS, LoadLine
from simulation.plan import LoadPlan

_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """What one turn adds to its conversation."""

    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """The ids of the blocks of its part of the prompt; the last may be cut short."""
    pause_s: float = 0.0
    """Seconds from the end of the answer before it."""

    def prompt(self, vocab_size: int) -> bytes:
        """Its own part of the prompt: packed token ids, [input_tokens]."""
        return pack_ids(prompt_tokens(self.blocks, self.input_tokens, vocab_size))


@dataclass(frozen=True, slots=True)
class SimulatedConversation:
    """A conversation of one turn or more."""

    at_s: float
    """When its first turn comes."""
    turns: tuple[ConversationTurn, ...]
    session: str = ""
    """The name of its session; "": it has none."""


def workload(plan: LoadPlan) -> Iterator[SimulatedConversation]:
    """In the order of their beginnings, from near 0. Raises ConfigError for a trace that cannot be read."""
    coming = read_trace(plan.trace, plan.speed, plan.begin_s) if plan.trace else islice(random_load(plan), plan.requests)
    return takewhile(lambda each: each.at_s < plan.duration_s, coming) if plan.duration_s else coming


def system_prompt(plan: LoadPlan, vocab_size: int) -> bytes:
    """What every conversation begins with: packed token ids, [system_tokens]."""
    blocks = tuple(range(-(-plan.system_tokens // BLOCK_TOKENS)))
    return pack_ids(prompt_tokens(blocks, plan.system_tokens, vocab_size))


def random_load(plan: LoadPlan) -> Iterator[SimulatedConversation]:
    """Conversations without end; what each turn adds is nobody else's."""
    random = np.random.default_rng(plan.seed)
    varies = plan.lengths == "exponential"
    at_s, block = 0.0, -(-plan.system_tokens // BLOCK_TOKENS)

    def length(mean: int) -> int:
        return max(1, round(random.exponential(mean))) if varies else mean

    for number in count():
        at_s += float(random.exponential(1 / plan.rate)) if plan.arrivals == "poisson" else 1 / plan.rate
        turns: list[ConversationTurn] = []
        for _ in range(plan.turns):
            is_long = plan.long_share > 0 and random.random() < plan.long_share
            input_tokens, output_tokens = length(plan.long_input if is_long else plan.mean_input), length(plan.mean_output)
            pause_s = 0.0
            if turns:
                pause_s = float(random.exponential(plan.think_s)) if varies else plan.think_s
            blocks = -(-input_tokens // BLOCK_TOKENS)
            turns.append(ConversationTurn(input_tokens, output_tokens, tuple(range(block, block + blocks)), pause_s))
            block += blocks
        yield SimulatedConversation(at_s, tuple(turns), f"conversation-{number}" if plan.turns > 1 else "")


def read_trace(path: str, speed: float = 1.0, begin_s: float = 0.0) -> Iterator[SimulatedConversation]:
    """The requests of a trace in Mooncake's format, from `begin_s` of its own time on. Raises ConfigError, which names the line.

    A trace names no sessions. Requests with the same first two blocks count as one: in Mooncake's conversations all share the
    first block, and the second is the first of a conversation's own. A request of one block has none.
    """
    decoder, latest_s = msgspec.json.Decoder(LoadLine), 0.0
    with needs_file(f"--trace: {path} cannot be read"):
        lines = Path(path).read_bytes().splitlines()
    coming: list[SimulatedConversation] = []
    for number, line in enumerate(lines, start=1):
        try:
            read = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--trace: line {number} of {path} is no request: {error}") from error
        at_s = (read.timestamp / 1000 - begin_s) / speed
        if 0 <= at_s < latest_s or read.input_length < 1 or read.output_length < 1:
            raise ConfigError(f"--trace: line {number} of {path}: times must not fall, and lengths must be at least 1")
        if len(read.hash_ids) * BLOCK_TOKENS < read.input_length:
            raise ConfigError(f"--trace: line {number} of {path}: too few hash_ids for {read.input_length} tokens")
        if at_s < 0:
            continue
        latest_s = at_s
        turn = ConversationTurn(read.input_length, read.output_length, read.hash_ids)
        session = "-".join(map(str, read.hash_ids[:2])) if len(read.hash_ids) > 1 else ""
        coming.append(SimulatedConversation(at_s, (turn,), session))
    return iter(coming)


def prompt_tokens(blocks: tuple[int, ...], tokens: int, vocab_size: int) -> NDArray[np.int32]:
    """The first `tokens` tokens of these blocks, [tokens] int32: a hash (splitmix64) of the block's id and the place in it."""
    first: NDArray[np.uint64] = np.array(blocks, dtype=np.uint64) * np.uint64(BLOCK_TOKENS)
    ids: NDArray[np.uint64] = np.add.outer(first, np.arange(BLOCK_TOKENS, dtype=np.uint64)).reshape(-1)[:tokens]
    mixed: NDArray[np.uint64] = (ids + np.uint64(1)) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[1]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[2]
    mixed = (mixed ^ (mixed >> np.uint64(31))) % np.uint64(vocab_size)
    return mixed.astype(np.int32)
