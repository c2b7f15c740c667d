"""Bad words: sequences of tokens that an answer must not contain.

Owns the last tokens of each answer that has bad words, on the device. A word's last token is banned while the answer ends with
the tokens before it, as in vLLM: the prompt does not count.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.logits.port import SampledRows
from common.engine.logits.sparse import SparseRows
from common.engine.plan import RowStart
from common.engine.staging import Staging
from common.ids import Int64Array
from common.sampling_params import MAX_BAD_WORD

_BEFORE = MAX_BAD_WORD - 1
_NO_TOKEN, _ANY_TOKEN = -1, -2
"""Where the answer has no token yet; where a word is shorter."""


class BadWords:
    """Implements `LogitsProcessor`. rows: how many there are."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._has_words = np.zeros(rows, dtype=bool)
        self._words = SparseRows(rows, 1 + _BEFORE, device)
        """Of each its last token, then those before it."""
        self._last_tokens = torch.zeros(rows, _BEFORE, dtype=torch.int64, device=device)
        self._staging = Staging(device)

    def start(self, starts: Sequence[RowStart]) -> None:
        concerned = [start for start in starts if start.sampling.bad_words]
        for start in starts:
            self._has_words[start.row] = False
            self._words.drop(start.row)
        if not concerned:
            return
        last_tokens = np.full((len(concerned), _BEFORE), _NO_TOKEN, dtype=np.int64)
        for number, start in enumerate(concerned):
            assert start.token_ids is not None
            self._has_words[start.row] = True
            self._words.put(start.row, np.array([_entry(word) for word in start.sampling.bad_words], dtype=np.int64).T)
            known = start.token_ids[len(start.token_ids) - min(start.answer_tokens, _BEFORE) :]
            last_tokens[number, _BEFORE - len(known) :] = known
        rows, flat = self._staging.send([np.array([start.row for start in concerned]), last_tokens.ravel()])
        self._last_tokens[rows] = flat.view(-1, _BEFORE)

    def concerns(self, rows: Int64Array) -> NDArray[np.bool_]:
        return self._has_words[rows]

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        table = self._words.table()
        held_by, words = table[0], table[2:].T
        is_next = ((words == self._last_tokens[held_by]) | (words == _ANY_TOKEN)).all(dim=1)
        self._words.add(logits, rows, torch.zeros(len(words), device=logits.device).masked_fill(is_next, -torch.inf))

    def sampled(self, rows: SampledRows, tokens: Tensor) -> None:
        self._last_tokens[rows.device] = torch.cat([self._last_tokens[rows.device, 1:], tokens[:, None]], dim=1)


def _entry(word: tuple[int, ...]) -> list[int]:
    *before, last = word
    return [last, *[_ANY_TOKEN] * (_BEFORE - len(before)), *before]
