"""The embeddings and log probabilities that an engine gives: pooled from what transformers computes, and as messages."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from transformers import PreTrainedModel

from common.executor import NO_LOGPROBS, Logprobs, StepPlan, StepResult
from common.ids import Int32Array
from common.messages import TokenLogprob
from common.sampling_params import Pooling, SamplingParams
from tests.engine.checkpoints import VOCAB, llama, prompts_of, saved
from tests.engine.driver import Driver
from tests.engine.exact import GREEDY, runner
from tests.engine.models.test_transformers_model import model_of

ASKED: tuple[Pooling | None, ...] = ("mean", None, "last", "cls", "mean", "last", None)


@pytest.mark.parametrize("made", [llama, lambda: model_of("GPT2", num_key_value_heads=4)], ids=["our model", "transformers"])
def test_embeddings_are_pooled_from_the_last_hidden_states(tmp_path: Path, made: Callable[[], PreTrainedModel]) -> None:
    model = made()
    running = runner(saved(model, tmp_path))
    prompts = prompts_of(50, 20, 33, 41, 1, 16, 7)
    for chunk_tokens in (16, 100):
        got: dict[int, bytes] = {}

        def run(plan: StepPlan, got: dict[int, bytes] = got) -> StepResult:
            result = running.run(plan)
            got |= result.embeddings
            return result

        params = [GREEDY if how is None else SamplingParams(max_new_tokens=1, pooling=how) for how in ASKED]
        Driver(run, running.description).answers(prompts, 3, params, chunk_tokens)
        assert got.keys() == {row for row, how in enumerate(ASKED) if how is not None}
        for row, embedding in got.items():
            with torch.inference_mode():
                hidden = model.base_model(torch.from_numpy(prompts[row].astype(np.int64))[None]).last_hidden_state[0]
            expected = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[ASKED[row] or "last"].numpy()
            assert np.abs(np.frombuffer(embedding, dtype="<f4") - expected).max() < 1e-4 * np.abs(expected).max()


def test_chosen_tokens_are_reported_in_place_of_the_likeliest_whatever_other_rows_ask(tmp_path: Path) -> None:
    """Beside transformers in float64."""
    model = llama()
    running = runner(saved(model, tmp_path))
    prompts = prompts_of(50, 20, 33, 7, 1)
    asked: list[tuple[int | None, tuple[int, ...]]] = [
        (0, (9, 5, VOCAB - 1)),
        (4, ()),
        (None, ()),
        (0, (7,)),
        (0, (3, 4, 5, 6, 8)),
    ]
    got: dict[int, TokenLogprob] = {}

    def run(plan: StepPlan) -> StepResult:
        result = running.run(plan)
        for row, told in result.logprobs.by_row().items():
            got.setdefault(row, told[0])
        return result

    params = [replace(GREEDY, logprobs=logprobs, logprob_ids=chosen) for logprobs, chosen in asked]
    Driver(run, running.description).answers(prompts, 3, params, 16)
    assert got.keys() == {0, 1, 3, 4}
    exact = model.double()
    for row, told in got.items():
        with torch.inference_mode():
            logits = exact(torch.from_numpy(prompts[row].astype(np.int64))[None]).logits[0, -1]
        expected = logits.log_softmax(-1)
        count, chosen = asked[row]
        wanted = chosen or tuple(expected.topk(count or 0).indices.tolist())
        assert [token for token, _ in told.top] == list(wanted)
        assert [logprob for _, logprob in told.top] == pytest.approx(expected[list(wanted)].tolist(), abs=1e-4)


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
