"""What a client must get: the answer of the toy with all KV in one place and nothing failing.

Owns the reference. Knows no fleet.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.engine.plan import Chunk, Plan, RowStart
from common.engine.toy import ToyExecutor
from common.ids import Int32Array, pack_ids
from common.messages import Finished
from common.sampling_params import SamplingParams
from router.requests import RequestSpec
from tests.life.schedule import Ask, Choice

CONTEXT_PAGES = 64


def undisturbed(prompt: Sequence[int], max_tokens: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
    """The tokens that any fleet must answer, if nothing but their number ends the answer."""
    executor = ToyExecutor(CONTEXT_PAGES, 1)
    ids: Int32Array = np.array(prompt, dtype=np.int32)
    sampling = SamplingParams(max_new_tokens=max_tokens, temperature=temperature, seed=seed)
    start = RowStart(0, np.arange(CONTEXT_PAGES, dtype=np.int32), sampling)
    plans = [Plan(1, starts=(start,), chunks=(Chunk(0, 0, ids, last=True),))]
    plans += [Plan(2 + n, decode_rows=np.zeros(1, dtype=np.int32)) for n in range(max_tokens - 1)]
    results = [executor.launch(plan).poll() for plan in plans]
    return [int(result.tokens[0]) for result in results if result is not None]


@dataclass(frozen=True, slots=True)
class Expected:
    """All of an answer: its tokens, its text, and how it ends."""

    token_ids: tuple[int, ...]
    text: str
    ending: Finished
    sampling: SamplingParams
    stop: tuple[str, ...]


def expect(choice: Choice) -> Expected:
    """The answer of a choice, and what the router is to be asked for it."""
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
    )
    stop, text = str(stop_token), ""
    for number, token in enumerate(tokens):
        if token in sampling.stop_token_ids:
            ending = Finished(reason="stop", matched=token)
            return Expected(tuple(tokens[: number + 1]), text, ending, sampling, ())
        text += f" {token}"
        if by_text and stop in text:
            ending = Finished(reason="stop", matched=stop)
            return Expected(tuple(tokens[: number + 1]), text[: text.index(stop)], ending, sampling, (stop,))
    return Expected(tuple(tokens), text, Finished(reason="length"), sampling, ())


def spec_of(choice: Choice, expected: Expected, ask: Ask, index: int) -> RequestSpec:
    """What the router is asked for a choice."""
    return RequestSpec(
        choice.request_id, index, pack_ids(choice.prompt), expected.sampling, expected.stop, ask.priority, ask.timeout_s
    )
