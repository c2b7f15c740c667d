"""`launch chat`: a conversation with the served model in a terminal.

Owns the conversation and its commands. Knows the chat endpoint as any client does.

    you> Hello!            the answer is written as it comes; Ctrl-C ends it, the conversation goes on
    you> /reset            forget the conversation
    you> /exit             (or the end of input) leave
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common.errors import ConfigError, needs_file
from common.options import option, require_at_least
from common.processes.router_client import RequestFailed, RouterClient

PROMPT = "you> "
COMMANDS = "/reset forgets the conversation, /exit leaves, Ctrl-C ends an answer"


@dataclass(frozen=True, kw_only=True)
class ChatFlags:
    """What `launch chat` asks for."""

    url: str = option("http://127.0.0.1:8000", "of the router")
    model: str = option("", "the model's name; default: the one that is served")
    system: str = option("", "a system message at the beginning of each conversation")
    temperature: float = option(0.7, "0: always the most likely token")
    max_tokens: int = option(0, "longest answer; 0: what the context leaves")
    api_key_file: str = option("", "file with the API key; default: the environment variable OPENAI_API_KEY, if it is set")

    def __post_init__(self) -> None:
        require_at_least(self, max_tokens=0)


@dataclass(slots=True)
class Timing:
    """The times of one answer, in seconds of `clock`."""

    began_s: float
    first_s: float | None = None
    """When its first text came."""
    ended_s: float = 0.0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def line(self) -> str:
        """For people."""
        if self.first_s is None:
            return f"[no text in {self.ended_s - self.began_s:.2f} s]"
        parts = [f"first token after {(self.first_s - self.began_s) * 1000:.0f} ms"]
        if self.answer_tokens:
            parts.insert(0, f"{self.prompt_tokens} + {self.answer_tokens} tokens")
        later = self.ended_s - self.first_s
        if self.answer_tokens > 1 and later > 0:
            parts.append(f"{(self.answer_tokens - 1) / later:.1f} tokens/s")
        return f"[{', '.join(parts)}]"


@dataclass(slots=True)
class TerminalConversation:
    """The messages so far. Each answer is asked for with all of them."""

    client: RouterClient
    plan: ChatFlags
    model: str
    clock: Callable[[], float] = time.monotonic
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.plan.system}] if self.plan.system else []

    def ask(self, text: str, write: Callable[[str], object]) -> Timing:
        """Send the next message, and write the answer as it comes. An answer that is broken off is remembered as far as it came;
        a message without an answer is not. Raises RequestFailed, KeyboardInterrupt."""
        timing, parts = Timing(self.clock()), list[str]()
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*self.messages, {"role": "user", "content": text}],
            "temperature": self.plan.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.plan.max_tokens:
            body["max_tokens"] = self.plan.max_tokens
        try:
            for kind, piece in self._pieces(body, timing):
                if timing.first_s is None:
                    timing.first_s = self.clock()
                if kind == "content":
                    parts.append(piece)
                write(piece)
        finally:
            timing.ended_s = self.clock()
            if parts:
                self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "".join(parts)}]
        return timing

    def _pieces(self, body: dict[str, Any], timing: Timing) -> Iterator[tuple[str, str]]:
        """Each piece of text, and its kind: content, or reasoning_content, which is shown and is no part of the conversation."""
        with closing(self.client.stream("/v1/chat/completions", body)) as events:
            for event in events:
                usage = event.get("usage")
                if usage is not None:
                    timing.prompt_tokens, timing.answer_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                for choice in event["choices"]:
                    for kind in ("reasoning_content", "content"):
                        piece = choice["delta"].get(kind)
                        if piece:
                            yield kind, piece


def read_api_key(path: str) -> str:
    """The key in this file, or in the environment. Raises ConfigError."""
    if not path:
        return os.environ.get("OPENAI_API_KEY", "")
    try:
        with needs_file(f"--api-key-file: cannot read {path}"), open(path, encoding="ascii") as file:
            return file.read().strip()
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file: {path} must hold one key of visible ASCII characters") from None


def run(plan: ChatFlags, api_key: str) -> int:
    """Talk until the end of input. Returns the exit status."""
    write = partial(print, end="", flush=True)
    try:
        client = RouterClient(plan.url, api_key)
        model = plan.model or client.get("/v1/models")["data"][0]["id"]
    except RequestFailed as error:
        print(f"launch chat: {error}", file=sys.stderr)
        return 1
    conversation = TerminalConversation(client, plan, model)
    write(f"{model} at {client.url}. {COMMANDS}.\n")
    for text in _read(write):
        match text.split():
            case []:
                continue
            case ["/exit"]:
                break
            case ["/reset"]:
                conversation.reset()
                write("[a new conversation]\n")
            case [command, *_] if command.startswith("/"):
                write(f"[{command} is not known: {COMMANDS}]\n")
            case _:
                _answer(conversation, text, write)
    return 0


def _answer(conversation: TerminalConversation, text: str, write: Callable[[str], object]) -> None:
    try:
        timing = conversation.ask(text, write)
    except RequestFailed as error:
        write(f"\n[{error}]\n")
    except KeyboardInterrupt:
        write("\n[ended]\n")
    else:
        write(f"\n{timing.line()}\n")


def _read(write: Callable[[str], object]) -> Iterator[str]:
    """What is typed, line by line: with history and editing when it is typed in a terminal."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  `input` uses it
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            break
        except KeyboardInterrupt:
            write("\n")
    write("\n")
