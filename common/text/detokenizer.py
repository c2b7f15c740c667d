"""The detokenizer's core: token deltas in, text deltas out, each answer in order, exactly once and with exactly one ending.

Owns the open answers: the order of their tokens, their stop strings, what waits, and how large a batch of text may be. Opens no
socket and reads no clock: the time is an argument. Does not know who sent a delta. The first token comes from a prefill instance,
later ones from a decode instance and `ExpectAnswer` from the router, each over its own socket, so any of them may overtake any
other.

    early tokens ─► wait ─ExpectAnswer─► open ─its ending went out │ ForgetAnswer─► forgotten; the key is remembered for a while
      deadline: dropped                  deadline while tokens are missing, end of its life: Failed
                                         ExpectAnswer again: the text after the router's last token goes out once more

Tokens are numbered from 0, so each is taken once and in order, even if it arrives twice, late or early:

    taken │ next … gap … │ waiting │ … │ the ending's place

Log probabilities travel beside their tokens: a delta of text has those of its tokens, no others. An answer keeps all its tokens,
in case the text of some is lost on its way and must be made again.

What an answer holds back (half a character, the beginning of a stop string) goes out with its ending. It does not go out with a
failure after which the request is resumed: then the next attempt's answer begins with it.

An answer ends as soon as its text contains a stop string. When two are complete at that moment, the longer one counts. So it
makes no difference how the text was cut into pieces.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

import msgspec
from msgspec.structs import replace
from tokenizers import Tokenizer

from common.deadlines import DeadlineWheel
from common.errors import DeadlinePassed, InstanceFailed, Overloaded, TandemError
from common.ids import AttemptId, unpack_ids
from common.messages import (
    AnswerMessage,
    AnswerParts,
    Ending,
    ExpectAnswer,
    Failed,
    Finished,
    ForgetAnswer,
    Probed,
    Standing,
    TextBatch,
    TextDelta,
    TokenBatch,
    TokenDelta,
    TokenLogprob,
    pack_logprobs,
    unpack_logprobs,
)
from common.text.stops import AnswerReader, NewReader, PartStops, StopStrings
from common.text.token_text import IncrementalDecoder, Vocabulary


class TokenOrder:
    """The tokens of one answer, by their numbers. Knows neither text nor keys.

    first: the number of the first token that is expected. has_logprobs: each token comes with its log probability, which goes
    where the token goes.
    """

    def __init__(self, first: int = 0, has_logprobs: bool = False) -> None:
        self._first = first
        self._tokens = array("i")
        """Those that are in order, from the first on."""
        self._taken = 0
        """How many of them were taken."""
        self.next = first
        """Number of the next token."""
        self._waiting: dict[int, tuple[Sequence[int], Sequence[TokenLogprob]]] = {}
        """Tokens that came before their turn, by the number of the first."""
        self.waiting_tokens = 0
        self.announced_ending: Ending | None = None
        """The ending, even while tokens before it are missing."""
        self._ends_at = 2**63
        self.has_logprobs = has_logprobs
        self._taken_logprobs: list[bytes] = []
        """The log probabilities of all tokens that were taken, packed."""
        self._ready_logprobs: list[TokenLogprob] = []
        self.prompt_logprobs = b""
        """The prompt's log probabilities, packed. They come with token 0 and go with it."""
        self.cached_tokens = 0
        """How many tokens of the prompt were cached. The number comes with token 0 and goes with it."""
        self.drafts = 0, 0
        """As in TokenDelta: what has come and was not taken."""

    def put(self, first: int, token_ids: Sequence[int], ending: Ending | None, logprobs: Sequence[TokenLogprob] = ()) -> int:
        """Take in tokens; `first` is the number of the first of them. The first ending that comes counts. logprobs: one for each
        token, if this answer has them.

        Returns how many tokens are of no use: they came before, or they lie after the ending.
        """
        end = first + len(token_ids)
        if ending is not None and self.announced_ending is None:
            self.announced_ending, self._ends_at = ending, end
        if first > self.next and token_ids:
            return self._let_wait(first, token_ids, logprobs)
        dropped = 0
        while True:
            fresh = slice(max(0, self.next - first), max(0, self._ends_at - first))
            ready = token_ids[fresh]
            dropped += len(token_ids) - len(ready)
            self._tokens.extend(ready)
            self.next += len(ready)
            if self.has_logprobs:
                assert len(logprobs) == len(token_ids), "each token has its log probability"
                self._ready_logprobs += logprobs[fresh]
            first = min(self._waiting, default=self.next + 1)
            if first > self.next:
                return dropped
            token_ids, logprobs = self._waiting.pop(first)
            self.waiting_tokens -= len(token_ids)

    def take(self) -> tuple[list[int], list[TokenLogprob]]:
        """Returns the tokens that are in order and were not taken before, and their log probabilities if it has them."""
        ready = self._tokens[self._taken :].tolist()
        self._taken += len(ready)
        logprobs = self._ready_logprobs
        if logprobs:
            self._taken_logprobs.append(pack_logprobs(logprobs))
            self._ready_logprobs = []
        return ready, logprobs

    def pour_into(self, other: "TokenOrder") -> None:
        """Give everything that has arrived to another order of the same answer, which may begin elsewhere."""
        if other.has_logprobs and not self.has_logprobs:
            return  # what is here lacks them
        logprobs = [*unpack_logprobs(self._taken_logprobs), *self._ready_logprobs]
        other.put(self._first, self._tokens.tolist(), None, logprobs)
        for first, (token_ids, waiting) in self._waiting.items():
            other.put(first, token_ids, None, waiting)
        if self.announced_ending is not None:
            other.put(self._ends_at, (), self.announced_ending)
        other.prompt_logprobs = self.prompt_logprobs
        other.cached_tokens, other.drafts = self.cached_tokens, self.drafts

    @property
    def ending(self) -> Ending | None:
        """The ending, once every token before it is there."""
        return self.announced_ending if self._ends_at <= self.next else None

    @property
    def has_gap(self) -> bool:
        """Whether something arrived that must wait for tokens before it."""
        return bool(self._waiting) or (self.announced_ending is not None and self.ending is None)

    def _let_wait(self, first: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> int:
        """Keep the longer of what came now and what waits there. Returns how many tokens the shorter one has."""
        known = self._waiting.get(first, ((), ()))
        new = (token_ids, logprobs)
        kept, dropped = (new, known) if len(token_ids) > len(known[0]) else (known, new)
        self._waiting[first] = kept
        self.waiting_tokens += len(kept[0]) - len(known[0])
        return len(dropped[0])


BATCH_BYTES = 4 * 2**20
"""No batch is larger, so none comes near the limit of a frame; only a single delta may be."""
BATCH_DELTAS = 512
"""The router takes in a whole batch before it looks at anything else."""

_encode = msgspec.msgpack.Encoder().encode


def cut(deltas: Iterable[TextDelta]) -> Iterator[TextBatch]:
    """All of them, in order."""
    batch: list[TextDelta] = []
    batch_bytes = 0
    for delta in deltas:
        delta_bytes = len(_encode(delta))
        if batch and (batch_bytes + delta_bytes > BATCH_BYTES or len(batch) == BATCH_DELTAS):
            yield TextBatch(deltas=tuple(batch))
            batch, batch_bytes = [], 0
        batch.append(delta)
        batch_bytes += delta_bytes
    if batch:
        yield TextBatch(deltas=tuple(batch))


@dataclass(frozen=True, kw_only=True)
class DetokenizerLimits:
    """How much a detokenizer keeps."""

    open_answers: int = 65_536
    """Most at once; more are refused."""
    early_answers: int = 4_096
    """Most answers whose ExpectAnswer has not come."""
    waiting_tokens: int = 16_384
    """Most waiting tokens of one answer."""
    remembered: int = 16_384
    """Keys of answers that are over."""
    patience_s: float = 10.0
    """How long tokens wait for their ExpectAnswer, or for tokens before them."""


class _OpenText:
    """One open answer. Raises ValueError when the ExpectAnswer contradicts itself."""

    def __init__(self, vocabulary: Vocabulary, new_reader: NewReader, opened: ExpectAnswer, dies_s: float) -> None:
        context = [int(id) for id in unpack_ids(opened.context)]
        if not 0 <= opened.first <= len(context):
            raise ValueError(f"the context holds {len(context)} tokens, fewer than the {opened.first} of the answer so far")
        begin = len(context) - opened.first
        self.order = TokenOrder(opened.first, opened.logprobs)
        self._decoder = IncrementalDecoder(vocabulary, context[:begin], opened.skip_special_tokens, opened.shown)
        self._parts = None if opened.parts is None else PartStops(opened, new_reader(opened.parts), vocabulary.text)
        self._stops = self._parts or StopStrings(opened.stop, opened.include_stop)
        self._include_stop = opened.include_stop
        self._min_tokens = opened.min_tokens
        _, text = self._render(0, context[begin:])
        if not text.startswith(opened.text):
            raise ValueError("the text that was delivered differs from the text of the answer's tokens so far")
        self._ahead = text[len(opened.text) :]
        """Text of the answer's tokens so far that was not delivered: a former attempt held it back."""
        self.dies_s = dies_s
        """When the answer is forgotten."""
        self.waits = False
        """Whether its deadline is for missing tokens, and not the end of its life."""

    def advance(self, key: AttemptId, broken_off: Ending | None) -> TextDelta | None:
        """Render the tokens whose turn has come; None when nothing is new.

        The delta carries the ending if that has come, or `broken_off` if the answer ends although tokens are missing.
        """
        order = self.order
        token_ids, logprobs = order.take()
        first = order.next - len(token_ids)
        ending = order.ending or broken_off
        if not token_ids and ending is None and self._stops.matched is None:
            return None
        # The token that ended the answer is counted, but has no text, unless the client wants that.
        is_last_silent = (
            isinstance(ending, Finished)
            and ending.reason == "stop"
            and not self._include_stop
            and token_ids[-1:] == [ending.matched]
        )
        used, text = self._render(first, token_ids[:-1] if is_last_silent else token_ids)
        is_last_word = ending is not None and not (isinstance(ending, Failed) and ending.retryable)
        if self._stops.matched is None and is_last_word:
            text += self._stops.push(self._decoder.flush(), order.next > self._min_tokens)
            if self._stops.matched is None:
                text += self._stops.flush()
        if self._stops.matched is not None:
            token_ids = token_ids[:used]
            ending = Finished("stop", self._stops.matched)
        text, self._ahead = self._ahead + text, ""
        told = tuple(logprobs[: len(token_ids)])
        thoughts = 0 if self._parts is None else min(self._parts.thought_tokens, order.next)
        delta = TextDelta(key, first, tuple(token_ids), text, ending, told, drafts=order.drafts, thought_tokens=thoughts)
        order.drafts = 0, 0
        if first or not token_ids:
            return delta
        prompt_logprobs = unpack_logprobs([order.prompt_logprobs]) if order.prompt_logprobs else ()
        return replace(delta, prompt_logprobs=prompt_logprobs, cached_tokens=order.cached_tokens)

    def _render(self, first: int, token_ids: list[int]) -> tuple[int, str]:
        """Returns how many tokens were used, up to the one that completes a stop string, and their text. first: the number of the
        first of them."""
        text, stops, parts, step = "", self._stops, self._parts, self._decoder.step
        ignored = self._min_tokens - first
        for used, token_id in enumerate(token_ids):
            if stops.matched is not None:
                return used, text
            if parts is not None and used >= ignored and parts.ends_at(token_id):
                text += parts.push(self._decoder.flush(), ends=False)
                text += parts.cut(token_id, step(token_id) + self._decoder.flush())
            else:
                text += stops.push(step(token_id), used >= ignored)
        return len(token_ids), text


class Detokenizer:
    """The open answers of one detokenizer. `dropped` counts, by reason, what was of no use. new_reader: makes readers of answers
    whose parts are told apart; None: there are no such answers."""

    def __init__(
        self, tokenizer: Tokenizer, limits: DetokenizerLimits | None = None, new_reader: NewReader | None = None
    ) -> None:
        self._vocabulary = Vocabulary(tokenizer)
        self._new_reader = new_reader or _no_reader
        self._limits = limits or DetokenizerLimits()
        self._open: dict[AttemptId, _OpenText] = {}
        self._early: dict[AttemptId, list[TokenDelta]] = {}
        self._over: dict[AttemptId, bool] = {}
        """Whether each may be opened again: its ending went out, but may have been lost. Nobody wants one that was forgotten."""
        self._deadlines: DeadlineWheel[AttemptId] = DeadlineWheel()
        self.dropped: Counter[str] = Counter()
        self._probed: list[Probed] = []

    @property
    def open_answers(self) -> int:
        return len(self._open)

    @property
    def early_answers(self) -> int:
        """Answers whose tokens came before their ExpectAnswer."""
        return len(self._early)

    def next_deadline(self) -> float | None:
        return self._deadlines.next_deadline()

    def receive(self, message: AnswerMessage, now: float) -> list[TextDelta]:
        """Take in a message. Returns at most one delta per key."""
        match message:
            case TokenBatch():
                taken: dict[AttemptId, list[TokenDelta]] = {}
                for delta in message.deltas:
                    if delta.key in self._over:
                        self.dropped["after the end"] += 1
                    elif delta.first < 0:
                        self.dropped["malformed"] += 1
                    elif delta.key in self._open:
                        taken.setdefault(delta.key, []).append(delta)
                    else:
                        self._receive_early(delta, now)
                return [text for key, deltas in taken.items() for text in self._advance(key, self._open[key], deltas, now)]
            case ExpectAnswer():
                return self._open_answer(message, now)
            case ForgetAnswer():
                self._end(message.key, is_wanted=False)
                return []
            case Probed():
                self._probed.append(message)
                return []
            case _:
                assert_never(message)

    def take_probed(self) -> list[Probed]:
        """Answers to probes, to be passed on behind the text of what came before them."""
        taken, self._probed = self._probed, []
        if not self._early:
            return taken
        return [replace(each, standings=tuple(self._with_waiting(one) for one in each.standings)) for each in taken]

    def tick(self, now: float) -> list[TextDelta]:
        """Act on the deadlines that have passed. Early tokens are dropped; an open answer fails, because tokens are missing or
        its life is over."""
        texts: list[TextDelta] = []
        for key in self._deadlines.expired(now):
            answer = self._open.get(key)
            if answer is None:
                del self._early[key]
                self.dropped["never opened"] += 1
                continue
            announced = answer.order.announced_ending
            late = DeadlinePassed("the answer was neither ended nor closed in the time that it was given")
            ending = announced if isinstance(announced, Failed) else Failed.of(_missing(answer) if answer.waits else late)
            texts += self._advance(key, answer, (), now, ending)
        return texts

    # --- inside --------------------------------------------------------------------------------------------------------

    def _with_waiting(self, standing: Standing) -> Standing:
        return replace(standing, waits=True) if standing.key in self._early else standing

    def _receive_early(self, delta: TokenDelta, now: float) -> None:
        """Keep tokens that came before their ExpectAnswer, for a while and not too many."""
        waiting = self._early.get(delta.key)
        if waiting is None:
            if len(self._early) >= self._limits.early_answers:
                self.dropped["no room before its ExpectAnswer"] += 1
                return
            waiting = self._early[delta.key] = []
            self._deadlines.set(delta.key, now + self._limits.patience_s)
        if sum(1 + len(known.token_ids) for known in waiting) + len(delta.token_ids) >= self._limits.waiting_tokens:
            self.dropped["no room before its ExpectAnswer"] += 1
            return
        waiting.append(delta)

    def _open_answer(self, opened: ExpectAnswer, now: float) -> list[TextDelta]:
        """Open an answer, or open it again where the router is: then text was lost on its way there, and is made again."""
        key, known = opened.key, self._open.get(opened.key)
        if opened.again and self._over.get(key):
            del self._over[key]
        if key in self._over or (known is not None and known.order.next == opened.first):
            self.dropped["opened again"] += 1
            return []
        if known is None and len(self._open) >= self._limits.open_answers:
            return self._refuse(opened, Overloaded("the detokenizer has as many open answers as it may have"))
        try:
            answer = _OpenText(self._vocabulary, self._new_reader, opened, now + opened.life_s)
        except ValueError as error:
            return self._refuse(opened, TandemError(f"the answer cannot be opened: {error}"))
        if known is not None:
            known.order.pour_into(answer.order)
        self._open[key] = answer
        self._deadlines.set(key, answer.dies_s)
        return self._advance(key, answer, self._early.pop(key, ()), now)

    def _advance(
        self, key: AttemptId, answer: _OpenText, deltas: Iterable[TokenDelta], now: float, broken_off: Ending | None = None
    ) -> list[TextDelta]:
        """Take in tokens of an open answer. Returns the text that they bring, and ends the answer or sets its deadline anew.
        broken_off: how it ends, although tokens may be missing."""
        order = answer.order
        for delta in deltas:
            if order.has_logprobs and len(delta.logprobs) != len(delta.token_ids):
                self.dropped["malformed"] += 1
                continue
            if delta.prompt_logprobs and delta.first == 0:
                order.prompt_logprobs = pack_logprobs(delta.prompt_logprobs)
            if delta.cached_tokens and delta.first == 0:
                order.cached_tokens = delta.cached_tokens
            again = order.put(delta.first, delta.token_ids, delta.ending, delta.logprobs)
            if again < len(delta.token_ids):
                order.drafts = order.drafts[0] + delta.drafts[0], order.drafts[1] + delta.drafts[1]
            if again:
                self.dropped["tokens that came again"] += again
        if order.waiting_tokens > self._limits.waiting_tokens:
            broken_off = Failed.of(_missing(answer))
        text = answer.advance(key, broken_off)
        if text is not None and text.ending is not None:
            self._end(key)
        elif order.has_gap and (text is not None or not answer.waits):
            answer.waits = True
            self._deadlines.set(key, min(now + self._limits.patience_s, answer.dies_s))
        elif answer.waits and not order.has_gap:
            answer.waits = False
            self._deadlines.set(key, answer.dies_s)
        return [] if text is None else [text]

    def _refuse(self, opened: ExpectAnswer, error: TandemError) -> list[TextDelta]:
        self._end(opened.key)
        return [TextDelta(opened.key, opened.first, (), "", Failed.of(error))]

    def _end(self, key: AttemptId, *, is_wanted: bool = True) -> None:
        """Forget an answer, but remember that it is over, so that late tokens are dropped."""
        self._open.pop(key, None)
        self._early.pop(key, None)
        self._deadlines.clear(key)
        self._over[key] = is_wanted
        if len(self._over) > self._limits.remembered:
            del self._over[next(iter(self._over))]


def _no_reader(parts: AnswerParts) -> AnswerReader:
    raise ValueError("this detokenizer does not know how the model writes its answers")


def _missing(answer: _OpenText) -> InstanceFailed:
    return InstanceFailed(f"tokens of the answer from number {answer.order.next} on did not arrive")
