"""What `launch bench offline` measures: its flags and their limits.

Owns names, defaults and limits. Imports nothing heavy, runs nothing.
"""

from dataclasses import dataclass
from typing import Any

from common.options import option, parse_numbers, require, require_at_least


@dataclass(frozen=True, kw_only=True)
class OfflineBench:
    """The sequences, and how often they run."""

    num_prompts: int = option(256, "sequences that are there at once, at the start")
    prompt_tokens: str = option("100,1024", "fewest and most tokens of a prompt")
    answer_tokens: str = option("100,1024", "fewest and most tokens of an answer")
    temperature: float = option(0.6, "of all sequences; 0: greedy")
    seed: int = option(0, "of lengths and token ids: equal seeds give equal sequences")
    repeat: int = option(1, "how often all sequences run, one time after the other")
    json: str = option("", "write the figures to this file")

    def __post_init__(self) -> None:
        require_at_least(self, num_prompts=1, repeat=1, temperature=0)
        self.prompt_range, self.answer_range  # noqa: B018  # refused here, and not in the middle of a run

    @property
    def prompt_range(self) -> tuple[int, int]:
        return _range(self.prompt_tokens, "prompt-tokens")

    @property
    def answer_range(self) -> tuple[int, int]:
        return _range(self.answer_tokens, "answer-tokens")


QUICK: dict[str, Any] = {"num_prompts": 8, "prompt_tokens": "5,40", "answer_tokens": "5,20"}
QUICK_ENGINE: dict[str, Any] = {"max_running": 4, "chunk_tokens": 32, "kv_memory": "4MiB"}
"""What `--quick` measures."""


def _range(text: str, flag: str) -> tuple[int, int]:
    numbers = parse_numbers(text, flag, int)
    require(len(numbers) == 2, flag, "two numbers with a comma between them", text)
    fewest, most = numbers
    require(1 <= fewest <= most, flag, "at least 1, and the first number not above the second", text)
    return fewest, most
