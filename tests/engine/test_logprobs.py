"""Log probabilities: how a step's arrays become messages."""

import numpy as np
from numpy.typing import NDArray

from common.executor import NO_LOGPROBS, Logprobs
from common.ids import Int32Array
from common.messages import TokenLogprob


def ids(*values: int | tuple[int, ...]) -> Int32Array:
    return np.array(values, dtype=np.int32)


def shares(*values: float | tuple[float, ...]) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def test_each_row_gets_as_many_of_the_likeliest_tokens_as_it_asked_for() -> None:
    told = Logprobs(
        rows=ids(4, 4, 0),
        token_ids=ids(7, 8, 9),
        logprobs=shares(-0.5, -4.0, -1.0),
        ranks=ids(1, 3, 2),
        top_counts=ids(2, 2, 0),
        top_ids=ids((7, 1), (5, 6), (3, 9)),
        top_logprobs=shares((-0.5, -1.0), (-0.25, -2.0), (-0.5, -1.0)),
    )
    assert told.by_row() == {
        4: (TokenLogprob(7, -0.5, 1, ((7, -0.5), (1, -1.0))), TokenLogprob(8, -4.0, 3, ((5, -0.25), (6, -2.0)))),
        0: (TokenLogprob(9, -1.0, 2),),
    }
    assert NO_LOGPROBS.by_row() == {}
    again = Logprobs.of([4, 0, 4], [told.by_row()[4][0], *told.by_row()[0], told.by_row()[4][1]])
    assert again.by_row() == told.by_row()
    assert Logprobs.of([], []).by_row() == {}


def test_a_token_that_cannot_come_has_the_least_log_probability_for_no_message_carries_infinity() -> None:
    (told,) = Logprobs(
        rows=ids(0),
        token_ids=ids(7),
        logprobs=shares(-np.inf),
        ranks=ids(1),
        top_counts=ids(2),
        top_ids=ids((7, 8)),
        top_logprobs=shares((-np.inf, np.nan)),
    ).by_row()[0]
    assert told == TokenLogprob(7, -9999.0, 1, ((7, -9999.0), (8, -9999.0)))
