"""The grammar processor: of the tokens of a row with a grammar, only those are left with which its answer can go on.

Owns a matcher for each such row. A row begins with the answer's tokens so far, so a resumed answer goes on where it was. xgrammar
reads tokens and makes masks on the host. So the masks of a step wait for the tokens of the step before, while the device computes
the forward that this step has given it already.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.grammars import Grammars
from common.engine.logits.port import SampledRows
from common.engine.plan import RowStart
from common.engine.staging import Staging
from common.errors import BadRequest
from common.ids import Int64Array

if TYPE_CHECKING:
    from xgrammar import BatchGrammarMatcher, GrammarMatcher

FEW_ROWS = 4
"""Masks of so few rows are made one after the other: that takes less time than waking threads."""


@dataclass(slots=True, eq=False)
class _Row:
    """matcher: None when its grammar cannot be had. unread: tokens of the answer that it has not read. stop_ids: end the answer
    where the grammar allows it. is_over: nothing but these may follow; so a row that can only go wrong ends."""

    matcher: "GrammarMatcher | None"
    unread: list[int]
    stop_ids: list[int]
    is_over: bool = False

    def read(self) -> None:
        for token in self.unread:
            if self.is_over or self.matcher is None or not self.matcher.accept_token(token) or self.matcher.is_terminated():
                self.is_over = True
                break
        self.unread = []


@dataclass(slots=True, eq=False)
class _Sampled:
    """Tokens of a step on their way to the host. tokens: [rows] int64. copied: None on CPU."""

    rows: list[_Row]
    tokens: Tensor
    copied: "torch.cuda.Event | None"


class GrammarProcessor:
    """Implements `LogitsProcessor`. max_rows: of the batch. vocab_size: of the logits. eos_token_ids: end every answer, besides
    its request's own stop tokens."""

    def __init__(
        self, grammars: Grammars, max_rows: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._rows: dict[int, _Row] = {}
        self._has_grammar = np.zeros(max_rows + 1, dtype=bool)
        self._sampled: list[_Sampled] = []
        self._batch: BatchGrammarMatcher | None = None
        self._staging = Staging(device)
        self._words = (vocab_size + 63) // 64
        """Of 64 tokens each, in a mask."""

    def start(self, starts: Sequence[RowStart]) -> None:
        for start in starts:
            self._rows.pop(start.row, None)
            self._has_grammar[start.row] = start.sampling.grammar is not None
            if start.sampling.grammar is not None:
                self._rows[start.row] = self._begin(start)

    def concerns(self, rows: Int64Array) -> NDArray[np.bool_]:
        return self._has_grammar[rows]

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        from xgrammar import apply_token_bitmask_inplace

        self._hear()
        some = [self._rows[row] for row in rows.host.tolist()]
        for row in some:
            row.read()
        masks = self._masks(some)
        (sent,) = self._staging.send([masks.ravel()])
        mask = torch.empty(len(logits), self._words, dtype=torch.int64, device=self._device)
        mask[rows.at] = sent.view(len(some), self._words)
        bits = mask.view(torch.int32)
        if self._device.type == "cpu":
            apply_token_bitmask_inplace(logits, bits, vocab_size=self._vocab_size, indices=rows.host_at.tolist())
        else:
            apply_token_bitmask_inplace(logits, bits, vocab_size=self._vocab_size, indices=rows.at)  # type: ignore[arg-type]

    def sampled(self, rows: SampledRows, tokens: Tensor) -> None:
        copied: torch.cuda.Event | None = None
        if self._device.type != "cpu":
            tokens = torch.empty(len(tokens), dtype=torch.int64, pin_memory=True).copy_(tokens, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
        self._sampled.append(_Sampled([self._rows[row] for row in rows.host.tolist()], tokens, copied))

    def _begin(self, start: RowStart) -> _Row:
        """The answer's tokens are read later, while the device computes the row's first forward."""
        from xgrammar import GrammarMatcher

        sampling = start.sampling
        assert sampling.grammar is not None and start.token_ids is not None
        answer = start.token_ids[len(start.token_ids) - start.answer_tokens :].tolist()
        stop_ids = list(dict.fromkeys([*self._eos_token_ids, *sampling.stop_token_ids]))
        try:
            compiled = self._grammars.compiled(sampling.grammar)
        except BadRequest:  # it was compiled before the row was planned
            return _Row(None, answer, stop_ids, is_over=True)
        return _Row(GrammarMatcher(compiled, override_stop_tokens=stop_ids), answer, stop_ids)

    def _hear(self) -> None:
        """Take in what the steps before have sampled. A row that has begun anew since then is another `_Row`."""
        for step in self._sampled:
            if step.copied is not None:
                step.copied.synchronize()
            for row, token in zip(step.rows, step.tokens.tolist(), strict=True):
                row.unread.append(token)
        self._sampled.clear()

    def _masks(self, rows: list[_Row]) -> Int64Array:
        """A bit for each token that may follow, [rows, words]."""
        from xgrammar import BatchGrammarMatcher

        masks = np.zeros((len(rows), self._words), dtype=np.int64)
        bits = masks.view(np.int32)
        going = [at for at, row in enumerate(rows) if not row.is_over]
        matchers = [matcher for at in going if (matcher := rows[at].matcher) is not None]
        if len(matchers) <= FEW_ROWS:
            for at, matcher in zip(going, matchers, strict=True):
                matcher.fill_next_token_bitmask(bits, at)
        else:
            self._batch = self._batch or BatchGrammarMatcher()
            self._batch.batch_fill_next_token_bitmask(matchers, bits, going)
        for at in np.flatnonzero(~masks.any(axis=1)).tolist():
            row = rows[at]
            row.is_over = True
            for token in row.stop_ids:
                bits[at, token // 32] |= np.int32(1 << (token % 32)) if token % 32 < 31 else np.int32(-(2**31))
        return masks
