"""Trains the demo model by GRPO while a fleet serves it (Shao et al. 2024, https://arxiv.org/abs/2402.03300).

Owns the questions, the loss and the loop. Uses the fleet as any trainer can, by its HTTP API; does not know how it serves.

The demo model adds numbers where a question has a wording of its corpus. Here it meets other wordings. Each step:

    sample   the fleet answers each question several times, and tells the log probability of each token
    train    answers that are better than others to the same question become likelier, within a clipped ratio
    update   the fleet changes to the new weights, which are named for the number of steps that made them

    python -m demo.grpo
"""

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from common.errors import TandemError
from demo.evaluate import MODEL
from demo.examples import Example, collate
from launch.engine import Engine

WORDINGS = ("{}\n{}", "{}, {}", "{}   +   {}", "{} coins and {} coins")
"""The corpus has none of them."""
LARGEST = 20
MOST_TOKENS = 14
"""A right answer has at most 12 tokens, and its end."""
HEAD = "step | held out | reward |  logprobs |  sample |   train |  update |  paused"


class StaleAnswer(TandemError):
    """An answer came from other weights than those that the trainer has."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train."""

    prompts: int = 32
    """Questions in each step."""
    group: int = 16
    """Answers to each question, which are compared: 2 or more."""
    batches: int = 4
    """Parts of the answers of a step: the optimizer moves the weights once for each."""
    rate: float = 5e-5
    clip: float = 0.2
    held_out: int = 100
    """Questions that measure the model after each step."""
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt in token ids, and the right answer to it."""

    prompt: list[int]
    right: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled answer of the fleet."""

    prompt: list[int]
    answer: list[int]
    """Token ids, with the end if it has one."""
    logprobs: list[float]
    """The log probability of each token in `answer`, as the fleet told it."""
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did, and how many seconds its parts took."""

    step: int
    held_out: float
    """Share of right greedy answers to held-out questions after the update."""
    reward: float
    """Mean of the sampled answers."""
    difference: float
    """The largest between a token's log probability as the fleet told it and as the trainer computes it with the same weights:
    rounding. Measured on the first batch; NaN where there was none."""
    sample_s: float
    train_s: float
    update_s: float
    paused_s: float
    """Part of the update in which the fleet dispatched nothing."""

    def __str__(self) -> str:
        return (
            f"{self.step:4} | {self.held_out:8.0%} | {self.reward:6.2f} | ± {self.difference:7.1e} | {self.sample_s:5.1f} s | "
            f"{self.train_s:5.1f} s | {self.update_s:5.2f} s | {1000 * self.paused_s:4.0f} ms"
        )


def make_question(random: Random, tokenizer: PreTrainedTokenizerFast, *, held_out: bool) -> Question:
    """An addition. One pair of numbers in five is held out."""
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1) if ((3 * a + b) % 5 == 0) == held_out]
    a, b = random.choice(pairs)
    chat = [{"role": "user", "content": random.choice(WORDINGS).format(a, b)}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    return Question(prompt, f"{a} + {b} = {a + b}")


def reward_of(question: Question, answer: Mapping[str, Any], version: str) -> float:
    """1 for the right text with its end, else 0. answer: as POST /generate sends it. Raises StaleAnswer unless every token came
    from these weights; weights may change in the middle of an answer."""
    versions = {span["version"] for span in answer["meta_info"]["weight_versions"]}
    if versions != {version}:
        raise StaleAnswer(f"an answer came from the weights {sorted(versions)}, and must come from {version!r}")
    return float(answer["text"] == question.right and answer["meta_info"]["finish_reason"]["type"] == "stop")


def compute_logprobs(model: PreTrainedModel, rollouts: Sequence[Rollout]) -> Tensor:
    """The log probabilities of the tokens of all answers, one answer after the other, by the model: [tokens], float32."""
    pairs = [(each.prompt, each.answer) for each in rollouts]
    examples = [Example(prompt + answer, [False] * len(prompt) + [True] * len(answer)) for prompt, answer in pairs]
    ids, counts = collate(examples, pad=0)
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    logits = model.lm_head(hidden[counts[:, 1:]])
    logprobs: Tensor = logits.log_softmax(-1).gather(1, ids[:, 1:][counts[:, 1:]][:, None])[:, 0]
    return logprobs


def advantages(rewards: Tensor) -> Tensor:
    """How much better an answer is than the others to its prompt, in standard deviations. Shapes: [prompts, group]."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def grpo_loss(now: Tensor, then: Tensor, advantage: Tensor, share: Tensor, clip: float) -> Tensor:
    """Equation 3 of the paper without its KL term. Shapes: [tokens], float32. now, then: log probabilities, by the model and as
    they were when the tokens were sampled. share: of each token in the mean, in which every answer counts the same."""
    ratio = (now - then).exp()
    return -(torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage) * share).sum()


