"""Prompts on their way through prefill: how far each is computed, and the next chunks under a token budget.

Owns the counters of a prompt. Knows plans. Does not know messages, pages, sockets or time. The prefill role uses it for every
request, the decode role for requests that it serves alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from common.executor import Chunk
from common.ids import Int32Array


@dataclass(slots=True, eq=False)
class PromptProgress:
    """One prompt in one row. What is launched runs ahead of what is computed:

    0 ──── computed ──── launched ──── len(prompt)
            in the pages   in flight      to do

    owner: whose it is, see `Terms`.
    """

    row: int
    prompt: Int32Array
    launched: int = 0
    computed: int = 0
    owner: str = ""

    @property
    def left(self) -> int:
        """Tokens that are not launched yet."""
        return len(self.prompt) - self.launched

    def complete(self, tokens: int) -> None:
        """A chunk of so many tokens came back."""
        self.computed += tokens
        assert 0 <= self.computed <= self.launched


def next_chunks(prompts: Iterable[PromptProgress], budget_tokens: int) -> tuple[Chunk, ...]:
    """Chunks for the next forward, at most `budget_tokens` in all. Owners get equal parts of it, as far as they have prompts, and
    the prompts of one are served in the order in which they came. Marks the chunks as launched."""
    coming = [progress for progress in prompts if progress.left]
    parts = _parts(coming, budget_tokens)
    chunks = []
    for progress in coming:
        tokens = min(parts[progress.owner], progress.left)
        if tokens == 0:
            continue
        parts[progress.owner] -= tokens
        start, end = progress.launched, progress.launched + tokens
        progress.launched = end
        chunks.append(Chunk(progress.row, start, progress.prompt[start:end], last=progress.left == 0))
    return tuple(chunks)


def _parts(prompts: Iterable[PromptProgress], budget_tokens: int) -> dict[str, int]:
    """How many tokens each owner gets: what is left of it by those who have less goes to the others (max-min fair)."""
    wanted: dict[str, int] = {}
    for progress in prompts:
        wanted[progress.owner] = wanted.get(progress.owner, 0) + progress.left
    parts: dict[str, int] = {}
    for owner in sorted(wanted, key=wanted.__getitem__):
        parts[owner] = min(wanted[owner], budget_tokens, max(1, budget_tokens // (len(wanted) - len(parts))))
        budget_tokens -= parts[owner]
    return parts
