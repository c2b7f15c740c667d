"""Sampling parameters: each limit, by the name under which it is refused."""

from typing import Any

import pytest

from common.errors import BadRequest
from common.sampling_params import SamplingParams

LEAST = {
    "repetition_penalty": 0.01, "presence_penalty": -2.0, "frequency_penalty": -2.0, "logit_bias": ((0, -100.0), (3, 0.5)),
    "min_tokens": 0, "bad_words": ((1,),), "logprobs": 0, "prompt_logprobs": 0,
}  # fmt: skip
MOST = {
    "repetition_penalty": 10.0, "presence_penalty": 2.0, "frequency_penalty": 2.0,
    "logit_bias": tuple((token, 100.0) for token in range(1024)), "min_tokens": 9, "stop_token_ids": (5,) * 1024,
    "bad_words": ((2,) * 16,) * 1024, "logprobs": 20, "prompt_logprobs": 20,
}  # fmt: skip
NAN = float("nan")


@pytest.mark.parametrize("fields", [LEAST, MOST])
def test_what_is_within_its_limits_is_accepted(fields: dict[str, Any]) -> None:
    sampling = SamplingParams(max_new_tokens=9, **fields)
    sampling.validate()
    sampling.check_token_ids(1024)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("repetition_penalty", (0.0, -1.0, 10.1, NAN)),
        ("presence_penalty", (-2.1, 2.1, NAN)),
        ("frequency_penalty", (-2.1, 2.1, NAN)),
        ("logit_bias", (((3, 100.5),), ((3, -101.0),), ((3, NAN),), ((3, 1.0), (3, 2.0)), ((3, 1.0),) * 1025)),
        ("min_tokens", (-1, 10)),
        ("bad_words", (((),), ((1,) * 17,), ((1,),) * 1025)),
        ("stop_token_ids", ((1,) * 1025,)),
        ("logprobs", (-1, 21)),
        ("prompt_logprobs", (-1, 21)),
    ],
)
def test_what_is_beyond_its_limits_is_refused_by_name(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(BadRequest) as caught:
            SamplingParams(max_new_tokens=9, **{name: value}).validate()
        assert caught.value.field == name and str(caught.value).startswith(f"{name} must be "), value


def test_the_least_tokens_count_from_the_begin_of_an_answer_that_is_resumed() -> None:
    SamplingParams(max_new_tokens=2, min_tokens=7).validate(answered=5)
    with pytest.raises(BadRequest, match="min_tokens must be between 0 and max_tokens"):
        SamplingParams(max_new_tokens=2, min_tokens=8).validate(answered=5)


@pytest.mark.parametrize(
    "fields", [{"stop_token_ids": (4, 10)}, {"logit_bias": ((10, 1.0),)}, {"bad_words": ((3,), (3, -1))}], ids=str
)
def test_tokens_that_the_model_does_not_have_are_refused(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(BadRequest, match=f"{name} must hold token ids between 0 and 9"):
        SamplingParams(max_new_tokens=9, **fields).check_token_ids(10)
