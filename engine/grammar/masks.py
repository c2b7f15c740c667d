"""The grammar processor: of the tokens of a row with a grammar, only those are left with which its answer can go on.

Owns a matcher for each such row, and the masks that keep an answer UTF-8. A row begins with the answer's tokens so far, so a
resumed answer goes on where it was. xgrammar reads tokens and makes masks on the host. So the masks of a step wait for the tokens
of the step before, while the device computes the forward that this step has given it already. Does not know how grammars are
compiled.

Where no mask can be made the row fails, and its request ends with an error: a stop token says that the answer matches. So it
does when its matcher raises: its neighbours go on. Grammars are tried before rows use them, but no trial
meets every text. A row whose token takes too much work would stop all others. Work is counted, not timed: every rank, and an
instance that carries the answer on, fails the row at the same token.

The count sees what the parser shows: its states. It does not see rules of an EBNF grammar that end in very many ways at once. So
a row also fails when a token takes CPU seconds. That is no verdict of this rank: it changes no token, and only rank 0's counts.
"""

import re
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from common.errors import BadRequest, TandemError
from common.executor import RowStart
from common.ids import Int32Array
from common.sampling_params import Grammar
from engine.ports import ROW_FAULTS, SampledRows
from engine.rows import Staging

if TYPE_CHECKING:
    from xgrammar import BatchGrammarMatcher, CompiledGrammar, GrammarMatcher


_WRONG_BEHIND = {0xE0: (0x80, 0x9F), 0xED: (0xA0, 0xBF), 0xF0: (0x80, 0x8F)}
"""First bytes of characters, and the continuation bytes that may not follow them (RFC 3629, section 4)."""
_WRONG = re.compile(b"|".join(b"%c[%c-%c]" % (first, low, high) for first, (low, high) in _WRONG_BEHIND.items()), re.DOTALL)


WORD_TOKENS = 32


