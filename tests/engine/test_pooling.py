"""Embeddings of the engine: they are pooled from the hidden states that transformers computes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from common.executor import StepPlan, StepResult
from common.sampling_params import Pooling, SamplingParams
from tests.engine.checkpoints import VOCAB, llama, saved
from tests.engine.driver import Driver
from tests.engine.exact import GREEDY, runner
from tests.engine.models.test_transformers_model import model_of

ASKED: tuple[Pooling | None, ...] = ("mean", None, "last", "cls", "mean", "last", None)


@pytest.mark.parametrize("made", [llama, lambda: model_of("GPT2", num_key_value_heads=4)], ids=["our model", "transformers"])
def test_embeddings_are_pooled_from_the_last_hidden_states(tmp_path: Path, made: Callable[[], PreTrainedModel]) -> None:
    model = made()
    running = runner(saved(model, tmp_path))
    random = np.random.default_rng(4)
    prompts = [random.integers(3, VOCAB, length).astype(np.int32) for length in (50, 20, 33, 41, 1, 16, 7)]
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
