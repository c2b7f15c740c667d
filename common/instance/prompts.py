"""Prompts on their way through prefill: how far each is computed, and the next chunks under a token budget.

Owns the counters of a prompt. Knows plans. Does not know messages, pages, sockets or time. The prefill role uses it for every
request, the decode role for requests that it serves alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from common.engine.plan import Chunk
from common.ids import Int32Array


@dataclass(slots=True, eq=False)
class PromptProgress:
    """One prompt in one row. What is launched runs ahead of what is computed:

    0 ──── computed ──── launched ──── len(prompt)
            in the pages   in flight      to do
    """

    row: int
    prompt: Int32Array
    launched: int = 0
    computed: int = 0

    def complete(self, tokens: int) -> None:
        """A chunk of so many tokens came back."""
        self.computed += tokens
        assert 0 <= self.computed <= self.launched


def next_chunks(prompts: Iterable[PromptProgress], budget_tokens: int) -> tuple[Chunk, ...]:
    """Chunks for the next forward, first come first served, at most `budget_tokens` in all. Marks them as launched."""
    chunks = []
    for progress in prompts:
        if budget_tokens == 0:
            break
        start, total = progress.launched, len(progress.prompt)
        end = min(start + budget_tokens, total)
        if start == end:
            continue
        progress.launched = end
        budget_tokens -= end - start
        chunks.append(Chunk(progress.row, start, progress.prompt[start:end], last=end == total))
    return tuple(chunks)