def mask_words(vocab_size: int) -> int:
    """How many words of WORD_TOKENS tokens a mask has: as xgrammar wants it, and no other width."""
    return -(-vocab_size // WORD_TOKENS)


class Utf8:
    """Which tokens keep an answer UTF-8. xgrammar 0.2 takes some bytes for a character that are none: surrogates, and characters
    written with more bytes than they need. A client would see several replacement characters in place of one. What else would be
    no UTF-8 it refuses itself. vocabulary: the bytes of each token. words: of WORD_TOKENS tokens each, in a mask."""

    def __init__(self, vocabulary: Sequence[bytes], words: int) -> None:
        self._words = words
        never = [token for token, data in enumerate(vocabulary) if data and _WRONG.search(data)]
        self._ever = self._all_but(never) if never else None
        begins: dict[int, list[int]] = {}
        for token, data in enumerate(vocabulary):
            if data and 0x80 <= data[0] < 0xC0:
                begins.setdefault(data[0], []).append(token)
        masks = {
            first: self._all_but([token for byte in range(low, high + 1) for token in begins.get(byte, ())])
            for first, (low, high) in _WRONG_BEHIND.items()
        }
        self._behind = {token: masks[data[-1]] for token, data in enumerate(vocabulary) if data and data[-1] in masks}

    def narrow(self, mask: Int32Array, before: int | None) -> None:
        """Take the tokens out of the mask, [words], that may not follow this token of the answer. None: the answer is empty."""
        if self._ever is not None:
            mask &= self._ever
        if before in self._behind:
            mask &= self._behind[before]

    def _all_but(self, tokens: list[int]) -> Int32Array:
        bits = np.ones(self._words * WORD_TOKENS, dtype=np.uint8)
        bits[tokens] = 0
        return np.packbits(bits, bitorder="little").view(np.int32)


FEW_ROWS = 4
"""Masks of so few rows are made one after the other: that takes less time than waking threads."""
MAX_WORK = 2**17
"""The most work of a row's next token, as `count_work` counts it. The dearest grammar that was tried, `s ::= "a" s "b" s | "a" s
| [a-z]`, takes 30 ms a token at half of it and 137 ms at twice (one core of an AMD EPYC); everyday schemas stay below 100."""
SLOW_S = 1.0
"""CPU time of a row's token that no count explains."""
_FEW_STATES = 64
_STATE, _BEGINS = "ParserState(", re.compile(r"rule_start_pos=(-?\d+)")


def count_work(matcher: "GrammarMatcher") -> int:
    """What the next token costs: the states of the parser, times the places of the answer where their rules began. Each state
    reads the token's bytes, and each end of a rule looks at what waits for it where it began. The same for the same grammar and
    the same answer, on every machine."""
    states = matcher._debug_print_internal_state()  # xgrammar 0.2 has no other way to say
    count = states.count(_STATE)
    return count if count <= _FEW_STATES else count * len(set(_BEGINS.findall(states)))


Compiled: TypeAlias = Callable[[Grammar], "CompiledGrammar"]
"""Returns the compiled form of a grammar that was prepared. Waits for nothing. Raises BadRequest."""


@dataclass(slots=True, eq=False)
class _Row:
    """A row whose answer must match a grammar."""

    matcher: "GrammarMatcher | None"
    """None when the row has failed from the start."""
    unread: list[int]
    """Tokens of the answer that the matcher has not read."""
    stop_ids: list[int]
    """Tokens that end the answer where the grammar allows it."""
    kind: str
    """The grammar's, for messages."""
    needed: "weakref.ref[Grammar] | None" = None
    """Dead when the request has ended."""
    is_over: bool = False
    """A stop token has ended the answer."""
    failed: TandemError | None = None
    """Why the answer cannot go on. No masks are made for it any more."""
    last: int | None = None
    """The latest token of the answer that was read."""
    slowest_s: float = 0.0
    """CPU time that the slowest token has taken."""

    @property
    def goes_on(self) -> bool:
        return not self.is_over and self.failed is None

    def read(self) -> None:
        for token in self.unread:
            if not self.goes_on or self.matcher is None:
                break
            begun = time.thread_time()
            try:
                if not self.matcher.accept_token(token):
                    self.failed = TandemError(f"{self.kind}: the answer so far does not match it")
                elif self.matcher.is_terminated():
                    self.is_over = True
                elif count_work(self.matcher) > MAX_WORK:
                    self.failed = self.too_slow()
            except ROW_FAULTS as error:
                self.failed = _matcher_failed(self.kind, error)
            self.took(begun)
        self.last = self.unread[-1] if self.unread else self.last
        self.unread = []

    def fill(self, masks: Int32Array, at: int) -> None:
        """Row `at` of the masks, [rows, words], becomes the tokens that may follow: none if the row fails now."""
        begun = time.thread_time()
        try:
            if self.matcher is not None:
                self.matcher.fill_next_token_bitmask(masks, at)
        except ROW_FAULTS as error:
            self.failed = _matcher_failed(self.kind, error)
            masks[at] = 0
        self.took(begun)

    def took(self, begun: float) -> None:
        """One token, since this CPU time of the thread."""
        self.slowest_s = max(self.slowest_s, time.thread_time() - begun)

    def too_slow(self) -> BadRequest:
        return BadRequest(
            f"{self.kind}: it takes too long to follow with this answer: write it so that a text matches in fewer ways, with "
            "fewer repetitions within each other",
            field=self.kind,
        )


def _matcher_failed(kind: str, error: Exception) -> TandemError:
    return TandemError(f"{kind}: its matcher failed: {error}")


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
        mask = torch.zeros(rows, mask_words(vocab_size), dtype=torch.int32, device=device)
        _mask(torch.zeros(rows, vocab_size, device=device), mask, vocab_size, torch.arange(rows, device=device))


def _mask(logits: Tensor, mask: Tensor, vocab_size: int, at: Tensor | list[int]) -> None:
    """In place. mask: [rows, words] int32, a bit for each token that may follow. at: the rows of both that it is for."""
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, mask, vocab_size=vocab_size, indices=at)  # type: ignore[arg-type]


