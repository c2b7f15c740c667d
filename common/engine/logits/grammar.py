"""The grammar processor: of the tokens of a row with a grammar, only those are left with which its answer can go on.

Owns a matcher for each such row. A row begins with the answer's tokens so far, so a resumed answer goes on where it was. xgrammar
reads tokens and makes masks on the host. So the masks of a step wait for the tokens of the step before, while the device computes
the forward that this step has given it already.

Grammars are tried before rows use them, but no trial meets every text. A row whose token takes too much time here would stop all
others. It ends with a stop token, as one ends whose tokens its grammar refuses; its answer is the beginning of a match.
"""

import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.logits.port import SampledRows
from common.engine.logits.utf8 import Utf8
from common.engine.plan import RowStart
from common.engine.staging import Staging
from common.errors import BadRequest
from common.ids import Int64Array
from common.sampling_params import Grammar

if TYPE_CHECKING:
    from xgrammar import BatchGrammarMatcher, CompiledGrammar, GrammarMatcher

FEW_ROWS = 4
"""Masks of so few rows are made one after the other: that takes less time than waking threads."""
TOKEN_S, REPLAYED_S = 0.1, 0.001
"""CPU time that a row's token may take, and that each further one may take which a row reads at once when it is carried on."""

_log = logging.getLogger(__name__)


class Compiled(Protocol):
    def __call__(self, grammar: Grammar, /) -> "CompiledGrammar":
        """The compiled form of a grammar that was prepared. Waits for nothing. Raises BadRequest."""


@dataclass(slots=True, eq=False)
class _Row:
    """matcher: None when its grammar cannot be had. unread: tokens of the answer that it has not read. stop_ids: end the answer
    where the grammar allows it. is_over: nothing but these may follow; so a row that can only go wrong ends. last: token of the
    answer that it has read. needed: dead when the request has ended."""

    matcher: "GrammarMatcher | None"
    unread: list[int]
    stop_ids: list[int]
    needed: "weakref.ref[Grammar] | None" = None
    is_over: bool = False
    last: int | None = None

    def read(self, token_s: float) -> None:
        left_s = token_s + REPLAYED_S * len(self.unread)
        for token in self.unread:
            begun = time.thread_time()
            if self.is_over or self.matcher is None or not self.matcher.accept_token(token) or self.matcher.is_terminated():
                self.is_over = True
                break
            left_s -= (spent_s := time.thread_time() - begun)
            if spent_s > token_s or left_s < 0:
                self.end()
                break
        self.last = self.unread[-1] if self.unread else self.last
        self.unread = []

    def end(self) -> None:
        """It takes too long."""
        _log.warning("an answer ends early: its grammar takes too long to follow")
        self.is_over = True


@dataclass(slots=True, eq=False)
class _Sampled:
    """Tokens of a step on their way to the host. tokens: [rows] int64. copied: None on CPU."""

    rows: list[_Row]
    tokens: Tensor
    copied: "torch.cuda.Event | None"


def load_mask_kernel(vocab_size: int, device: torch.device) -> None:
    """Have Triton compile what masks logits on CUDA, before a first answer with a grammar makes all rows wait for that.

    xgrammar's kernel is compiled for one row, for multiples of 16, and for other numbers."""
    for rows in (1, 2, 16):
        mask = torch.zeros(rows, (vocab_size + 63) // 64, dtype=torch.int64, device=device)
        _mask(torch.zeros(rows, vocab_size, device=device), mask, vocab_size, torch.arange(rows, device=device))


def _mask(logits: Tensor, mask: Tensor, vocab_size: int, at: Tensor | list[int]) -> None:
    """In place. mask: [rows, words] int64, a bit for each token that may follow. at: the rows of both that it is for."""
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, mask.view(torch.int32), vocab_size=vocab_size, indices=at)  # type: ignore[arg-type]


