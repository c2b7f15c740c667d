"""Speculative decoding (Leviathan et al. 2023): what may follow the answers of rows, and how much of it pays to be verified.

Owns two drafters and the depth. One proposes what followed the last tokens of a row when they were last there, in its prompt or
its answer (prompt lookup decoding, Saxena 2023). The other leaves that to the executor's draft model, and keeps count of the
tokens whose KV this has. Knows rows and tokens as arrays; does not know requests or pages. What noise a token has depends only on
its seed and position, so a drafted token that is right is the token that would have been sampled: no answer depends on what is
here.

    tokens of the step ─► were the drafts of these rows right? ─► how often of late ─┐
                     └──► what followed these last tokens before? ───────────────────┴─► drafts, as long as they pay
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from common.drafting import HEAD_TAIL, HEAD_WINDOW, MOST_DRAFTS, Drafting
from common.executor import NOT_DRAFTED, Chunk, StepPlan
from common.ids import Int32Array, Int64Array
from common.step_cost import StepCost

BUCKETS = 32_768
"""Most places of a row's table: an n-gram whose place another one has taken is not found."""
INDEXED = 16_384
"""Most tokens of a prompt that are looked at, the last ones: more would take the scheduler more than a millisecond."""
LATELY = 8
"""About so many predictions of a row count."""
FIRST_SHARE = 0.5
"""How often the predictions of a new row are taken to be right; those of a draft model, until some are known."""
TURN_S = 0.0005
"""What a step costs more that is planned when the one before it has returned, about."""
FIRST_PAUSE, PAUSE, LONGEST_PAUSE, EXPLORED_DRAFTS = 8, 64, 1024, 4
"""After so many steps without any, one row has so many drafts, whether they pay or not: only steps of different sizes tell what
rows cost, and a draft model's what it costs. If they still do not pay, the next pause is twice as long; PAUSE, when they did."""
RESTS = 4
"""Where no drafts pay, that is not worked out again the next few times: it costs a scheduler 0.1 ms."""
CAUGHT_UP_FOR = 32
"""What a draft model lacks of a row is computed for about so many of its steps."""
_PRIME = np.int64(0x9E3779B1)


class Drafts(NamedTuple):
    """Those of a step."""

    rows: Int32Array
    """[drafts] int32, as are the tokens: see `StepPlan`."""
    tokens: Int32Array
    held_tokens: int
    """Tokens whose KV they read."""
    chunks: tuple[Chunk, ...] = ()
    """`StepPlan.draft_chunks`."""


NO_DRAFTS = Drafts(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32), 0)


class Drafter(Protocol):
    """Who proposes tokens. rows: [rows] int64, each named once."""

    shares: NDArray[np.float64]
    """[rows of the batch]: how often of late what was proposed first for a row was right, whether it was drafted or not."""

    def begin(self, row: int, tokens: Int32Array) -> None:
        """A request with these tokens takes the row: its prompt, and what is known of its answer."""

    def add(self, rows: Int64Array, tokens: Int32Array, drafted: bool = False) -> None:
        """One more token for each of these rows. drafted: it was sampled behind a draft that is right."""

    def judge(self, rows: Int64Array, drafted: Int64Array, right: Int64Array) -> None:
        """How many drafts these rows had in a step, and how many of them were right; both [rows], drafted at least 1."""

    def knows(self, rows: Int64Array) -> NDArray[np.bool_]:
        """Which of these rows it has something to propose for."""

    def lacking(self, rows: Int64Array) -> Int64Array:
        """How many tokens of each row must be computed before a draft model can propose something. [rows]."""

    def draft(self, rows: Int64Array, depths: Int64Array) -> tuple[Int64Array, Int32Array, tuple[Chunk, ...]]:
        """Returns how many each row has, as many as asked for or none; the tokens, row by row; and `StepPlan.draft_chunks`."""


