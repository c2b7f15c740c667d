"""A session: one request, or several of a conversation, each with the answers so far before it.

Owns how the next prompt follows from the answers. Knows no times but when the session is due, if its source says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Message: TypeAlias = dict[str, Any]
Content: TypeAlias = "str | NDArray[np.int32]"
"""Text, or token ids, [tokens] int32."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What is added to the prompt, and the length of the answer. content: the whole prompt, or the next message of its user.
    before: messages ahead of it, such as a system message. input_tokens: of the content; 0: not known."""

    content: Content
    output_tokens: int
    input_tokens: int = 0
    before: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """due_s: from the beginning of the run; None: the load decides."""

    turns: tuple[Turn, ...]
    due_s: float | None = None


def completion_prompt(session: Session, answers: Sequence[str]) -> str | list[int]:
    """The prompt of the turn after these answers, for the completions API: all texts so far, one after the other."""
    turns = session.turns[: len(answers) + 1]
    if not isinstance(turns[-1].content, str):
        assert not answers, "a session of several turns consists of texts"
        ids: list[int] = turns[-1].content.tolist()
        return ids
    said = [_as_text(turn) + answer for turn, answer in zip(turns, [*answers, ""], strict=True)]
    return "".join(said)


def chat_messages(session: Session, answers: Sequence[str]) -> list[Message]:
    """The messages of the turn after these answers, for the chat API."""
    messages: list[Message] = []
    for number, turn in enumerate(session.turns[: len(answers) + 1]):
        if number:
            messages.append({"role": "assistant", "content": answers[number - 1]})
        assert isinstance(turn.content, str), "a chat takes text"
        messages += [*turn.before, {"role": "user", "content": turn.content}]
    return messages


def _as_text(turn: Turn) -> str:
    assert isinstance(turn.content, str), "a session of several turns consists of texts"
    return "".join([*(f"{message['content']}\n" for message in turn.before), turn.content])