class GrammarProcessor:
    """Implements `LogitsProcessor`. max_rows: of the batch. vocab_size: of the logits. eos_token_ids: end every answer, besides
    its request's own stop tokens. token_s: CPU time that a row's token may take."""

    def __init__(
        self,
        compiled: Compiled,
        max_rows: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        token_s: float = TOKEN_S,
    ) -> None:
        self._compiled = compiled
        self._token_s = token_s
        self._one_by_one = False
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
        self._utf8: Utf8 | None = None

    def start(self, starts: Sequence[RowStart]) -> None:
        """Rows whose requests have ended are forgotten too, for their grammars are large."""
        for row in [row for row, one in self._rows.items() if one.needed is None or one.needed() is None]:
            del self._rows[row]
        for start in starts:
            self._rows.pop(start.row, None)
            self._has_grammar[start.row] = start.sampling.grammar is not None
            if start.sampling.grammar is not None:
                self._rows[start.row] = self._begin(start)

    def concerns(self, rows: Int64Array) -> NDArray[np.bool_]:
        return self._has_grammar[rows]

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        self._hear()
        some = self._of(rows)
        for row in some:
            row.read(self._token_s)
        masks = self._masks(some)
        (sent,) = self._staging.send([masks.ravel()])
        mask = torch.empty(len(logits), self._words, dtype=torch.int64, device=self._device)
        mask[rows.at] = sent.view(len(some), self._words)
        _mask(logits, mask, self._vocab_size, rows.host_at.tolist() if self._device.type == "cpu" else rows.at)

    def sampled(self, rows: SampledRows, tokens: Tensor) -> None:
        copied: torch.cuda.Event | None = None
        if self._device.type != "cpu":
            tokens = torch.empty(len(tokens), dtype=torch.int64, pin_memory=True).copy_(tokens, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
        self._sampled.append(_Sampled(self._of(rows), tokens, copied))

    def _of(self, rows: SampledRows) -> list[_Row]:
        """A plan may name rows whose requests have ended since it was made. What they sample counts for nothing."""
        return [self._rows.get(row) or _Row(None, [], list(self._eos_token_ids), is_over=True) for row in rows.host.tolist()]

    def _begin(self, start: RowStart) -> _Row:
        """The answer's tokens are read later, while the device computes the row's first forward."""
        from xgrammar import GrammarMatcher

        sampling = start.sampling
        assert sampling.grammar is not None and start.token_ids is not None
        answer = start.token_ids[len(start.token_ids) - start.answer_tokens :].tolist()
        stop_ids = list(dict.fromkeys([*self._eos_token_ids, *sampling.stop_token_ids]))
        needed = weakref.ref(sampling.grammar)
        try:
            compiled = self._compiled(sampling.grammar)
        except BadRequest:  # it was compiled before the row was planned
            return _Row(None, answer, stop_ids, needed, is_over=True)
        self._utf8 = self._utf8 or Utf8(compiled.tokenizer_info.decoded_vocab, self._words)
        return _Row(GrammarMatcher(compiled, override_stop_tokens=stop_ids), answer, stop_ids, needed)

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
        if len(matchers) <= FEW_ROWS or self._one_by_one:
            self._one_by_one = False
            for at, matcher in zip(going, matchers, strict=True):
                begun = time.thread_time()
                matcher.fill_next_token_bitmask(bits, at)
                if time.thread_time() - begun > self._token_s:
                    rows[at].end()
                    masks[at] = 0
        else:
            self._batch = self._batch or BatchGrammarMatcher()
            begun = time.monotonic()
            self._batch.batch_fill_next_token_bitmask(matchers, bits, going)
            self._one_by_one = time.monotonic() - begun > self._token_s  # which row it was shows in the next step
        for at in going:
            if self._utf8 is not None:
                self._utf8.narrow(masks[at], rows[at].last)
        for at in np.flatnonzero(~masks.any(axis=1)).tolist():
            row = rows[at]
            row.is_over = True
            for token in row.stop_ids:
                bits[at, token // 32] |= np.int32(1 << (token % 32)) if token % 32 < 31 else np.int32(-(2**31))
        return masks
