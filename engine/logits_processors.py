"""The logits processors: what changes the logits of some rows before their tokens are drawn.

Owns penalties, biases, bad words and the least length of an answer, and the order of all processors; grammars are in
`grammar/masks.py`. Each keeps a state of its rows on the device, which is brought forward with each sampled token. Does not know
how tokens are drawn, or requests.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from common.executor import RowStart
from common.ids import Int64Array
from common.sampling_params import MAX_BAD_WORD
from engine.grammar.masks import Compiled, GrammarProcessor
from engine.ports import LogitsProcessor, SampledRows
from engine.rows import Staging

ROWS_AT_ONCE = 64


def row_parts(rows: int) -> Iterator[slice]:
    """Some rows at a time, for what needs a few times the memory of their logits."""
    return (slice(begin, begin + ROWS_AT_ONCE) for begin in range(0, rows, ROWS_AT_ONCE))


class _SparseProcessor:
    """A processor that adds a number to the logits of few tokens of each row that it concerns.

    Each such row holds some entries, [numbers, entries] int64, of which the first number is a token. Those of all rows lie side
    by side on the device, and are copied there only after the set of rows, or what one of them holds, has changed.
    """

    numbers: int

    def __init__(self, rows: int, device: torch.device) -> None:
        self.concerns = np.zeros(rows, dtype=bool)
        self._of_row: dict[int, Int64Array] = {}
        self._staging = Staging(device)
        self._table: Tensor | None = None

    def start(self, starts: Sequence[RowStart]) -> None:
        for start in starts:
            row, entries = start.row, self.entries(start)
            if self.concerns[row]:
                self.drop(row)
            self.concerns[row] = entries is not None
            if entries is not None:
                self._of_row[row] = np.concatenate([np.full((1, entries.shape[1]), row), entries])
                self._table = None

    def drop(self, row: int) -> None:
        """The row is not concerned any more."""
        self.concerns[row] = False
        if self._of_row.pop(row, None) is not None:
            self._table = None

    def entries(self, start: RowStart) -> Int64Array | None:
        """What the row holds; None: the processor does not concern it."""
        raise NotImplementedError

    def values(self, table: Tensor) -> Tensor:
        """What is added to each entry's logit, [entries] float32; minus infinity bans the token. table: [1 + numbers, entries]
        int64, the entries of all rows, the row of each first."""
        raise NotImplementedError

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        if self._table is None:
            nothing = np.empty((1 + self.numbers, 0), dtype=np.int64)
            whole = np.concatenate([nothing, *self._of_row.values()], axis=1)
            (flat,) = self._staging.send([whole.ravel()])
            self._table = flat.view(whole.shape)
        table = self._table
        at = torch.full((len(self.concerns),), -1, dtype=torch.int64, device=logits.device)
        at[rows.device] = rows.at
        entry_at = at[table[0]]
        flat = entry_at.clamp(min=0) * logits.shape[1] + table[1]
        logits.view(-1).index_add_(0, flat, self.values(table).masked_fill(entry_at < 0, 0.0))

    def sampled(self, rows: SampledRows, tokens: Tensor) -> None:
        """By default nothing depends on tokens."""


class LogitBias(_SparseProcessor):
    """OpenAI's logit_bias: what is added to the logits of named tokens. Implements `LogitsProcessor`."""

    numbers = 2
    """The token, and the bits of its bias as float64."""

    def entries(self, start: RowStart) -> Int64Array | None:
        if not start.sampling.logit_bias:
            return None
        tokens, biases = zip(*start.sampling.logit_bias, strict=True)
        return np.stack([np.array(tokens, dtype=np.int64), np.array(biases, dtype=np.float64).view(np.int64)])

    def values(self, table: Tensor) -> Tensor:
        return table[2].view(torch.float64).float()


_BEFORE = MAX_BAD_WORD - 1
_NO_TOKEN, _ANY_TOKEN = -1, -2
"""Where the answer has no token yet; where a word is shorter."""


