"""The answers of the OpenAI API as JSON bytes: the events of a stream, whole answers, usage.

Owns what all endpoints have in common; each has a shape of its own. Does not know HTTP or the fleet.

Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

import msgspec

OpenAIFinish: TypeAlias = Literal["stop", "length"]
TokenIds: TypeAlias = tuple[int, ...] | msgspec.UnsetType
"""`token_ids` of a choice. The OpenAI API does not have it; as in vLLM it is left out unless `return_token_ids` asks for it."""
_MARK = "\ue000"
_encode = msgspec.json.Encoder().encode


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _Body(msgspec.Struct, frozen=True):
    """usage: left out when the client did not ask for it; null in the chunks before the one that has it."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[msgspec.Struct]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


@dataclass(slots=True)
class WholeChoice:
    """One choice of an answer that is not streamed, as far as it has come. texts: in pieces."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: OpenAIFinish = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape(ABC):
    """How one endpoint writes its answer. choices: how many it has. include_usage: in a stream, as its last chunk."""

    id: str
    created: int
    model: str
    choices: int
    prompt_tokens: int
    include_usage: bool
    return_token_ids: bool

    _frames: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """For each choice that has got text; see `_frame`."""

    chunk_object: ClassVar[str]
    whole_object: ClassVar[str]

    def events(self, index: int, text: str, ids: tuple[int, ...], finish: OpenAIFinish | None, *, opens: bool) -> bytes:
        """The events for news of one choice. finish: how it ends, if it does. opens: this is its first news."""
        if text and finish is None and not opens and not self.return_token_ids:
            frame = self._frames.get(index)
            if frame is None:
                frame = self._frames[index] = self._frame(index)
            return frame[0] + _encode(text) + frame[1]
        token_ids = ids if self.return_token_ids else msgspec.UNSET
        parts = self._chunk_choices(index, text, token_ids, finish, opens=opens)
        return b"".join(map(self._event, parts))

    def _event(self, part: msgspec.Struct) -> bytes:
        usage = None if self.include_usage else msgspec.UNSET
        return b"data: " + _encode(_Body(self.id, self.chunk_object, self.created, self.model, (part,), usage)) + b"\n\n"

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in an event that holds nothing else: most do."""
        (part,) = self._chunk_choices(index, _MARK, msgspec.UNSET, None, opens=False)
        before, mark, after = self._event(part).rpartition(_encode(_MARK))
        assert mark, "the text is in its event"
        return before, after

    def usage_event(self, completion_tokens: int) -> bytes:
        usage = Usage(self.prompt_tokens, completion_tokens, self.prompt_tokens + completion_tokens)
        return b"data: " + _encode(_Body(self.id, self.chunk_object, self.created, self.model, (), usage)) + b"\n\n"

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        tokens = sum(len(choice.token_ids) for choice in choices)
        usage = Usage(self.prompt_tokens, tokens, self.prompt_tokens + tokens)
        parts = [
            self._whole_choice(index, choice, tuple(choice.token_ids) if self.return_token_ids else msgspec.UNSET)
            for index, choice in enumerate(choices)
        ]
        return _encode(_Body(self.id, self.whole_object, self.created, self.model, parts, usage))

    @abstractmethod
    def _chunk_choices(
        self, index: int, text: str, token_ids: TokenIds, finish: OpenAIFinish | None, *, opens: bool
    ) -> Iterable[msgspec.Struct]:
        """One choice for each chunk."""

    @abstractmethod
    def _whole_choice(self, index: int, choice: WholeChoice, token_ids: TokenIds) -> msgspec.Struct: ...