class Trainer:
    """Trains a model that a fleet serves. Its methods raise RequestFailed and StaleAnswer."""

    def __init__(self, engine: Engine, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
        self._engine, self._model, self._tokenizer, self._recipe = engine, model, tokenizer, recipe
        self._random, of_exam = Random(f"grpo {recipe.seed}"), Random("held out")
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._exam = [make_question(of_exam, tokenizer, held_out=True) for _ in range(recipe.held_out)]
        self._step = 0
        self._update()

    def examine(self) -> float:
        """Share of right greedy answers to held-out questions."""
        greedy = {"temperature": 0, "max_new_tokens": MOST_TOKENS}
        answers = self._engine.generate([question.prompt for question in self._exam], greedy)
        pairs = zip(self._exam, answers, strict=True)
        return sum(reward_of(question, answer, str(self._step)) for question, answer in pairs) / len(self._exam)

    def step(self) -> StepReport:
        """Sample, train and update once."""
        began_s = time.monotonic()
        rollouts = self._sample()
        sampled_s = time.monotonic()
        difference = self._improve(rollouts)
        trained_s = time.monotonic()
        self._step += 1
        paused_s = self._update()
        updated_s = time.monotonic()
        return StepReport(
            step=self._step,
            held_out=self.examine(),
            reward=sum(rollout.reward for rollout in rollouts) / len(rollouts),
            difference=difference,
            sample_s=sampled_s - began_s,
            train_s=trained_s - sampled_s,
            update_s=updated_s - trained_s,
            paused_s=paused_s,
        )

    def _sample(self) -> list[Rollout]:
        """The answers to new questions, group after group. Temperature 1 samples from the distribution that log probabilities
        describe."""
        recipe, random = self._recipe, self._random
        questions = [make_question(random, self._tokenizer, held_out=False) for _ in range(recipe.prompts)]
        sampling = {"n": recipe.group, "temperature": 1, "max_new_tokens": MOST_TOKENS}
        seeded = [sampling | {"sampling_seed": random.getrandbits(32)} for _ in questions]
        prompts = [question.prompt for question in questions]
        groups: list[Any] = self._engine.generate(prompts, seeded, return_logprob=True)
        rollouts = []
        for question, group in zip(questions, groups, strict=True):
            for answer in group:
                logprobs = [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]
                reward = reward_of(question, answer, str(self._step))
                rollouts.append(Rollout(question.prompt, answer["output_ids"], logprobs, reward))
        return rollouts

    def _improve(self, rollouts: Sequence[Rollout]) -> float:
        """Several steps of the optimizer. A group whose answers are all right, or all wrong, teaches nothing and is left out.
        Returns `StepReport.difference`."""
        rewards = torch.tensor([rollout.reward for rollout in rollouts]).view(-1, self._recipe.group)
        useful = [pair for pair in zip(rollouts, advantages(rewards).flatten().tolist(), strict=True) if pair[1]]
        self._random.shuffle(useful)
        size, difference = max(1, math.ceil(len(useful) / self._recipe.batches)), math.nan
        for first in range(0, len(useful), size):
            batch, gains = zip(*useful[first : first + size], strict=True)
            lengths = torch.tensor([len(rollout.answer) for rollout in batch])
            advantage = torch.tensor(gains).repeat_interleave(lengths)
            share = (1 / lengths / len(batch)).repeat_interleave(lengths)
            now = compute_logprobs(self._model, batch)
            then = torch.tensor([logprob for rollout in batch for logprob in rollout.logprobs])
            if first == 0:  # the model still has the weights that sampled
                difference = float((now - then).detach().abs().max())
            self._optimizer.zero_grad()
            torch.autograd.backward(grpo_loss(now, then, advantage, share, self._recipe.clip))
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
        return difference

    def _update(self) -> float:
        """Give the fleet the model's weights. Returns for how many seconds it dispatched nothing."""
        answer = self._engine.update_weights_from_tensor(self._model.named_parameters(), weight_version=str(self._step))
        return float(answer["paused_s"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=Recipe.seed, help="of the questions and the sampled answers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the fleet has threads too, and two that spin on one core are slower than one
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), AutoTokenizer.from_pretrained(MODEL)
    print("starting a fleet: one prefill and one decode instance", flush=True)
    try:
        with Engine(str(MODEL), dtype="float32", grammar="off") as engine:
            began_s = time.monotonic()
            trainer = Trainer(engine, model, tokenizer, Recipe(seed=arguments.seed))
            before = after = trainer.examine()
            print(f"{engine.url} serves the model: {before:.0%} of held-out answers are right\n{HEAD}", flush=True)
            for _ in range(arguments.steps):
                report = trainer.step()
                after = report.held_out
                print(report, flush=True)
            print(
                f"held-out answers: {before:.0%} were right, now {after:.0%}, in {time.monotonic() - began_s:.0f} s", flush=True
            )
    except KeyboardInterrupt:
        print("\nstopped, and the fleet with it", flush=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
