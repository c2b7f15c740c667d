"""Prompts on their way through prefill: taken in, who is computed how far, and the next chunks under a token budget.

Owns the counters of a prompt. Knows plans. Does not know messages, pages, sockets or time. Both roles use it:
the prefill role for all it does, the decode role for requests that it serves alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from common.engine.plan import Chunk
from common.errors import BadRequest
from common.ids import Int32Array, unpack_ids


def read_prompt(packed: bytes, vocab_size: int) -> Int32Array:
    """The token ids of a message, [tokens] int32. Raises BadRequest unless there are some and each is in the vocabulary."""
    try:
        prompt = unpack_ids(packed)
    except ValueError as error:
        raise BadRequest(f"prompt is not a list of token ids: {error}", field="prompt") from error
    if len(prompt) == 0 or prompt.min() < 0 or prompt.max() >= vocab_size:
        raise BadRequest(f"prompt must hold token ids between 0 and {vocab_size - 1}", field="prompt")
    return prompt


@dataclass(slots=True, eq=False)
class PromptProgress:
    """One prompt in one row. Computed at launch runs ahead of computed in fact:

    0 ──── computed ──── launched ──── len(prompt)
            in the pages   in flight      to do
    """

    row: int
    prompt: Int32Array
    launched: int = 0
    computed: int = 0

    def launch(self, tokens: int) -> None:
        self.launched += tokens
        self._check()

    def complete(self, tokens: int) -> None:
        self.computed += tokens
        self._check()

    @property
    def all_launched(self) -> bool:
        return self.launched == len(self.prompt)

    @property
    def remaining_tokens(self) -> int:
        return len(self.prompt) - self.computed

    def _check(self) -> None:
        assert 0 <= self.computed <= self.launched <= len(self.prompt)


def next_chunks(prompts: Iterable[PromptProgress], budget_tokens: int) -> tuple[Chunk, ...]:
    """Chunks for the next forward, first come first served, at most `budget_tokens` in all; marks them launched."""
    chunks = []
    for progress in prompts:
        if budget_tokens == 0:
            break
        tokens = min(budget_tokens, len(progress.prompt) - progress.launched)
        if tokens == 0:
            continue
        start = progress.launched
        progress.launch(tokens)
        budget_tokens -= tokens
        chunks.append(Chunk(progress.row, start, progress.prompt[start : start + tokens], last=progress.all_launched))
    return tuple(chunks)
