"""What a client of a schedule asked for, what it must get, and what became of it.

The reference is the answer of the toy with all KV in one place and nothing failing. Knows no fleet. Judges nothing: `checks`
does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from common.executor import Chunk, RowStart, StepPlan
from common.ids import Digest, Int32Array, pack_ids
from common.messages import Finished, TokenLogprob
from common.sampling_params import SamplingParams
from engine.grammar.grammars import ANY_TEXT
from router.requests import RequestSpec
from tests.engine.toy import NO_DIGEST, TOY_WEIGHTS, ToyExecutor, toy_logprob
from tests.life.asks import Ask, Choice
from tests.life.client import Client

CONTEXT_PAGES = 64


def undisturbed(
    prompt: Sequence[int],
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    weights: Digest = TOY_WEIGHTS,
    adapter: Digest = NO_DIGEST,
) -> list[int]:
    """The tokens that any fleet with these weights and this adapter must answer, if nothing but their number ends the answer."""
    return list(_undisturbed(tuple(prompt), max_tokens, temperature, seed, weights, adapter))


@lru_cache(maxsize=4096)
def _undisturbed(
    prompt: tuple[int, ...], max_tokens: int, temperature: float, seed: int, weights: Digest, adapter: Digest
) -> list[int]:
    executor = ToyExecutor(CONTEXT_PAGES, 1, weights=weights)
    executor.held.add(adapter)
    ids: Int32Array = np.array(prompt, dtype=np.int32)
    sampling = SamplingParams(max_new_tokens=max_tokens, temperature=temperature, seed=seed)
    start = RowStart(0, np.arange(CONTEXT_PAGES, dtype=np.int32), sampling, adapter=adapter)
    plans = [StepPlan(1, starts=(start,), chunks=(Chunk(0, 0, ids, last=True),))]
    plans += [StepPlan(2 + n, decode_rows=np.zeros(1, dtype=np.int32)) for n in range(max_tokens - 1)]
    results = [executor.launch(plan).poll() for plan in plans]
    return [int(result.tokens[0]) for result in results if result is not None]


@dataclass(frozen=True, slots=True)
class Expected:
    """All of an answer: its tokens, its text, how it ends, and the log probabilities of its tokens and of its prompt's."""

    token_ids: tuple[int, ...]
    text: str
    ending: Finished
    sampling: SamplingParams
    stop: tuple[str, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


def expect(choice: Choice) -> Expected:
    """The answer of a choice, and what the router is to be asked for it."""
    if choice.is_embedding:
        return _embedding(choice)
    expected = _without_logprobs(choice)
    logprobs = _logprobs(expected.token_ids, len(choice.prompt), choice.logprobs)
    return replace(expected, logprobs=logprobs, prompt_logprobs=_logprobs(choice.prompt, 0, choice.prompt_logprobs)[1:])


def _logprobs(token_ids: Sequence[int], first_position: int, alternatives: int | None) -> tuple[TokenLogprob, ...]:
    if alternatives is None:
        return ()
    return tuple(toy_logprob(token, position, alternatives) for position, token in enumerate(token_ids, first_position))


def _embedding(choice: Choice) -> Expected:
    """The toy's embedding of a prompt is the token that would follow it."""
    (token,) = undisturbed(choice.prompt, 1)
    ending = Finished(reason="stop", embedding=np.array([token], dtype="<f4").tobytes())
    return Expected((), "", ending, SamplingParams(max_new_tokens=1, temperature=0.0, pooling="last"), ())


def _without_logprobs(choice: Choice) -> Expected:
    tokens = undisturbed(choice.prompt, choice.max_tokens, choice.temperature, choice.seed)
    stop_token: int | None = None
    if choice.stop_after is not None and choice.stop_after < len(tokens):
        stop_token = tokens[choice.stop_after]
    by_text = stop_token is not None and choice.stop_by == "text"
    sampling = SamplingParams(
        max_new_tokens=choice.max_tokens,
        temperature=choice.temperature,
        seed=choice.seed,
        stop_token_ids=() if stop_token is None or by_text else (stop_token,),
        min_tokens=choice.min_tokens,
        logprobs=choice.logprobs,
        prompt_logprobs=choice.prompt_logprobs,
        grammar=ANY_TEXT if choice.has_grammar else None,
    )
    stop, text = str(stop_token), ""
    for number, token in enumerate(tokens):
        if token in sampling.stop_token_ids:
            ending = Finished(reason="stop", matched=token)
            text += f" {token}" if choice.include_stop else ""
            return Expected(tuple(tokens[: number + 1]), text, ending, sampling, ())
        word = f" {token}"
        if by_text and number >= choice.min_tokens and stop in word:
            ending = Finished(reason="stop", matched=stop)
            before, stop, _ = word.partition(stop)
            text += before + stop if choice.include_stop else before
            return Expected(tuple(tokens[: number + 1]), text, ending, sampling, (stop,))
        text += word
    return Expected(tuple(tokens), text, Finished(reason="length"), sampling, (stop,) if by_text else ())


def spec_of(choice: Choice, expected: Expected, ask: Ask, index: int) -> RequestSpec:
    """What the router is asked for a choice."""
    return RequestSpec(
        choice.request_id,
        index,
        pack_ids(choice.prompt),
        expected.sampling,
        expected.stop,
        ask.priority,
        ask.timeout_s,
        include_stop=choice.include_stop,
        owner=ask.owner,
        salt=choice.salt,
    )


PAGE_TOKENS = 4


@dataclass(slots=True, eq=False)
class Asked:
    """What a client asked for, and what became of it. client: None until the router has taken it in. gives_up_s: when it stops
    asking. unserved: for some time no instance could have served it. seat: of the router that it asked last."""

    ask: Ask
    expected: tuple[Expected, ...]
    client: Client | None = None
    gives_up_s: float | None = None
    left: bool = False
    given_up: bool = False
    unserved: bool = False
    seat: int = 0

    @property
    def pages(self) -> int:
        """What its largest answer takes in all."""
        return max(-(-(len(choice.prompt) + choice.max_tokens) // PAGE_TOKENS) for choice in self.ask.choices)

    @property
    def over(self) -> bool:
        return self.given_up or (self.client.ended if self.client is not None else self.left)
