"""The workload: requests as bodies for the API, made from a seed.

Owns the mixture: chats and completions, short and long prompts, greedy and sampled, one choice or two, with and without a stop
string. Counts the prompts' tokens itself. Does not know what comes back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from demo import corpus
from demo.evaluate import MODEL
from demo.tokenizer import END
from tests.rig.client import Request

WORD_IDS = range(300, 2000)
"""Ids that stand for words, of which a prompt without a meaning is made."""
ANSWER_TOKENS = (20, 300)
LIST_LINES = (3, 10, 40, 150)
PROMPT_TOKENS = (1, 15, 16, 100, 511, 700)
"""Around the bounds of pages and chunks, too."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """path and fields: where it is sent, and as what. stop: at which its greedy answer is to end."""

    path: str
    fields: dict[str, Any]
    ids: tuple[int, ...]
    stop: str | None = None


class Workload:
    """Makes requests. eos: the token that ends an answer."""

    def __init__(self, model: Path = MODEL) -> None:
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(model)
        eos = self.tokenizer.convert_tokens_to_ids(END)
        assert isinstance(eos, int)
        self.eos = eos

    def requests(self, count: int, seed: int) -> Sequence[Request]:
        return [self._request(number, Random(f"chaos {seed} {number}")) for number in range(count)]

    def _request(self, number: int, random: Random) -> Request:
        prompt = random.choice((self._question, self._question, self._text, self._ids))(random)
        is_greedy = prompt.stop is not None or random.random() < 0.5
        temperature = 0.0 if is_greedy else random.choice((0.7, 1.0, 1.2))
        fields: dict[str, Any] = {
            "temperature": temperature,
            "seed": random.randrange(2**62),
            "n": 2 if random.random() < 0.15 else 1,
            "max_tokens": random.randint(*ANSWER_TOKENS),
            "ignore_eos": random.random() < 0.75,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if prompt.stop is not None:
            fields["stop"] = prompt.stop
        return Request(prompt.path, prompt.fields | fields, number, prompt.ids)

    def _question(self, random: Random) -> _Prompt:
        """A chat of one of the corpus' tasks; a line to copy stops in its middle."""
        task = random.choice(corpus.TASKS)
        size = random.choice(LIST_LINES) if task == "retrieval" else 16
        (turn,) = corpus.held_out(task, size, random.randrange(10**6)).turns
        messages = [{"role": "user", "content": turn.user}]
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        words = turn.answer.split()
        stop = " ".join(words[8:10]) if task == "copying" and len(words) > 10 and random.random() < 0.5 else None
        ids = tuple(self.tokenizer.encode(str(text), add_special_tokens=False))
        return _Prompt("/v1/chat/completions", {"messages": messages}, ids, stop)

    def _text(self, random: Random) -> _Prompt:
        text = "\n".join(
            turn.user for turn in corpus.held_out("retrieval", random.choice(LIST_LINES), random.randrange(10**6)).turns
        )
        return _Prompt("/v1/completions", {"prompt": text}, tuple(self.tokenizer.encode(text)))

    def _ids(self, random: Random) -> _Prompt:
        ids = random.choices(WORD_IDS, k=random.choice(PROMPT_TOKENS))
        return _Prompt("/v1/completions", {"prompt": ids}, tuple(ids))
