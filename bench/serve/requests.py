"""What a request looks like: the JSON body of a turn, for completions or chats, and of a completion whose length is given.

Owns the fields. Knows no connection. `Usage` says what the server is asked to tell of tokens; not every server takes all of it.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from bench.serve.plan import ServeBench
from bench.serve.workloads.sessions import Session, chat_messages, completion_prompt

Usage: TypeAlias = Literal["continuous", "last", "none"]
"""With each event (vLLM, Tandem); in a last event (OpenAI); not at all."""
USAGES: tuple[Usage, ...] = ("continuous", "last", "none")
_OPTIONS: dict[Usage, dict[str, Any]] = {
    "continuous": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "last": {"stream_options": {"include_usage": True}},
    "none": {},
}
COUNTED_STREAM: dict[str, Any] = {"stream": True, **_OPTIONS["continuous"]}
"""Fields of a stream whose every event says how many tokens there are."""


def completion_of_ids(model: str, prompt: Sequence[int], answer_tokens: int, **others: Any) -> bytes:
    """Greedy, and of exactly this length. prompt: token ids. others: fields beside these."""
    length = {"max_tokens": answer_tokens, "ignore_eos": True}
    return msgspec.json.encode({"model": model, "prompt": list(prompt), "temperature": 0, **length, **others})


class Bodies:
    """Makes the bodies of a run."""

    def __init__(self, bench: ServeBench, model: str, usage: Usage) -> None:
        self._is_chat = bench.target.backend == "openai-chat"
        self._common: dict[str, Any] = {"model": model, "stream": True, "temperature": bench.load.temperature} | _OPTIONS[usage]
        if bench.ignores_eos:
            self._common["ignore_eos"] = True
        self._extra = bench.load.extra
        self._encode = msgspec.json.Encoder().encode

    def body(self, session: Session, answers: Sequence[str]) -> bytes:
        """The turn of this session that follows these answers."""
        output_tokens = session.turns[len(answers)].output_tokens
        if self._is_chat:
            own = {"messages": chat_messages(session, answers), "max_completion_tokens": output_tokens}
        else:
            own = {"prompt": completion_prompt(session, answers), "max_tokens": output_tokens}
        return self._encode(self._common | own | self._extra)