class BadWords(_SparseProcessor):
    """Sequences of tokens that an answer must not contain. A word's last token is banned while the answer ends with the tokens
    before it, as in vLLM: the prompt does not count. Implements `LogitsProcessor`."""

    numbers = 1 + _BEFORE
    """The last token of a word, then those before it."""

    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__(rows, device)
        self._last_tokens = torch.zeros(rows, _BEFORE, dtype=torch.int64, device=device)

    def start(self, starts: Sequence[RowStart]) -> None:
        super().start(starts)
        concerned = [start for start in starts if start.sampling.bad_words]
        if not concerned:
            return
        last_tokens = np.full((len(concerned), _BEFORE), _NO_TOKEN, dtype=np.int64)
        for number, start in enumerate(concerned):
            assert start.token_ids is not None
            known = start.token_ids[len(start.token_ids) - min(start.answer_tokens, _BEFORE) :]
            last_tokens[number, _BEFORE - len(known) :] = known
        rows, flat = self._staging.send([np.array([start.row for start in concerned]), last_tokens.ravel()])
        self._last_tokens[rows] = flat.view(-1, _BEFORE)

    def entries(self, start: RowStart) -> Int64Array | None:
        words = [[last, *[_ANY_TOKEN] * (_BEFORE - len(before)), *before] for *before, last in start.sampling.bad_words]
        return np.array(words, dtype=np.int64).T if words else None

    def values(self, table: Tensor) -> Tensor:
        words = table[2:].T
        is_next = ((words == self._last_tokens[table[0]]) | (words == _ANY_TOKEN)).all(dim=1)
        return torch.zeros(len(words), device=table.device).masked_fill(is_next, -torch.inf)

    def sampled(self, rows: SampledRows, tokens: Tensor) -> None:
        self._last_tokens[rows.device] = torch.cat([self._last_tokens[rows.device, 1:], tokens[:, None]], dim=1)


class MinTokens(_SparseProcessor):
    """The least tokens of an answer: while it has fewer, it cannot end. The host knows how many it has without waiting for them.
    Implements `LogitsProcessor`.

    eos_token_ids: banned beside the request's own stop tokens, also where the request does not heed them, as vLLM does.
    """

    numbers = 1

    def __init__(self, rows: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        super().__init__(rows, device)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._missing = np.zeros(rows, dtype=np.int64)

    def entries(self, start: RowStart) -> Int64Array | None:
        self._missing[start.row] = max(0, start.sampling.min_tokens - start.answer_tokens)
        if self._missing[start.row] == 0:
            return None
        return np.array([sorted(self._eos_token_ids.union(start.sampling.stop_token_ids))], dtype=np.int64)

    def values(self, table: Tensor) -> Tensor:
        return torch.full((table.shape[1],), -torch.inf, device=table.device)

    def sampled(self, rows: SampledRows, tokens: Tensor) -> None:
        self._missing[rows.host] -= 1
        for row in rows.host[self._missing[rows.host] == 0].tolist():
            self.drop(row)


_IN_PROMPT = 2**30
"""What a token's number has more if the prompt holds it; the rest is how often the answer does."""
_FEW = 8
"""Tokens are few if they are at most one in so many of the vocabulary."""


class Penalties:
    """Tokens that were there before become less likely, or more. Implements `LogitsProcessor`.

    It keeps what each row's prompt and answer hold, on the device: one number for each token of the vocabulary, and, as long as
    they are few, the tokens themselves. Then only their logits are touched, else all of the row.

    Repetition, as in Hugging Face's transformers (Keskar et al. 2019): the logit of a token that the prompt or the answer holds
    is divided by the penalty if it is positive, else multiplied by it. Then come OpenAI's two, which heed the answer alone:
    frequency times how often the answer holds the token is taken off, and presence once if it holds it at all.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._seen = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self._repetition, self._presence, self._frequency = torch.zeros(3, rows, device=device).unbind()
        self._repeats, self._counts, self.concerns = np.zeros((3, rows), dtype=bool)
        """The rows that have a repetition penalty; those that have one of the others; those that have either."""
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
            self.concerns[row] = self._repeats[row] or self._counts[row]
            if self.concerns[row]:
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


def make_processors(
    max_rows: int, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device, compiled: Compiled | None = None
) -> tuple[LogitsProcessor, ...]:
    """Penalties first, as in vLLM; what bans tokens comes last, so that nothing allows them again. compiled: None when no row
    has a grammar."""
    constraints = () if compiled is None else (GrammarProcessor(compiled, max_rows, vocab_size, tuple(eos_token_ids), device),)
    return (
        Penalties(max_rows, vocab_size, device),
        LogitBias(max_rows, device),
        MinTokens(max_rows, eos_token_ids, device),
        BadWords(max_rows, device),
        *constraints,
    )
