"""The running batch as arrays with one entry per row: what each row has sampled, its limit, and how far its pages reach.

Owns the counters of decoding rows. Knows the rows of plans. Does not know requests, messages, pages or time. A step costs a few
array operations, however large the batch is.
"""

from collections.abc import Sequence

import numpy as np

from common.ids import Int32Array, Int64Array
from common.sampling_params import SamplingParams


class Batch:
    """A row's answer, counted in tokens of this attempt:

    0 ──── sampled ──── planned ──── limit
           returned     in flight    to do

    A step feeds the last sampled token at position prompt + planned - 1, which must be below `room`, the tokens its pages hold.
    """

    def __init__(self, rows: int, eos_token_ids: Sequence[int]) -> None:
        self._eos = np.array(eos_token_ids, dtype=np.int32)
        self._decoding = np.zeros(rows, dtype=bool)
        self.live = np.zeros(rows, dtype=bool)
        """Rows whose request has not ended. What other rows sample is dropped."""
        self._heeds_eos = np.zeros(rows, dtype=bool)
        self.sampled = np.zeros(rows, dtype=np.int32)
        self._planned = np.zeros(rows, dtype=np.int32)
        self._limit = np.zeros(rows, dtype=np.int32)
        self._prompt = np.zeros(rows, dtype=np.int32)
        self._room = np.zeros(rows, dtype=np.int32)
        self._shared = np.zeros(rows, dtype=np.int32)
        self._stop_ids: dict[int, frozenset[int]] = {}
        self._last = np.zeros(rows, dtype=np.int32)
        """The token that each row sampled last."""
        self._is_verified = np.zeros(rows, dtype=bool)
        """Rows whose last step had drafts: the executor does not know how many were right."""

    @property
    def running(self) -> int:
        """Rows whose request has not ended."""
        return int(self.live.sum())

    def pages(self, answer: int, page_size: int, without: Sequence[int] = ()) -> tuple[Int64Array, Int64Array]:
        """For each live row the pages of its own that it holds, and how many more it needs if its answer has so many tokens, as
        far as its limit allows. A row that has sampled more goes on for another page. without: rows to leave out. [rows] int64
        each."""
        rows = np.flatnonzero(self.live)
        if without:
            rows = rows[~np.isin(rows, without)]
        planned, limit, held = self._planned[rows], self._limit[rows], self._room[rows].astype(np.int64) // page_size
        length = np.minimum(limit, np.maximum(answer, planned.astype(np.int64) + page_size))
        fed = self._prompt[rows] + length - 1  # the last token of an answer is never fed back
        return held - self._shared[rows], np.maximum(0, -(-fed // page_size) - held)

    def join(self, row: int, sampling: SamplingParams, prompt: int, room: int, *, sampled: int, shared: int = 0) -> None:
        """A request takes the row; prompt and room in tokens. sampled: 1 when its first token is known, so that it decodes from
        the next plan on; 0 while its KV is on its way or its prompt must be computed here first. shared: how many of its pages
        were in the prefix cache when it got them."""
        self._decoding[row] = sampled > 0
        self.live[row] = True
        self._heeds_eos[row] = not sampling.ignore_eos
        self.sampled[row] = self._planned[row] = sampled
        self._limit[row] = sampling.max_new_tokens
        self._prompt[row], self._room[row], self._shared[row] = prompt, room, shared
        self._is_verified[row] = False
        self._stop_ids.pop(row, None)
        if sampling.stop_token_ids:
            self._stop_ids[row] = frozenset(sampling.stop_token_ids)

    def grew(self, row: int, room: int) -> None:
        self._room[row] = room

    def prompt_planned(self, row: int) -> None:
        """The row's last chunk is in the plan being made: it samples token 0, and the row decodes from the next plan on."""
        self._decoding[row] = True
        self._planned[row] += 1

    def leave(self, row: int) -> None:
        """The row's request has ended: no plan names the row from now on."""
        self._decoding[row] = self.live[row] = False

    @property
    def advancing(self) -> Int32Array:
        """The rows that have another token to compute, some of them when they have another page. [rows] int32."""
        return np.flatnonzero(self._advanceable()[0]).astype(np.int32)

    def short_rows(self) -> Int32Array:
        """The rows that cannot go on without another page. [rows] int32."""
        wants, has_room = self._advanceable()
        return np.flatnonzero(wants & ~has_room).astype(np.int32)

    def next_rows(self) -> Int32Array:
        """The rows that decode in the next plan; they count as planned. Rows without room wait. [rows] int32."""
        wants, has_room = self._advanceable()
        rows = np.flatnonzero(wants & has_room).astype(np.int32)
        self._planned[rows] += 1
        return rows

    def await_tokens(self, rows: Int64Array) -> bool:
        """A step is in flight that samples for one of these rows, which decode."""
        return bool((self._planned[rows] > self.sampled[rows]).any())

    def most_drafts(self, rows: Int32Array, spare: int = 0) -> Int32Array:
        """How many drafts each row may have in the next step that is planned for it. spare: count so many tokens as room that
        its pages do not have. [rows] int32."""
        planned = self._planned[rows]
        fits: Int32Array = np.minimum(self._room[rows] + spare - self._prompt[rows] - planned, self._limit[rows] - planned - 1)
        return fits

    def next_tokens(self, rows: Int32Array) -> Int32Array:
        """Tokens whose KV each row reads in the next step that is planned for it. [rows] int32."""
        return self._prompt[rows] + self._planned[rows]

    def verify(self, rows: Int32Array) -> None:
        """The last step of these rows, which has returned, had drafts."""
        self._is_verified[rows] = True

    def verified(self, rows: Int32Array) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Those of the rows of a plan whose former step had drafts, how many tokens' KV they have, and the token behind those.
        Each is told once."""
        rows = rows[self._is_verified[rows]]
        self._is_verified[rows] = False
        return rows, self._prompt[rows] + self.sampled[rows] - 1, self._last[rows]

    def held_tokens(self, rows: Int32Array) -> int:
        """Tokens whose KV these rows read in the last step that was planned for them."""
        return int((self._prompt[rows] + self._planned[rows] - 1).sum())

    def spare_steps(self, rows: Int32Array, pages: int, page_size: int) -> int:
        """How many steps more may have just these rows and end none of them, if there are so many pages to grow by; 0 where these
        are not all that decode, with two steps in flight for each. rows: as a plan names them."""
        sampled, planned = self.sampled[rows], self._planned[rows]
        wants, _ = self._advanceable()
        if not (self.live[rows] & wants[rows] & (planned == sampled + 2) & (sampled >= 2)).all() or wants.sum() != len(rows):
            return 0
        left, growing = int((self._limit[rows] - planned).min()), (pages - len(rows)) * page_size // len(rows)
        return max(0, min(left, growing))

    def skip(self, rows: Int32Array, steps: int, page_size: int) -> Int64Array:
        """So many steps have each sampled a token for each row, and others are in flight as before. Returns how many pages each
        row has grown by. [rows] int64."""
        self.sampled[rows] += steps
        self._planned[rows] += steps
        lacks = self._prompt[rows].astype(np.int64) + self._planned[rows] - 1 - self._room[rows]
        grown: Int64Array = np.maximum(0, -(-lacks // page_size))
        self._room[rows] += (grown * page_size).astype(np.int32)
        return grown

    def record(self, rows: Int32Array, tokens: Int32Array, *, drafted: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """One sampled token for each of `rows` came back. Returns two masks over them: stopped by a token, and at the limit.
        drafted: it was sampled behind a draft that is right."""
        self.sampled[rows] += 1
        self._planned[rows] += drafted
        self._last[rows] = tokens
        assert (self.sampled[rows] <= self._planned[rows]).all()
        stopped = self._heeds_eos[rows] & (tokens[:, None] == self._eos).any(axis=1)
        if self._stop_ids:
            named = [int(t) in self._stop_ids.get(int(r), ()) for r, t in zip(rows, tokens, strict=True)]
            stopped |= np.array(named, dtype=bool)
        return stopped, self.sampled[rows] >= self._limit[rows]

    def _advanceable(self) -> tuple[np.ndarray, np.ndarray]:
        """Two masks over all rows: has another token to compute, and has room for it in its pages."""
        return self._decoding & (self._planned < self._limit), self._prompt + self._planned - 1 < self._room