class NgramDrafter:
    """The tokens of each row, and where each n-gram was last. All methods are array operations over rows.

    rows: of the batch. context_tokens: most that a row holds. sizes: how long an n-gram is, the longest first; the first that
    was there before counts. Takes 4 bytes for each token of each row, and as many for each place of a table.
    """

    def __init__(self, rows: int, context_tokens: int, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self.shares = np.zeros(rows)
        self._tokens = np.zeros((rows, context_tokens), dtype=np.int32)  # the system gives memory when it is written
        self._length, self._followed = np.zeros((2, rows), dtype=np.int64)
        """_followed: the place of what followed a row's last tokens before; 0: they were not there."""
        buckets = min(BUCKETS, 1 << (context_tokens - 1).bit_length())
        self._places = [np.zeros((rows, buckets), dtype=np.int32) for _ in sizes]
        """Behind which token each n-gram was last. What is left of former requests is told by comparing the tokens."""

    def begin(self, row: int, tokens: Int32Array) -> None:
        self._tokens[row, : len(tokens)] = tokens
        self._length[row] = len(tokens) - 1
        for size, places in zip(self._sizes, self._places, strict=True):
            first = max(size, len(tokens) - INDEXED)
            ends = np.arange(first, len(tokens))
            of_ends = tokens[first - size : -1]
            windows = np.lib.stride_tricks.sliding_window_view(of_ends, size) if len(ends) else np.empty((0, size))
            places[row, self._hash(windows.astype(np.int64))] = ends  # of equal ones the last counts
        self.add(np.array([row]), tokens[-1:])
        self.shares[row] = FIRST_SHARE

    def add(self, rows: Int64Array, tokens: Int32Array, drafted: bool = False) -> None:
        knows = self.knows(rows)
        known, foreseen = rows[knows], self.propose(rows[knows], 1)[:, 0] == tokens[knows]
        self.shares[known] += (foreseen - self.shares[known]) / LATELY
        at = self._length[rows]
        self._tokens[rows, at] = tokens
        self._length[rows] = length = at + 1
        found = np.zeros(len(rows), dtype=np.int64)
        for size, places in zip(self._sizes, self._places, strict=True):
            back = np.arange(-size, 0)
            last = self._tokens[rows[:, None], np.maximum(0, length[:, None] + back)].astype(np.int64)
            buckets = self._hash(last)
            place = places[rows, buckets].astype(np.int64)
            is_there = (size <= place) & (place < length) & (found == 0)
            before = self._tokens[rows[:, None], np.maximum(0, place[:, None] + back)]
            found = np.where(is_there & (before == last).all(axis=1), place, found)
            is_whole = length >= size
            places[rows[is_whole], buckets[is_whole]] = length[is_whole]
        self._followed[rows] = found

    def judge(self, rows: Int64Array, drafted: Int64Array, right: Int64Array) -> None:
        pass  # `add` has seen what it proposed

    def lacking(self, rows: Int64Array) -> Int64Array:
        return np.zeros_like(rows)

    def knows(self, rows: Int64Array) -> NDArray[np.bool_]:
        return self._followed[rows] > 0

    def draft(self, rows: Int64Array, depths: Int64Array) -> tuple[Int64Array, Int32Array, tuple[Chunk, ...]]:
        proposed = self.propose(rows, int(depths.max()))
        return depths, proposed[np.arange(proposed.shape[1]) < depths[:, None]], ()

    def propose(self, rows: Int64Array, most: int) -> Int32Array:
        """[rows, most] int32: what may follow. Where it reaches the end of the row, the row is taken to repeat itself."""
        followed, length = self._followed[rows, None], self._length[rows, None]
        proposed: Int32Array = self._tokens[rows[:, None], followed + np.arange(most) % np.maximum(1, length - followed)]
        return proposed

    def _hash(self, windows: Int64Array) -> Int64Array:
        """windows: [n, size]. Returns the place of each in a table, [n]."""
        mixed = np.zeros(len(windows), dtype=np.int64)
        for column in windows.T:
            mixed = (mixed ^ column) * _PRIME
            mixed ^= mixed >> 29
        return mixed & (self._places[0].shape[1] - 1)


class ModelDrafter:
    """The tokens of each row, and how many of them the draft model has the KV of. What it lacks comes with the step that drafts.

    rows: of the batch. context_tokens: most that a row holds. chunk_tokens: most that the draft model computes before a step to
    catch up, over all rows. is_head: it is a draft head. It begins near the end of a row; and what it has computed of drafts
    counts for nothing, because only now it can be told what the served model computes of them. See `engine.draft_models`.
    """

    def __init__(self, rows: int, context_tokens: int, chunk_tokens: int, *, is_head: bool = False) -> None:
        self._is_head = is_head
        self._chunk_tokens = max(chunk_tokens, HEAD_TAIL + 1) if is_head else chunk_tokens
        self._begun = np.zeros(rows, dtype=np.int64)
        """Where a head began each row."""
        self.shares, self._overall = np.zeros(rows), FIRST_SHARE
        self._tokens = np.zeros((rows, context_tokens), dtype=np.int32)
        self._length, self._computed = np.zeros((2, rows), dtype=np.int64)

    def begin(self, row: int, tokens: Int32Array) -> None:
        self._tokens[row, : len(tokens)] = tokens
        self._length[row], self._computed[row], self.shares[row] = len(tokens), 0, self._overall
        self._begun[row] = 0

    def add(self, rows: Int64Array, tokens: Int32Array, drafted: bool = False) -> None:
        self._tokens[rows, self._length[rows]] = tokens
        self._length[rows] += 1
        if not self._is_head:
            self._computed[rows] += drafted

    def judge(self, rows: Int64Array, drafted: Int64Array, right: Int64Array) -> None:
        seen = np.minimum(drafted, right + 1)
        kept = (1 - 1 / LATELY) ** seen
        self.shares[rows] = self.shares[rows] * kept + right / seen * (1 - kept)
        self._overall += (float(self.shares[rows].mean()) - self._overall) / LATELY

    def knows(self, rows: Int64Array) -> NDArray[np.bool_]:
        return np.ones(len(rows), dtype=bool)

    def lacking(self, rows: Int64Array) -> Int64Array:
        lacking = self._length[rows] - self._starts(rows)
        return lacking if self._is_head else np.where(lacking > 1, lacking, 0)

    def draft(self, rows: Int64Array, depths: Int64Array) -> tuple[Int64Array, Int32Array, tuple[Chunk, ...]]:
        """A row whose KV the draft model cannot complete before the step has no drafts yet."""
        starts, lengths = self._starts(rows), self._length[rows]
        lacking = self.lacking(rows)
        left = np.clip(self._chunk_tokens - (np.cumsum(lacking) - lacking), 0, lacking)
        if self._is_head:  # it reads a row's beginning whole or not yet; rows that go on do not count
            begins = np.where(lacking > MOST_DRAFTS + 1, lacking, 0)
            left = np.where((begins == 0) | (np.cumsum(begins) <= self._chunk_tokens), lacking, 0)
            self._begun[rows] = np.where(left > HEAD_TAIL, starts, self._begun[rows])
        chunks = tuple(
            Chunk(row, start, self._tokens[row, start : start + tokens], last=start + tokens == length)
            for row, start, tokens, length in zip(rows.tolist(), starts.tolist(), left.tolist(), lengths.tolist(), strict=True)
            if tokens
        )
        is_whole = left == lacking
        if self._is_head:
            self._computed[rows] = np.where(is_whole, lengths - 1, self._computed[rows])
        else:
            self._computed[rows] = np.where(is_whole, lengths, starts + left)
        depths = np.where(is_whole, depths, 0)
        return depths, np.full(int(depths.sum()), NOT_DRAFTED, dtype=np.int32), chunks

    def _starts(self, rows: Int64Array) -> Int64Array:
        """From which token on something is to be computed. [rows]. A head begins anew where it lacks or has too much."""
        computed, last = self._computed[rows], self._length[rows] - 1
        if not self._is_head:
            return computed
        begins_anew = (last - computed >= HEAD_TAIL) | (last - self._begun[rows] >= HEAD_WINDOW - MOST_DRAFTS)
        starts: Int64Array = np.where(begins_anew, np.maximum(0, last - HEAD_TAIL), computed)
        return starts


def worth(
    shares: NDArray[np.float64],
    most: Int64Array,
    cost: StepCost,
    held: NDArray[np.float64],
    room: int,
    drafting_s: float = 0.0,
    entry_s: NDArray[np.float64] | float = 0.0,
) -> Int64Array:
    """How many drafts of each row pay: those with which the whole step gives most tokens a second. [rows] int64.

    shares: [rows] how likely a draft is right behind one that is right. most: [rows] int64, no more than so many each. held:
    [rows] tokens that each row's step reads. room: most drafts in all. drafting_s: what each step of a draft model takes, of
    which there is one more than the deepest row has drafts. entry_s: [rows] what a row costs more that has any.
    """
    depth = int(most.max(initial=0))
    offsets = np.arange(1, depth + 1)
    likely = np.where(offsets <= most[:, None], shares[:, None] ** offsets, 0.0)
    seconds = np.broadcast_to((cost.decode_row_s + cost.held_token_s * held)[:, None], likely.shape) + 1e-9
    seconds[:, :1] += np.broadcast_to(entry_s, len(shares))[:, None]
    yields = np.minimum.accumulate(likely / seconds, axis=1)
    order = np.argsort(-yields, axis=None, kind="stable")[: max(0, room)]
    step_s, rows = cost.seconds(0, len(shares), float(held.sum())), len(shares)
    deepest = np.maximum.accumulate(order % max(1, depth)) + 1
    drafted_s = TURN_S + drafting_s * (deepest + 1) + np.cumsum(seconds.ravel()[order])
    speed = (rows + np.cumsum(likely.ravel()[order])) / (step_s + drafted_s)
    best = int(np.argmax(speed)) if len(order) else -1
    if best < 0 or speed[best] <= rows / step_s:
        return np.zeros(rows, dtype=np.int64)
    taken = order[: best + 1]
    return np.bincount(taken[likely.ravel()[taken] > 0] // depth, minlength=rows)


class Speculation:
    """What to draft in the next step. rows, context_tokens: of the batch. chunk_tokens: see `ModelDrafter`."""

    def __init__(self, drafting: Drafting, rows: int, context_tokens: int, chunk_tokens: int) -> None:
        self._drafting, self._rows = drafting, rows
        self.drafter: Drafter
        if drafting.model:
            self.drafter = ModelDrafter(rows, context_tokens, chunk_tokens, is_head=drafting.is_head)
        else:
            self.drafter = NgramDrafter(rows, context_tokens, tuple({drafting.longest: 0, drafting.shortest: 0}))
        self._drafting_s, self._lacking_token_s = 0.0, 0.0
        """What a step of the draft model took of late, and each token that it lacked."""
        self._unexplored, self._pause = 0, FIRST_PAUSE
        """How often depths were asked for since the last drafts, and how often at most."""
        self._rests = 0
        """How often no answer is worked out from now on."""

    def begin(self, row: int, tokens: Int32Array) -> None:
        """As in `Drafter`, and `add` as well."""
        self.drafter.begin(row, tokens)

    def add(self, rows: Int32Array, tokens: Int32Array, drafted: bool = False) -> None:
        self.drafter.add(rows.astype(np.int64), tokens, drafted)

    def verified(self, plan: StepPlan, right: Int32Array, drafting_s: tuple[float, float]) -> None:
        """A step with drafts is back. right: see `count_right`. drafting_s: see `StepResult`."""
        drafted = np.bincount(plan.draft_places, minlength=len(right))
        which = np.flatnonzero(drafted)
        self.drafter.judge(plan.decode_rows[which].astype(np.int64), drafted[which], right[which].astype(np.int64))
        step_s = drafting_s[1] / int(drafted.max())
        self._drafting_s = _lately(self._drafting_s, step_s)
        lacked = sum(len(chunk.token_ids) for chunk in plan.draft_chunks)
        if self._drafting.is_head:  # its own steps are counted apart; of most it lacks nothing
            lacked, step_s = lacked if drafting_s[0] > 0 else 0, 0.0
        if lacked:
            self._lacking_token_s = _lately(self._lacking_token_s, max(0.0, drafting_s[0] - step_s) / lacked)

    def depths(self, rows: Int32Array, most: Int32Array, cost: StepCost, held: Int32Array) -> Int64Array:
        """How many drafts each of these rows should have in the next step, [rows] int64. most, held: see `worth`."""
        self._unexplored += 1
        self._rests -= 1
        room, explores = self._rows - len(rows), self._unexplored >= self._pause
        if room <= 0 or (self._rests > 0 and not explores):
            return np.zeros(len(rows), dtype=np.int64)
        of_rows = rows.astype(np.int64)
        bound: Int64Array = np.where(self.drafter.knows(of_rows), np.clip(most.astype(np.int64), 0, self._drafting.most), 0)
        if not bound.any():
            return bound
        shares, lacking = self.drafter.shares[rows], self.drafter.lacking(of_rows)
        if explores:
            likeliest = np.argmax(np.where(bound > 0, (1 + shares) / (1 + lacking), 0.0))
            return np.where(np.arange(len(rows)) == likeliest, np.minimum(bound, min(room, EXPLORED_DRAFTS)), 0)
        if cost.step_s + cost.decode_row_s <= 0:
            return np.zeros_like(bound)
        drafting_s, token_s = self._drafting_s, self._lacking_token_s
        if self._drafting.model and not drafting_s:  # as much as the served model, until it has shown what it takes
            drafting_s, token_s = cost.step_s + cost.decode_row_s, cost.chunk_token_s
        entry_s = lacking.astype(np.float64) * (token_s / CAUGHT_UP_FOR)
        depths = worth(shares, bound, cost, held.astype(np.float64), room, drafting_s, entry_s)
        if depths.any():
            self._pause = PAUSE
        else:
            self._rests = RESTS
        return depths

    def draft(self, rows: Int32Array, depths: Int64Array, held: Int32Array) -> Drafts:
        """depths: [rows] int64, how many of each. held: [rows], tokens that each row's own token reads."""
        which = np.flatnonzero(depths)
        if not len(which):
            return NO_DRAFTS
        if self._unexplored >= self._pause:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._unexplored = 0
        rows, held = rows[which], held[which]
        depths, tokens, chunks = self.drafter.draft(rows.astype(np.int64), depths[which])
        held_tokens = int((held * depths + depths * (depths + 1) // 2).sum())
        return Drafts(np.repeat(rows, depths), tokens, held_tokens, chunks)


def _lately(known: float, now: float) -> float:
    """A mean in which the last LATELY values count; the first one counts alone."""
    return known + (now - known) / LATELY if known else now
