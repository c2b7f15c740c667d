"""What `launch bench streams` measures: its flags, and the layouts that it compares.

Owns names, defaults and limits. Imports nothing heavy, starts nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from common.config import DEMO_MODEL
from common.options import option, parse_numbers, require, require_above_0, require_at_least

PAIR = "1 prefill + 1 decode"


@dataclass(frozen=True, kw_only=True)
class StreamsBench:
    """What runs, and for how long."""

    model: str = option(
        DEMO_MODEL, "the checkpoint that is served; `launch bench cpu-peers` makes one in the shape of Qwen3-0.6B"
    )
    chunks: str = option("32,128,512", "colocated serving is measured with each of these --chunk-tokens")
    prefill_chunk: int = option(512, "--chunk-tokens of the prefill instance beside a decode instance")
    threads: int = option(
        0, "CPU threads of a colocated instance, and of the two others together, half each; 0: as launch local divides the cores"
    )
    streams: int = option(8, "answers that are written all the time")
    stream_tokens: int = option(128, "tokens of their prompts")
    prompts: int = option(1, "prompts that are open at a time: when one has its first tokens, the next one arrives")
    prompt_tokens: int = option(512, "tokens of each, all different")
    seconds: float = option(20.0, "how long each layout is measured in each round, once all streams run")
    rounds: int = option(3, "how often each layout has its turn: A B C, A B C and so on")
    json: str = option("", "write the figures of every run to this file")

    def __post_init__(self) -> None:
        require(self.threads != 1 and self.threads >= 0, "threads", "at least 2, or 0", self.threads)
        require_at_least(self, prefill_chunk=1, streams=1, stream_tokens=1, prompts=1, prompt_tokens=1, rounds=1)
        require_above_0(self, "seconds")
        require(min(self.chunk_sizes) >= 1, "chunks", "at least 1 each", self.chunks)

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return tuple(sorted(set(parse_numbers(self.chunks, "chunks", int))))

    def layouts(self) -> dict[str, tuple[str, ...]]:
        """Flags of `launch local` by the layout's name, the pair first."""
        common = (f"--model={self.model}", "--log-level=warning", "--prefix-cache=off")
        half, whole = ((f"--threads={self.threads // 2}",), (f"--threads={self.threads}",)) if self.threads else ((), ())
        found = {PAIR: (*common, "--prefill=1", f"--chunk-tokens={self.prefill_chunk}", *half)}
        for chunk in self.chunk_sizes:
            found[f"colocated, chunks of {chunk}"] = (*common, "--prefill=0", f"--chunk-tokens={chunk}", *whole)
        return found

    def turns(self) -> Iterator[tuple[int, str]]:
        """Round and layout: what changes slowly about the machine meets every layout."""
        yield from product(range(1, self.rounds + 1), self.layouts())


QUICK: dict[str, Any] = {"streams": 2, "stream_tokens": 16, "prompt_tokens": 64, "chunks": "32", "seconds": 1.0, "rounds": 1}
"""What `--quick` measures."""