class GrammarProcessor:
    """Implements `LogitsProcessor`. max_rows: of the batch. vocab_size: of the logits. eos_token_ids: end every answer, besides
    its request's own stop tokens."""

    def __init__(
        self,
        compiled: Compiled,
        max_rows: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self._compiled = compiled
        self._one_by_one = False
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._rows: dict[int, _Row] = {}
        self.concerns = np.zeros(max_rows, dtype=bool)
        self._sampled: list[_Sampled] = []
        self._batch: BatchGrammarMatcher | None = None
        self._staging = Staging(device)
        self._words = mask_words(vocab_size)
        self._utf8: Utf8 | None = None

    def start(self, starts: Sequence[RowStart]) -> None:
        """Rows whose requests have ended are forgotten too, for their grammars are large."""
        for row in [row for row, one in self._rows.items() if one.needed is None or one.needed() is None]:
            del self._rows[row]
        for start in starts:
            self._rows.pop(start.row, None)
            self.concerns[start.row] = start.sampling.grammar is not None
            if start.sampling.grammar is not None:
                self._rows[start.row] = self._begin(start)

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        self._hear()
        some = self._of(rows)
        for row in some:
            row.read()
        masks = self._masks(some)
        for number, row in zip(rows.host.tolist(), some, strict=True):
            failed = row.failed or (row.too_slow() if row.slowest_s > SLOW_S else None)
            if failed is not None:
                rows.failed[number] = failed
        flat = np.zeros(masks.size + masks.size % 2, dtype=np.int32)  # what is sent is int64
        flat[: masks.size] = masks.ravel()
        (sent,) = self._staging.send([flat.view(np.int64)])
        mask = torch.empty(len(logits), self._words, dtype=torch.int32, device=self._device)
        mask[rows.at] = sent.view(torch.int32)[: masks.size].view(len(some), self._words)
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
        return [self._rows.get(row) or _row_that_is_over() for row in rows.host.tolist()]

    def _begin(self, start: RowStart) -> _Row:
        """The answer's tokens are read later, while the device computes the row's first forward."""
        from xgrammar import GrammarMatcher

        sampling = start.sampling
        assert sampling.grammar is not None and start.token_ids is not None
        answer = start.token_ids[len(start.token_ids) - start.answer_tokens :].tolist()
        stop_ids = list(dict.fromkeys([*self._eos_token_ids, *sampling.stop_token_ids]))
        kind, needed = sampling.grammar.kind, weakref.ref(sampling.grammar)
        try:
            compiled = self._compiled(sampling.grammar)
            matcher = GrammarMatcher(compiled, override_stop_tokens=stop_ids)
        except BadRequest as error:  # it was compiled before the row was planned
            return _Row(None, [], stop_ids, kind, needed, failed=error)
        except ROW_FAULTS as error:
            return _Row(None, [], stop_ids, kind, needed, failed=_matcher_failed(kind, error))
        self._utf8 = self._utf8 or Utf8(compiled.tokenizer_info.decoded_vocab, self._words)
        return _Row(matcher, answer, stop_ids, kind, needed)

    def _hear(self) -> None:
        """Take in what the steps before have sampled. A row that has begun anew since then is another `_Row`."""
        for step in self._sampled:
            if step.copied is not None:
                step.copied.synchronize()
            for row, token in zip(step.rows, step.tokens.tolist(), strict=True):
                row.unread.append(token)
        self._sampled.clear()

    def _masks(self, rows: list[_Row]) -> Int32Array:
        """A bit for each token that may follow, [rows, words]. All may follow in a row that has failed."""
        masks = np.zeros((len(rows), self._words), dtype=np.int32)
        going = [at for at, row in enumerate(rows) if row.goes_on]
        if len(going) <= FEW_ROWS or self._one_by_one or not self._fill_together(rows, masks, going):
            self._one_by_one = False
            for at in going:
                rows[at].fill(masks, at)
        for at in going:
            if self._utf8 is not None:
                self._utf8.narrow(masks[at], rows[at].last)
        for at in np.flatnonzero(~masks.any(axis=1)).tolist():
            row = rows[at]
            if row.goes_on:
                row.failed = BadRequest(f"{row.kind}: no token of the model can follow: allow other texts", field=row.kind)
            if row.failed is not None:
                masks[at] = -1
                continue
            for token in row.stop_ids:
                bit = token % WORD_TOKENS
                masks[at, token // WORD_TOKENS] |= np.int32(1 << bit) if bit < 31 else np.int32(-(2**31))
        return masks

    def _fill_together(self, rows: list[_Row], masks: Int32Array, going: list[int]) -> bool:
        """On threads of the matchers. False when one of them raises, which one by one will show."""
        from xgrammar import BatchGrammarMatcher

        self._batch = self._batch or BatchGrammarMatcher()
        begun = time.monotonic()
        matchers = [matcher for at in going if (matcher := rows[at].matcher) is not None]
        try:
            self._batch.batch_fill_next_token_bitmask(matchers, masks, going)
        except ROW_FAULTS:
            masks[:] = 0
            return False
        self._one_by_one = time.monotonic() - begun > SLOW_S  # which row it was shows in the next step
        return True


def _row_that_is_over() -> _Row:
    return _Row(None, [], [], "grammar", failed=TandemError("grammar: it is not held any more"))
