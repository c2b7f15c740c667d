"""What a request asks of the fleet: the sizes, prefixes and wishes by which its instances are chosen.

Owns the sizes that follow from each other. Does not know who is asked, tokens or time.
"""

from collections.abc import Set
from dataclasses import dataclass, field, replace

from common.ids import Life
from common.sampling_params import ANSWER_TOKENS
from router.cache_index import NO_OVERLAP, Overlap


@dataclass(slots=True, eq=False)
class Ask:
    """One attempt of a request that is to be placed.

    prompt_tokens: of the prompt and what the answer has so far. max_new_tokens: how many tokens may still follow. overlap: who
    has how much of the prompt in its cache. session: requests of one session follow each other, and share what came before;
    "": it has none. avoid: where it failed before, or had to give up memory. owner: see `Terms`.
    """

    prompt_tokens: int
    max_new_tokens: int
    overlap: Overlap = NO_OVERLAP
    session: str = ""
    avoid: Set[Life] = frozenset()
    owner: str = ""

    growth_tokens: int = field(init=False)
    """How many tokens its answer is expected to have."""
    held_tokens: int = field(init=False)
    """How many tokens of memory it is expected to need where it decodes."""
    most_tokens: int = field(init=False)
    """How many tokens it holds at most: the KV of its last token is never needed."""

    def __post_init__(self) -> None:
        self.growth_tokens = min(self.max_new_tokens, ANSWER_TOKENS)
        self.held_tokens = self.prompt_tokens + self.growth_tokens
        self.most_tokens = self.prompt_tokens + self.max_new_tokens - 1

    def sharing(self, overlap: Overlap) -> "Ask":
        """The same, where others have more of the prompt."""
        return replace(self, overlap=overlap)
