"""The log probabilities that a step reports, as the host gets them.

Owns their shape and how they become messages. Does not know how they are computed; knows no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from common.ids import Int32Array
from common.messages import TokenLogprob
from common.messages.logprobs import LEAST_LOGPROB


def _none() -> Int32Array:
    return np.empty(0, dtype=np.int32)


def _no_shares() -> NDArray[np.float32]:
    return np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """How likely some tokens were; by default of none. Those of a row are side by side, in the order of the sequence.

    rows: [tokens] int32, the row of each. token_ids, ranks: [tokens] int32. logprobs: [tokens] float32. asked: [tokens] int32,
    how many of the likeliest tokens the row asks for. top_ids, top_logprobs: [tokens, the most asked for] int32 and float32,
    the likeliest first. See `TokenLogprob`.
    """

    rows: Int32Array = field(default_factory=_none)
    token_ids: Int32Array = field(default_factory=_none)
    logprobs: NDArray[np.float32] = field(default_factory=_no_shares)
    ranks: Int32Array = field(default_factory=_none)
    asked: Int32Array = field(default_factory=_none)
    top_ids: Int32Array = field(default_factory=_none)
    top_logprobs: NDArray[np.float32] = field(default_factory=_no_shares)

    @classmethod
    def of(cls, rows: Sequence[int], told: Sequence[TokenLogprob]) -> Self:
        """The inverse of `by_row`, for executors that compute no tensors. rows: the row of each."""
        if not rows:
            return cls()
        asked = np.array([len(each.top) for each in told], dtype=np.int32)
        shape = len(told), int(asked.max())
        top_ids, top_logprobs = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.float32)
        for at, each in enumerate(told):
            for place, (token_id, logprob) in enumerate(each.top):
                top_ids[at, place], top_logprobs[at, place] = token_id, logprob
        return cls(
            rows=np.array(rows, dtype=np.int32),
            token_ids=np.array([each.token_id for each in told], dtype=np.int32),
            logprobs=np.array([each.logprob for each in told], dtype=np.float32),
            ranks=np.array([each.rank for each in told], dtype=np.int32),
            asked=asked,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )

    def by_row(self) -> dict[int, tuple[TokenLogprob, ...]]:
        """The messages of each row that is here. Made anew by each call: call it once for a step."""
        if not len(self.rows):
            return {}
        made: dict[int, list[TokenLogprob]] = {row: [] for row in self.rows.tolist()}
        tops = zip(self.asked.tolist(), self.top_ids.tolist(), _finite(self.top_logprobs), strict=True)
        top = (tuple(zip(ids[:asked], logprobs[:asked], strict=True)) for asked, ids, logprobs in tops)
        columns = self.token_ids.tolist(), _finite(self.logprobs), self.ranks.tolist()
        for row, token_id, logprob, rank, likeliest in zip(self.rows.tolist(), *columns, top, strict=True):
            made[row].append(TokenLogprob(token_id, logprob, rank, likeliest))
        return {row: tuple(told) for row, told in made.items()}


def _finite(logprobs: NDArray[np.float32]) -> list[Any]:
    """As a message may carry them. What is not a number cannot come."""
    finite: list[Any] = np.maximum(np.nan_to_num(logprobs, nan=LEAST_LOGPROB), LEAST_LOGPROB).tolist()
    return finite


NO_LOGPROBS = Logprobs()
