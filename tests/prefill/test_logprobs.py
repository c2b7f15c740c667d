"""Log probabilities at a prefill instance: the prompt's are collected chunk by chunk and leave with token 0, and all can be told
again."""

import msgspec
import pytest

from common.executor import Logprobs, Plan, StepResult
from common.ids import ROUTER, unpack_ids
from common.messages import Repeat, TokenDelta, TokenLogprobs
from common.sampling_params import MAX_PROMPT_LOGPROBS, SamplingParams
from engine.toy import toy_logprob
from prefill.scheduler import PrefillScheduler
from tests.builders import key, result
from tests.prefill.rig import begun, finish_pushes, generate, handoffs, scheduler
from tests.schedulers import deltas, failures

TOKENS = 19


def reported(plan: Plan | None, tokens: list[int], sampling: SamplingParams) -> StepResult:
    """The step came back, with what its only row asks for."""
    plain = result(plan, tokens)
    (chunk,) = plain.plan.chunks
    ids = enumerate(chunk.token_ids.tolist(), chunk.start)
    prompt = [toy_logprob(token, position, sampling.prompt_logprobs or 0) for position, token in ids if position > 0]
    wants_prompt = sampling.prompt_logprobs is not None
    sampled = [toy_logprob(token, TOKENS, sampling.logprobs or 0) for token in tokens if sampling.logprobs is not None]
    return StepResult(
        plain.plan,
        plain.tokens,
        Logprobs.of([chunk.row] * len(sampled), sampled),
        Logprobs.of([chunk.row] * len(prompt), prompt) if wants_prompt else Logprobs(),
    )


def asked(first: int = 0, **asks: int) -> tuple[PrefillScheduler, SamplingParams]:
    """A scheduler with a request that asks for log probabilities, whose last chunk is to be computed."""
    request = generate("a", TOKENS, first=first)
    sampling = msgspec.structs.replace(request.sampling, **asks)
    made, decision = begun(msgspec.structs.replace(request, sampling=sampling), is_granted=True)
    finish_pushes(made, made.step_done(reported(decision.plan, [], sampling), 0.1))
    finish_pushes(made, made.step_done(reported(made.decide(0.2).plan, [], sampling), 0.2))
    return made, sampling


def of_prompt(alternatives: int) -> TokenLogprobs:
    prompt = unpack_ids(generate("a", TOKENS).prompt).tolist()
    return tuple(toy_logprob(token, position, alternatives) for position, token in enumerate(prompt))[1:]


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(2, 1), (0, None), (None, 3)])
def test_they_leave_with_the_first_token_and_are_told_again_with_it(logprobs: int | None, prompt_logprobs: int | None) -> None:
    asks = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    made, sampling = asked(**{name: count for name, count in asks.items() if count is not None})
    actions = made.step_done(reported(made.decide(0.3).plan, [55], sampling), 0.3)
    own = () if logprobs is None else (toy_logprob(55, TOKENS, logprobs),)
    told = TokenDelta(key("a"), 0, (55,), None, own, () if prompt_logprobs is None else of_prompt(prompt_logprobs))
    assert deltas(actions) == [told]
    (handoff,) = handoffs([*actions, *finish_pushes(made, actions)])
    assert handoff.first_logprob == (own[0] if own else None)
    assert deltas(made.receive(ROUTER, Repeat(tokens=((key("a"), 0),)), 0.5)) == [told]


def test_an_answer_that_is_resumed_behind_its_first_token_is_not_told_those_of_the_prompt_again() -> None:
    made, sampling = asked(first=3, logprobs=0, prompt_logprobs=0)
    actions = made.step_done(reported(made.decide(0.3).plan, [55], sampling), 0.3)
    assert deltas(actions) == [TokenDelta(key("a"), 3, (55,), None, (toy_logprob(55, TOKENS, 0),))]


def test_more_of_them_than_fit_into_a_message_are_refused_with_the_number_that_does() -> None:
    made = scheduler()
    request = generate("a", 20)
    sampling = msgspec.structs.replace(request.sampling, prompt_logprobs=20)
    prompt = request.prompt * (MAX_PROMPT_LOGPROBS // (20 * 21))
    actions = made.receive(ROUTER, msgspec.structs.replace(request, sampling=sampling, prompt=prompt), 0.0)
    assert "more than 250000" not in failures(actions)["a"].message, "as many as just fit"
    prompt += request.prompt
    actions = made.receive(ROUTER, msgspec.structs.replace(request, key=key("b"), sampling=sampling, prompt=prompt), 0.0)
    failed = failures(actions)["b"]
    assert (failed.status, failed.retryable) == (400, False)
    assert "prompt_logprobs of 20" in failed.message and "at most 19" in failed.message
