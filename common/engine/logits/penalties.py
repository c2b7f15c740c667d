"""Penalties: tokens that were there before become less likely, or more.

Owns what each row's prompt and answer hold: one number for each token of the vocabulary, on the device.

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


class Penalties:
    """Implements `LogitsProcessor`. rows: how many there are."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._seen = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self._repetition, self._presence, self._frequency = torch.zeros(3, rows, device=device).unbind()
        self._repeats, self._counts = np.zeros((2, rows), dtype=bool)
        """The rows that have a repetition penalty; those that have one of the others."""
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
        prompts, answers = list[Int64Array](), list[Int64Array]()
        for start in starts:
            assert start.token_ids is not None
            places = start.token_ids + np.int64(start.row) * self._seen.shape[1]
            prompt = len(places) - start.answer_tokens
            prompts.append(places[:prompt])
            answers.append(places[prompt:])
        rows, bits, in_prompt, in_answer = self._staging.send(
            [
                np.array([start.row for start in starts], dtype=np.int64),
                np.array(penalties, dtype=np.float64).T.ravel().view(np.int64),
                np.concatenate(prompts),
                np.concatenate(answers),
            ]
        )
        values = bits.view(torch.float64).float().view(3, -1)
        self._repetition[rows], self._presence[rows], self._frequency[rows] = values.unbind()
        cells = self._seen.index_fill_(0, rows, 0).view(-1)
        cells.index_fill_(0, in_prompt, _IN_PROMPT)
        _count(cells, in_answer)

    def concerns(self, rows: Int64Array) -> NDArray[np.bool_]:
        concerned: NDArray[np.bool_] = self._repeats[rows] | self._counts[rows]
        return concerned

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        """Some rows at a time: it takes a few times their memory."""
        is_all = len(rows.at) == len(logits)
        for part in row_parts(len(rows.host)):
            some = logits[part] if is_all else logits[rows.at[part]]
            self._penalise(some, rows.host[part], rows.device[part])
            if not is_all:
                logits[rows.at[part]] = some

    def _penalise(self, logits: Tensor, host_rows: Int64Array, rows: Tensor) -> None:
        """In place. logits: [rows, vocab]."""
        seen = self._seen[rows]
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


def _count(cells: Tensor, which: Tensor) -> None:
    cells.index_add_(0, which, torch.ones_like(which, dtype=torch.int32))
