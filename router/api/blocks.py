"""Answers of blocks: thoughts, texts and calls, in the order in which the model wrote them.

Owns where a block begins and ends. Does not know what a client sees of it: that is its API's own shape. The same steps make the
events of a stream and the blocks of a whole answer:

    opening ─► for each block: begun ─► grown, with each piece of text ─► ended ─► last events
"""

import secrets
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from common.messages import Finished
from router.api.answers import AnswerShape, R
from router.api.parsing.parser import AnswerParser, AnswerPart
from router.outbox import ChoiceDelta

BlockKind: TypeAlias = Literal["content", "reasoning", "call"]
Events: TypeAlias = Iterator[tuple[str, Mapping[str, Any]]]
"""Each is the type of an event and its fields."""
_encode = msgspec.json.Encoder().encode


def named_event(kind: str, fields: Mapping[str, Any]) -> bytes:
    """A server-sent event that says its type twice: for readers of events, and for readers of JSON."""
    return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **fields}) + b"\n\n"


@dataclass(slots=True)
class Block:
    """A part of the answer of one kind, as far as it has come."""

    kind: BlockKind
    name: str = ""
    """The name of the function that is called."""
    call_id: str = ""
    unique: str = field(default_factory=lambda: secrets.token_hex(12))
    """What no other block has, for ids."""
    texts: list[str] = field(default_factory=list)
    """The text or the arguments, in pieces."""

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(slots=True, kw_only=True, eq=False)
class BlockShape(AnswerShape[R]):
    """An answer of one choice, written block by block."""

    blocks: list[Block] = field(default_factory=list, init=False)
    ending: Finished = field(default=Finished(reason="stop"), init=False)
    _parser: AnswerParser | None = field(default=None, init=False)
    _is_open: bool = field(default=False, init=False)
    """Whether the last block goes on."""

    def __post_init__(self) -> None:
        new_parser = self.accepted.reading.new_parser
        self._parser = None if new_parser is None else new_parser()

    def events(self, delta: ChoiceDelta, *, opens: bool) -> bytes:
        self.count(delta.index, delta)
        return b"".join(self.event(kind, fields) for kind, fields in self._delta_events(delta, opens=opens))

    def whole(self, choices: Sequence[ChoiceDelta]) -> bytes:
        (choice,) = choices
        self.count(0, choice)
        for _ in self._delta_events(choice, opens=False):
            pass  # the events of a stream; the blocks are what is wanted
        return _encode(self.body())

    def event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        return named_event(kind, fields)

    @abstractmethod
    def body(self) -> msgspec.Struct:
        """The whole answer, when it has ended."""

    @abstractmethod
    def opening(self) -> Events:
        """What comes before the first block."""

    @abstractmethod
    def begun(self, block: Block) -> Events:
        """The block is the last one now."""

    @abstractmethod
    def grown(self, block: Block, text: str) -> Events:
        """The last block goes on with this text."""

    @abstractmethod
    def ended(self, block: Block, *, is_last: bool) -> Events: ...

    def _delta_events(self, delta: ChoiceDelta, *, opens: bool) -> Events:
        if opens:
            yield from self.opening()
        has_ended = isinstance(delta.ending, Finished)
        if self._parser is None:
            parts = [AnswerPart("content", delta.text)] if delta.text else []
        else:
            parts = self._parser.push(delta.text) + (self._parser.finish() if has_ended else [])
        for part in parts:
            yield from self._part_events(part)
        if isinstance(delta.ending, Finished):
            self.ending = delta.ending
            if not self.blocks:  # an answer of nothing is an empty text
                yield from self._begin(Block("content"))
            yield from self._end(is_last=True)

    def _part_events(self, part: AnswerPart) -> Events:
        """The part goes on with the last block, or begins another."""
        if part.kind == "call":
            number = sum(block.kind == "call" for block in self.blocks)
            yield from self._begin(Block("call", part.text, self.accepted.reading.new_id(part.text, number)))
            return
        kind: BlockKind = "call" if part.kind == "arguments" else part.kind
        if not self._is_open or self.blocks[-1].kind != kind:
            yield from self._begin(Block(kind))
        self.blocks[-1].texts.append(part.text)
        yield from self.grown(self.blocks[-1], part.text)

    def _begin(self, block: Block) -> Events:
        yield from self._end(is_last=False)
        self.blocks.append(block)
        self._is_open = True
        yield from self.begun(block)

    def _end(self, *, is_last: bool) -> Events:
        """End the last block, if it goes on."""
        if self._is_open:
            self._is_open = False
            yield from self.ended(self.blocks[-1], is_last=is_last)
