"""Penalties: tokens that were there before become less likely, or more.

Owns what each row's prompt and answer hold, on the device: one number for each token of the vocabulary, and, as long as they are
few, the tokens themselves. Then only their logits are touched, else all of the row.

Repetition, as in Hugging Face's transformers (Keskar et al. 2019): the logit of a token that the prompt or the answer holds is
divided by the penalty if it is positive, else multiplied by it. Then come OpenAI's two, which heed the answer alone: frequency
times how often the answer holds the token is taken off, and presence once if it holds it at all.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.logits.port import SampledRows
from common.engine.plan import RowStart
from common.engine.sampler import row_parts
from common.engine.staging import Staging
from common.ids import Int64Array

_IN_PROMPT = 2**30
"""What a token's number has more if the prompt holds it; the rest is how often the answer does."""
_FEW = 8
"""Tokens are few if they are at most one in so many of the vocabulary."""


class Penalties:
    """Implements `LogitsProcessor`. rows: how many there are."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._seen = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self._repetition, self._presence, self._frequency = torch.zeros(3, rows, device=device).unbind()
        self._repeats, self._counts = np.zeros((2, rows), dtype=bool)
        """The rows that have a repetition penalty; those that have one of the others."""
        self._tokens = torch.zeros(rows, max(1, vocab_size // _FEW), dtype=torch.int64, device=device)
        """The tokens that a row's prompt and answer hold, some maybe more than once, and behind them one of them again."""
        self._length = torch.zeros(rows, dtype=torch.int64, device=device)
        self._host_length = np.zeros(rows, dtype=np.int64)
        """How many tokens that is. Beyond the width of `_tokens`, what is there does not count any more."""
        self._staging = Staging(device)

    def start(self, starts: Sequence[RowStart]) -> None:
        concerned: list[RowStart] = []
        for start in starts:
            row, sampling = start.row, start.sampling
            self._repeats[row] = sampling.repetition_penalty != 1
            self._counts[row] = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
            if self._repeats[row] or self._counts[row]:
                concerned.append(start)
        if concerned:
            self._begin(concerned)

    def _begin(self, starts: Sequence[RowStart]) -> None:
        asked = [start.sampling for start in starts]
        penalties = [(each.repetition_penalty, each.presence_penalty, each.frequency_penalty) for each in asked]
        prompts, answers, tokens = list[Int64Array](), list[Int64Array](), list[Int64Array]()
        width, vocab_size = self._tokens.shape[1], self._seen.shape[1]
        for start in starts:
            assert start.token_ids is not None
            prompt = len(start.token_ids) - start.answer_tokens
            places = start.token_ids + np.int64(start.row) * vocab_size
            prompts.append(places[:prompt])
            answers.append(places[prompt:])
            held = np.unique(start.token_ids).astype(np.int64)
            self._host_length[start.row] = len(held)
            tokens.append(np.pad(held[:width], (0, max(0, width - len(held))), mode="edge"))
        rows, lengths, bits, in_prompt, in_answer, held_tokens = self._staging.send(
            [
                np.array([start.row for start in starts], dtype=np.int64),
                self._host_length[[start.row for start in starts]],
                np.array(penalties, dtype=np.float64).T.ravel().view(np.int64),
                np.concatenate(prompts),
                np.concatenate(answers),
                np.concatenate(tokens),
            ]
        )
        values = bits.view(torch.float64).float().view(3, -1)
        self._repetition[rows], self._presence[rows], self._frequency[rows] = values.unbind()
        self._tokens[rows], self._length[rows] = held_tokens.view(-1, width), lengths
        cells = self._seen.index_fill_(0, rows, 0).view(-1)
        cells.index_fill_(0, in_prompt, _IN_PROMPT)
        _count(cells, in_answer)

    def concerns(self, rows: Int64Array) -> NDArray[np.bool_]:
        concerned: NDArray[np.bool_] = self._repeats[rows] | self._counts[rows]
        return concerned

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        """If each of the rows has few tokens, their logits alone; else whole rows, some at a time."""
        width = self._tokens.shape[1]
        longest = int(self._host_length[rows.host].max())
        if longest <= width:
            tokens = self._tokens[rows.device, :longest]
            cells = rows.at[:, None] * logits.shape[1] + tokens
            flat = logits.view(-1)
            some, seen = flat[cells], self._seen.view(-1)[rows.device[:, None] * logits.shape[1] + tokens]
            self._penalise(some, seen, rows.host, rows.device)
            flat[cells] = some  # a token that is there twice gets the same number twice
            return
        is_all = len(rows.at) == len(logits)
        for part in row_parts(len(rows.host)):
            some = logits[part] if is_all else logits[rows.at[part]]
            self._penalise(some, self._seen[rows.device[part]], rows.host[part], rows.device[part])
            if not is_all:
                logits[rows.at[part]] = some

    def _penalise(self, logits: Tensor, seen: Tensor, host_rows: Int64Array, rows: Tensor) -> None:
        """In place. logits, seen: [rows, any tokens], of the same tokens."""
        if self._repeats[host_rows].any():
            penalty = self._repetition[rows, None]
            factor = torch.where(logits > 0, 1.0 / penalty, penalty)
            logits *= factor.masked_fill_(seen == 0, 1.0)
        if self._counts[host_rows].any():
            count = seen & (_IN_PROMPT - 1)
            logits -= self._frequency[rows, None] * count
            logits -= self._presence[rows, None] * (count > 0)

    def sampled(self, rows: SampledRows, tokens: Tensor) -> None:
        _count(self._seen.view(-1), rows.device * self._seen.shape[1] + tokens)
        length = self._length[rows.device]
        self._tokens[rows.device, length.clamp(max=self._tokens.shape[1] - 1)] = tokens
        self._length[rows.device] = length + 1
        self._host_length[rows.host] += 1


def _count(cells: Tensor, which: Tensor) -> None:
    cells.index_add_(0, which, torch.ones_like(which, dtype=torch.int32))
