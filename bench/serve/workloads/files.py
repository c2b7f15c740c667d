"""Workloads that are read from JSONL files: prompts and conversations that somebody has collected.

Owns the formats. A line of a prompt file is {"prompt": text or token ids} or {"messages": [...]}, with "output_tokens" if it says
how long the answer is. A line of a conversation file is {"messages": [...]}, or ShareGPT's {"conversations": [{"from": "human",
"value": ...}]}: what the user says is sent turn by turn, and what the assistant says is left to the server.
"""

from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from bench.serve.plan import Workload
from bench.serve.workloads.sessions import Message, Session, Turn
from common.errors import ConfigError

T = TypeVar("T")
_SHARE_GPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


class _Prompt(msgspec.Struct):
    """A line of a prompt file."""

    prompt: str | list[int] | None = None
    messages: list[Message] = []
    output_tokens: int = 0


class _Said(msgspec.Struct):
    """ShareGPT's name for a message."""

    who: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct):
    """A line of a conversation file."""

    messages: list[Message] = []
    conversations: list[_Said] = []
    output_tokens: int = 0


def read_lines(path: str, kind: type[T]) -> list[tuple[int, T]]:
    """The lines of a file with their numbers; empty ones are skipped. Raises ConfigError, which names the line."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--dataset-path: {path} cannot be read: {error.strerror}") from error
    decoder, read = msgspec.json.Decoder(kind), []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                read.append((number, decoder.decode(line)))
            except msgspec.DecodeError as error:
                raise refused(path, number, str(error)) from error
    if not read:
        raise ConfigError(f"--dataset-path: {path} is empty")
    return read


def refused(path: str, line: int, reason: str) -> ConfigError:
    """The error for a line that cannot be used."""
    return ConfigError(f"--dataset-path: line {line} of {path} cannot be used: {reason}")


def prompt_sessions(plan: Workload, is_chat: bool, count: int) -> Iterator[Session]:
    """count: 0 for every line once. Raises ConfigError."""
    sessions = [_prompt(plan, is_chat, line, read) for line, read in read_lines(plan.dataset_path, _Prompt)]
    return islice(cycle(sessions), count or len(sessions))


def conversation_sessions(plan: Workload, count: int) -> Iterator[Session]:
    """count: 0 for every line once. Raises ConfigError."""
    sessions = [_conversation(plan, line, read) for line, read in read_lines(plan.dataset_path, _Conversation)]
    return islice(cycle(sessions), count or len(sessions))


def _prompt(plan: Workload, is_chat: bool, line: int, read: _Prompt) -> Session:
    output = _answer_tokens(plan, line, read.output_tokens)
    if (read.prompt is None) == (not read.messages):
        raise refused(plan.dataset_path, line, "it must have either prompt or messages")
    if read.prompt is None:
        *before, last = read.messages
        if not is_chat:
            raise refused(plan.dataset_path, line, "messages are for --backend openai-chat")
        if last.get("role") != "user" or not isinstance(last.get("content"), str):
            raise refused(plan.dataset_path, line, "its last message must be a text of the user")
        return Session((Turn(last["content"], output, before=tuple(before)),))
    if not read.prompt or (is_chat and not isinstance(read.prompt, str)):
        raise refused(plan.dataset_path, line, "the prompt is empty, or consists of token ids, which a chat does not take")
    if isinstance(read.prompt, str):
        return Session((Turn(read.prompt, output),))
    return Session((Turn(np.array(read.prompt, np.int32), output, len(read.prompt)),))


def _conversation(plan: Workload, line: int, read: _Conversation) -> Session:
    output = _answer_tokens(plan, line, read.output_tokens)
    messages = read.messages
    if read.conversations:
        messages = [{"role": _SHARE_GPT.get(said.who, said.who), "content": said.value} for said in read.conversations]
    turns: list[Turn] = []
    before: list[Message] = []
    for message in messages:
        match message:
            case {"role": "user", "content": str(text)} if text:
                turns.append(Turn(text, output, before=tuple(before)))
                before = []
            case {"role": "assistant"}:
                pass
            case {"role": "system", "content": str(_)}:
                before.append(message)
            case _:
                raise refused(plan.dataset_path, line, f"a message is no text of user, assistant or system: {message}")
    if not turns:
        raise refused(plan.dataset_path, line, "the user says nothing")
    return Session(tuple(turns))


def _answer_tokens(plan: Workload, line: int, given: int) -> int:
    if given < 0:
        raise refused(plan.dataset_path, line, "output_tokens must be at least 1")
    return given or plan.custom_output_len
