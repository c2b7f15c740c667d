"""A line between two ranks: messages are numbered, and silence is counted.

Owns the numbers of both directions, when the other side was last heard, and plans as they travel. A line serves from the welcome
to the end. Opens no socket and reads no clock.
"""

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from common.errors import TandemError
from common.executor import Chunk, ExecutorFailed, RowStart, StepPlan, StepResult
from common.ids import InstanceId, pack_ids, unpack_ids
from common.instance.ports import Mail
from common.messages.ranks import (
    FromFollower,
    FromLeader,
    Launch,
    Numbered,
    PromptChunk,
    RankHello,
    RowBegins,
)
from common.sampling_params import Grammar

PING_S = 0.5
SILENCE_S = 3.0
"""An instance whose ranks do not hear from each other for so long ends. A rank that computes still answers: its loop does not
wait for steps."""
START_SILENCE_S = 30.0
"""The same while a model is loaded: importing and compiling keep the interpreter for seconds."""
PONGS_KEPT = 16
"""So many of the latest answers tell how two clocks differ. Clocks drift by less than a millisecond in that time."""


class RankLost(TandemError):
    """A rank of the instance is gone, silent or has failed, so the instance ends. The message names the rank and why."""

    retryable = True


class RankStepFailed(RankLost, ExecutorFailed):
    """A step has failed on a rank although all ranks are there."""


class RankLine:
    """The line to one rank. to: its name as a sender. who: for people, such as "rank 2 (pid 17 on gpu-4)". now: as it begins."""

    def __init__(self, mail: Mail[Any], to: InstanceId, who: str, now: float) -> None:
        self._mail = mail
        self.to = to
        self.who = who
        self.heard_s = now
        """When the other side was last heard."""
        self._is_forgiven = False
        """Its present silence has begun anew once."""
        self._sent = 0
        self._taken = 0
        self._offsets_s: deque[float] = deque(maxlen=PONGS_KEPT)

    def send(self, message: FromLeader | FromFollower) -> None:
        """Number the message and send it."""
        self._sent += 1
        self._mail.send(self.to, replace(message, number=self._sent))

    def take(self, message: Numbered, now: float) -> None:
        """A message has arrived. Raises RankLost when one before it has not."""
        if message.number != self._taken + 1:
            raise RankLost(f"{self.who}: message {self._taken + 1} was lost: {message.number} came in its place")
        self._taken = message.number
        self.heard_s = now
        self._is_forgiven = False

    def unexpected(self, message: Numbered, serves: bool) -> RankLost:
        """The error of a message that does not belong there. serves: all ranks are ready."""
        when = "serves" if serves else "starts"
        return RankLost(f"{self.who} sent {type(message).__name__} while the instance {when}")

    def forgive(self, now: float) -> None:
        """Our own loop stood still until now: what the other side has sent may not have come yet, or it stood still with us. So
        its silence begins anew, once in each silence: a loop that is always late must notice who is lost, too."""
        if not self._is_forgiven:
            self.heard_s = now
            self._is_forgiven = True

    def check(self, now: float, silence_s: float) -> None:
        """Take in all mail before. Raises RankLost after too long a silence."""
        if now - self.heard_s > silence_s:
            raise RankLost(f"{self.who} has been silent for {now - self.heard_s:.1f} s")

    def compare_clocks(self, heard_s: float, now: float) -> None:
        """The other side has answered when its clock showed heard_s. Ours has shown `now` since the answer arrived, not before: a
        pause between the two would make leases end too late there."""
        self._offsets_s.append(heard_s - now)

    @property
    def clock_offset_s(self) -> float | None:
        """What to add to a time of our clock to have one of theirs that is no later; None before the first answer.

        An answer was sent before it arrived: at our time `now`, their clock shows at least what it said.
        """
        return max(self._offsets_s, default=None)


_IDS = (
    "decode_rows",
    "grown_rows",
    "grown_pages",
    "draft_rows",
    "draft_tokens",
    "verified_rows",
    "verified_lengths",
    "verified_tokens",
)
"""What a plan and its message have by the same names, as arrays and packed."""


def pack_plan(plan: StepPlan, grammar_id: Callable[[Grammar], int]) -> Launch:
    """grammar_id: the number of a grammar that the followers hold."""
    packed: dict[str, Any] = {name: pack_ids(getattr(plan, name)) for name in _IDS}
    return Launch(
        step=plan.step,
        starts=tuple(_pack_start(start, grammar_id) for start in plan.starts),
        chunks=_pack_chunks(plan.chunks),
        draft_chunks=_pack_chunks(plan.draft_chunks),
        held_tokens=plan.held_tokens,
        **packed,
    )


def unpack_plan(message: Launch, grammars: Mapping[int, Grammar]) -> StepPlan:
    """grammars: those that this rank holds. Raises RankLost for a row with another one."""
    return StepPlan(
        step=message.step,
        starts=tuple(_unpack_start(start, grammars) for start in message.starts),
        chunks=_unpack_chunks(message.chunks),
        draft_chunks=_unpack_chunks(message.draft_chunks),
        held_tokens=message.held_tokens,
        **{name: unpack_ids(getattr(message, name)) for name in _IDS},
    )


def digest_tokens(result: StepResult) -> int:
    """CRC-32 of the tokens that a step sampled, and of the drafts that it verified: ranks whose draft models differ would mix
    what they compute of other tokens."""
    digest = 0
    for tokens in (result.tokens, result.drafted, result.plan.draft_tokens):
        digest = zlib.crc32(pack_ids(tokens), digest)
    return digest


def _pack_chunks(chunks: Sequence[Chunk]) -> tuple[PromptChunk, ...]:
    return tuple(PromptChunk(chunk.row, chunk.start, pack_ids(chunk.token_ids), chunk.last) for chunk in chunks)


def _unpack_chunks(chunks: Sequence[PromptChunk]) -> tuple[Chunk, ...]:
    return tuple(Chunk(chunk.row, chunk.start, unpack_ids(chunk.token_ids), chunk.last) for chunk in chunks)


def _pack_start(start: RowStart, grammar_id: Callable[[Grammar], int]) -> RowBegins:
    sampling, grammar = start.sampling, start.sampling.grammar
    return RowBegins(
        row=start.row,
        pages=pack_ids(start.pages),
        sampling=sampling if grammar is None else replace(sampling, grammar=None),
        length=start.length,
        last_token=start.last_token,
        token_ids=None if start.token_ids is None else pack_ids(start.token_ids),
        answer_tokens=start.answer_tokens,
        grammar_id=None if grammar is None else grammar_id(grammar),
        adapter=start.adapter,
    )


def _unpack_start(start: RowBegins, grammars: Mapping[int, Grammar]) -> RowStart:
    sampling = start.sampling
    if start.grammar_id is not None:
        grammar = grammars.get(start.grammar_id)
        if grammar is None:
            raise RankLost(f"row {start.row} is to begin with grammar {start.grammar_id}, which this rank does not hold")
        sampling = replace(sampling, grammar=grammar)
    return RowStart(
        row=start.row,
        pages=unpack_ids(start.pages),
        sampling=sampling,
        length=start.length,
        last_token=start.last_token,
        token_ids=None if start.token_ids is None else unpack_ids(start.token_ids),
        answer_tokens=start.answer_tokens,
        adapter=start.adapter,
    )


def describe(hello: RankHello) -> str:
    """A rank, for people."""
    return f"rank {hello.rank} (pid {hello.info.pid} on {hello.info.host})"
