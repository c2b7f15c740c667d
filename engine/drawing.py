"""From the logits of a step to its tokens, and to the log probabilities that are told of them.

Owns which rows ask for more than a draw from the model's own distribution: those that a logits processor concerns, and those
that report log probabilities. A step without such rows pays for one look at an array at most. Knows processors by their port;
does not know how logits are computed.

    logits ─┬─► log probabilities
            └─► processors ─► temperature, filters, draw ─► processors hear the token

Log probabilities of the model's own distribution, from its logits before anything changes them.

Owns their computing on the device, and the packed form in which they come back to the host. Does not know which rows ask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.errors import TandemError
from common.executor import Logprobs, Plan, RowStart
from common.ids import Int32Array, Int64Array
from engine.logits.processors import LogitsProcessor, SampledRows
from engine.rows import HostStep, Staging, StepArrays
from engine.sampler import RowSampling, Sampler, row_parts


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """What a step tells of some tokens. rows, asked: as of `Logprobs`, [tokens] int64 on the host. packed: on the device, from
    `measure_logprobs`."""

    rows: Int64Array
    asked: Int64Array
    packed: Tensor

    def read(self, packed: Int32Array) -> Logprobs:
        """packed: the same, on the host."""
        width = (packed.shape[1] - 3) // 2
        return Logprobs(
            rows=self.rows.astype(np.int32),
            token_ids=packed[:, 0],
            logprobs=packed.view(np.float32)[:, 1],
            ranks=packed[:, 2],
            asked=self.asked.astype(np.int32),
            top_ids=packed[:, 3 : 3 + width],
            top_logprobs=packed.view(np.float32)[:, 3 + width :],
        )


def measure_logprobs(logits: Tensor, token_ids: Tensor, most: int) -> Tensor:
    """Of each row one token's log probability and rank, and the likeliest tokens: in one tensor, so that they come in one copy.

    logits: [tokens, vocab] float32. token_ids: [tokens] int64. Returns [tokens, 3 + 2 * most] int32: the token, the bits of its
    log probability, its rank, the likeliest tokens, and the bits of their log probabilities. A vocabulary of fewer tokens than
    `most` gives fewer columns.
    """
    most = min(most, logits.shape[1])
    return torch.cat([_pack(logits[part], token_ids[part, None], most) for part in row_parts(len(logits))])


def _pack(logits: Tensor, token_ids: Tensor, most: int) -> Tensor:
    rank = (logits >= logits.gather(1, token_ids)).sum(dim=-1, keepdim=True, dtype=torch.int32)
    logprobs = logits.log_softmax(dim=-1)
    best = logprobs.topk(most, dim=-1)
    own_bits, best_bits = (each.view(torch.int32) for each in (logprobs.gather(1, token_ids), best.values))
    return torch.cat([token_ids.int(), own_bits, rank, best.indices.int(), best_bits], dim=1)


class _Asked(NamedTuple):
    """Tokens whose log probabilities are asked for, all [tokens] int64. rows: whose they are. most: how many of the likeliest
    tokens are reported beside each. at: which of the sampled rows they are; of prompts, behind which of the step's tokens they
    come. token_ids: those of prompts; nothing for sampled ones."""

    rows: Int64Array
    most: Int64Array
    at: Int64Array
    token_ids: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class Special:
    """What is special about a step: on the host, and the same on the device. Tensors are [n] int64.

    processed: each processor that concerns some rows, and these. again: the sampled rows that are drawn again behind a graph;
    filtering: those of `again` that filter. sampled, prompt: what is asked for; sampled_at, prompt_at, prompt_tokens: of that.
    """

    processed: Sequence[tuple[LogitsProcessor, SampledRows]]
    again: Tensor
    filtering: Tensor
    sampled: _Asked
    sampled_at: Tensor
    prompt: _Asked
    prompt_at: Tensor
    prompt_tokens: Tensor

    @property
    def failed(self) -> dict[int, TandemError]:
        """Once its tokens are drawn: rows whose answers cannot go on, and why."""
        return {row: error for _, rows in self.processed for row, error in rows.failed.items()}


class Drawing:
    """rows: how many there are. processors: in the order in which they change logits."""

    def __init__(self, sampler: Sampler, processors: Sequence[LogitsProcessor], rows: int, device: torch.device) -> None:
        self.sampler = sampler
        self._processors = processors
        self._is_special, self._is_processed = np.zeros((2, rows), dtype=bool)
        self._has_special = False
        self._most = np.full(rows, _NOTHING, dtype=np.int64)
        """How many of the likeliest tokens a row reports beside its own."""
        self._prompts: dict[int, tuple[Int32Array, int]] = {}
        """Of rows that report on their prompts: the prompt, and how many of the likeliest tokens."""
        self._staging = Staging(device)

    # --- on the host -------------------------------------------------------------------------------------------------------

    def start(self, starts: Sequence[RowStart]) -> None:
        """These rows begin anew. Call it before any work of their step is started."""
        if not starts:
            return
        for start in starts:
            row, sampling = start.row, start.sampling
            self._most[row] = _NOTHING if sampling.logprobs is None else sampling.logprobs
            self._prompts.pop(row, None)
            if sampling.prompt_logprobs is not None and start.last_token is None and start.answer_tokens == 0:
                assert start.token_ids is not None
                self._prompts[row] = start.token_ids, sampling.prompt_logprobs
        rows = np.array([start.row for start in starts], dtype=np.int64)
        self._is_processed[rows] = False
        for processor in self._processors:
            processor.start(starts)
            self._is_processed[rows] |= processor.concerns(rows)
        self._is_special[rows] = self._is_processed[rows] | (self._most[rows] != _NOTHING)
        self._has_special = bool(self._is_special.any())

    def prepare(self, plan: Plan, host: HostStep, behind_graph: bool) -> Special | None:
        """What is special about this step; None: nothing. behind_graph: a graph draws the tokens first."""
        rows = host.arrays.sampled_rows
        has_prompts = bool(self._prompts) and bool(plan.chunks)
        if not has_prompts and not (self._has_special and self._is_special[rows].any()):
            return None
        prompt = self._asked_of_prompts(plan) if has_prompts else _ASKED_NOTHING
        asking = np.flatnonzero(self._most[rows] != _NOTHING)
        sampled = _Asked(rows[asking], self._most[rows[asking]], asking, _NONE)
        concerned = [(each, each.concerns(rows)) for each in self._processors] if self._is_processed[rows].any() else []
        again, filtering, drawn = _NONE, _NONE, rows
        if behind_graph and concerned:
            filters = np.zeros(len(rows), dtype=bool)
            filters[host.arrays.noisy[host.arrays.filtering]] = True
            again = np.flatnonzero(np.any([filters, *(which for _, which in concerned)], axis=0))
            filtering, drawn = np.flatnonzero(filters[again]), rows[again]
            concerned = [(each, which[again]) for each, which in concerned]
        processors = [(each, np.flatnonzero(which)) for each, which in concerned if which.any()]
        places = [(drawn[at], at) for _, at in processors]
        sent = self._staging.send(
            [again, filtering, sampled.at, prompt.at, prompt.token_ids, *(array for pair in places for array in pair)]
        )
        on_device = zip(sent[5::2], sent[6::2], strict=True)
        processed = [
            (each, SampledRows(host_rows, device_rows, host_at, at))
            for (each, _), (host_rows, host_at), (device_rows, at) in zip(processors, places, on_device, strict=True)
        ]
        return Special(processed, sent[0], sent[1], sampled, sent[2], prompt, sent[3], sent[4])

    def _asked_of_prompts(self, plan: Plan) -> _Asked:
        """Of each token of the chunks the one behind it, as far as that is of the prompt."""
        parts, begin = list[_Asked](), 0
        for chunk in plan.chunks:
            if chunk.row in self._prompts:
                token_ids, most = self._prompts[chunk.row]
                behind = token_ids[chunk.start + 1 : chunk.start + 1 + len(chunk.token_ids)].astype(np.int64)
                rows = np.full(len(behind), chunk.row)
                parts.append(_Asked(rows, np.full(len(behind), most), begin + np.arange(len(behind)), behind))
                if chunk.last:
                    del self._prompts[chunk.row]
            begin += len(chunk.token_ids)
        return _Asked(*map(np.concatenate, zip(*parts, strict=True))) if parts else _ASKED_NOTHING

    # --- on the device -----------------------------------------------------------------------------------------------------

    def draw(
        self,
        logits: Tensor,
        rows: RowSampling | None,
        step: StepArrays[Tensor],
        width: int,
        special: Special | None,
        likeliest: Tensor | None = None,
    ) -> Tensor:
        """The tokens of the sampled rows, [rows] int64. logits: [rows, vocab] float32; they stay the model's own if log
        probabilities are asked for. rows: of those that are not greedy; None: all are. width: see `HostStep.filter_width`.
        likeliest: the likeliest token of each row, [rows] int64, if it is known."""
        if special is not None and special.processed:
            logits = _process(logits.clone() if len(special.sampled_at) else logits.contiguous(), special)
            likeliest = None
        tokens = self.sampler(logits, rows, step.noisy, step.filtering, width, likeliest)
        if special is not None:
            _tell_processors(tokens, special)
        return tokens

    def redraw(
        self,
        tokens: Tensor,
        logits: Tensor,
        rows: RowSampling,
        step: StepArrays[Tensor],
        width: int,
        special: Special | None,
    ) -> bool:
        """As `draw`, for rows that a graph has drawn without filters and processors: replace in `tokens` those that this makes
        others. Returns whether there were any such rows."""
        if special is not None and special.processed:
            at, filtering = special.again, special.filtering
            some = _process(logits[at], special)
            drawn = self.sampler.draw_filtered(some, rows.of(at), filtering, width)
            tokens[at] = drawn
            _tell_processors(drawn, special)
            return True
        if len(step.filtering):
            self.sampler.redraw(tokens, logits, rows, step.noisy[step.filtering], width)
        return len(step.filtering) > 0

    def told(self, logits: Tensor, tokens: Tensor, special: Special | None) -> Told | None:
        """Of the sampled tokens. logits: [rows, vocab] float32, the model's own. tokens: [rows] int64."""
        if special is None or not len(special.sampled_at):
            return None
        asked, at = special.sampled, special.sampled_at
        if len(at) < len(tokens):
            logits, tokens = logits[at], tokens[at]
        return Told(asked.rows, asked.most, measure_logprobs(logits, tokens, int(asked.most.max())))

    def told_of_prompts(self, hidden: Tensor, logits: Callable[[Tensor], Tensor], special: Special | None) -> Told | None:
        """Of the prompts' tokens. hidden: of the step's tokens. logits: the model's, of some hidden; asked for some at a time."""
        if special is None or not len(special.prompt_at):
            return None
        asked, most = special.prompt, int(special.prompt.most.max())
        at, token_ids = special.prompt_at, special.prompt_tokens
        packed = [measure_logprobs(logits(hidden[at[part]]), token_ids[part], most) for part in row_parts(len(at))]
        return Told(asked.rows, asked.most, torch.cat(packed))


def _process(logits: Tensor, special: Special) -> Tensor:
    """In place."""
    for processor, rows in special.processed:
        processor.apply(logits, rows)
    return logits


def _tell_processors(tokens: Tensor, special: Special) -> None:
    for processor, rows in special.processed:
        processor.sampled(rows, tokens[rows.at])


_NOTHING = -1
_NONE = np.empty(0, dtype=np.int64)
_ASKED_NOTHING = _Asked(_NONE, _NONE, _NONE, _NONE)
