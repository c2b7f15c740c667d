"""GRPO with a fleet of processes: whose weights its answers came from, what it was given, and whether it gets better.

python -m pytest tests/demo/test_grpo.py --soak      # also trains with the command, and stops it
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from common.processes.router_client import RequestFailed, RouterClient
from demo.evaluate import MODEL
from demo.grpo import (
    Question,
    Recipe,
    Rollout,
    StaleAnswer,
    Trainer,
    advantages,
    compute_logprobs,
    grpo_loss,
    make_question,
    reward_of,
)
from launch.engine import Engine
from tests.rig.forks import forked

TINY = Recipe(prompts=16, group=8, batches=2, rate=1e-4, held_out=30)
STEPS = 2


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One instance: the long tests run the command's own fleet."""
    with forked():
        made = Engine(str(MODEL), prefill=0, dtype="float32", grammar="off", threads=1, dead_after_s=60)
    with made:
        yield made


def fresh_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def served_logprobs(engine: Engine, ids: list[int]) -> torch.Tensor:
    """The log probability of each token but the first, as the fleet computes it now."""
    answer = engine.generate(ids, {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    return torch.tensor([logprob for logprob, _, _ in answer["meta_info"]["input_token_logprobs"][1:]])


def own_logprobs(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """The same by transformers."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    logprobs: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return logprobs


def test_each_step_gives_the_fleet_what_was_trained_and_makes_more_answers_right(
    engine: Engine, tokenizer: PreTrainedTokenizerFast
) -> None:
    model, ids, router = fresh_model(), tokenizer.encode("12 + 7 = 19"), RouterClient(engine.url)
    trainer = Trainer(engine, model, tokenizer, TINY)
    before, held_out = trainer.examine(), 0.0
    weights = {router.get("/weight_info")["weights"]}
    assert torch.allclose(served_logprobs(engine, ids), own_logprobs(fresh_model(), ids), atol=1e-3)
    for number in range(1, STEPS + 1):
        report = trainer.step()
        held_out = report.held_out
        assert report.step == number
        assert report.difference < 1e-3, "fleet and trainer disagree on the log probabilities of the same weights"
        info = router.get("/weight_info")
        assert info["weight_version"] == str(number) and info["weights"] not in weights
        weights.add(info["weights"])
        assert torch.allclose(served_logprobs(engine, ids), own_logprobs(model, ids), atol=1e-3)
    assert held_out > before + 0.2, (before, held_out)


def test_answers_of_weights_that_another_trainer_gave_are_refused(engine: Engine, tokenizer: PreTrainedTokenizerFast) -> None:
    trainer = Trainer(engine, fresh_model(), tokenizer, TINY)
    engine.update_weight_version("another's")
    with pytest.raises(StaleAnswer, match="another's"):
        trainer.step()


def answer_of(text: str, versions: list[str], ending: str = "stop") -> dict[str, Any]:
    """An answer of POST /generate, with a token from each of these weights."""
    spans = [{"version": version, "start": at, "end": at + 1} for at, version in enumerate(versions)]
    return {"text": text, "meta_info": {"weight_versions": spans, "finish_reason": {"type": ending}}}


def test_only_a_right_answer_that_ends_is_rewarded() -> None:
    question = Question([5, 6, 7], "1 + 1 = 2")
    assert reward_of(question, answer_of("1 + 1 = 2", ["3"]), "3") == 1
    assert reward_of(question, answer_of("1 + 1 = 2", ["3"], ending="length"), "3") == 0
    assert reward_of(question, answer_of("1 + 1 = 3", ["3"]), "3") == 0


@pytest.mark.parametrize("versions", [["2"], ["3", "4"], ["default"], ["2", "3"]])
def test_an_answer_with_a_token_of_other_weights_is_refused(versions: list[str]) -> None:
    with pytest.raises(StaleAnswer, match=re.escape(str(versions))):
        reward_of(Question([5, 6, 7], "1 + 1 = 2"), answer_of("1 + 1 = 2", versions), "3")


def test_the_trainer_computes_the_log_probabilities_of_answers_alone() -> None:
    model = fresh_model()
    rollouts = [Rollout([5, 6, 7], [8], [-0.5], 0), Rollout([5, 6], [8, 9, 2], [-0.5] * 3, 1)]
    expected = [own_logprobs(model, each.prompt + each.answer)[-len(each.answer) :] for each in rollouts]
    assert torch.allclose(compute_logprobs(model, rollouts), torch.cat(expected), atol=1e-4)


def test_held_out_questions_are_never_trained_on(tokenizer: PreTrainedTokenizerFast) -> None:
    trained, examined = ({make_question(Random(n), tokenizer, held_out=kind).right for n in range(400)} for kind in (False, True))
    assert len(trained) > 150 and len(examined) > 50 and not trained & examined


def test_an_answer_is_compared_with_its_group_only() -> None:
    found = advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]]))
    assert torch.allclose(found[0], torch.tensor([1.5, -0.5, -0.5, -0.5]), atol=1e-3)
    assert found[1].count_nonzero() == 0
    assert torch.allclose(found[2], torch.tensor([0.866, 0.866, -0.866, -0.866]), atol=1e-3)


def test_the_loss_is_that_of_the_paper_and_a_ratio_beyond_the_clip_teaches_nothing() -> None:
    then = torch.full((5,), -1.0)
    now = (then + torch.tensor([0.0, 0.1, 0.5, -0.5, -0.5])).requires_grad_()
    advantage, share = torch.tensor([2.0, -1.0, 1.0, -1.0, 1.0]), torch.full((5,), 0.2)
    loss = grpo_loss(now, then, advantage, share, clip=0.2)
    ratio = (now - then).exp().tolist()
    expected = -0.2 * (2 * ratio[0] - ratio[1] + 1.2 - 0.8 + ratio[4])
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    (grad,) = torch.autograd.grad(loss, now)
    assert grad.tolist() == pytest.approx([-0.4 * ratio[0], 0.2 * ratio[1], 0, 0, -0.2 * ratio[4]], abs=1e-6)


COMMAND = (sys.executable, "-m", "demo.grpo")


@pytest.mark.soak
def test_the_command_makes_nearly_all_answers_right() -> None:
    output = subprocess.run([*COMMAND, "--seed", "4"], capture_output=True, text=True, check=True, timeout=600).stdout
    ((before, after),) = re.findall(r"^held-out answers: (\d+)% were right, now (\d+)%", output, re.MULTILINE)
    assert int(before) < 50 and int(after) > 90


@pytest.mark.soak
def test_ctrl_c_ends_the_command_and_its_fleet() -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True, start_new_session=True) as command:
        assert command.stdout is not None
        head = next(line for line in command.stdout if "serves the model" in line)
        os.killpg(command.pid, signal.SIGINT)  # as a terminal does
        assert command.stdout.read().endswith("stopped, and the fleet with it\n")
        assert command.wait(timeout=60) == 130
    with pytest.raises(RequestFailed, match="does not answer"):
        RouterClient(head.split()[0]).get("/ready")
