"""From logits to tokens, through a whole engine: against transformers' logits and the definitions, token by token; after a resume
and a handoff."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from common.executor import StepPlan, StepResult
from common.ids import Int32Array
from common.messages import TokenLogprob
from common.sampling_params import SamplingParams
from engine.torch_kernels import gumbel, token_noise
from tests.engine.checkpoints import VOCAB, llama, saved
from tests.engine.driver import Driver, handed_off
from tests.engine.exact import GREEDY
from tests.engine.logits.plain import Logits, log_softmax, processed
from tests.engine.test_graphs import EOS, TOKENS, Engine, prompts

NEAR = 1e-4
"""Between float32 here and in transformers."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama(num_hidden_layers=3)


@pytest.fixture(scope="module")
def path(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def asked(path: Path) -> list[SamplingParams]:
    """One of each kind. The bad words and biased tokens are what the answers would hold otherwise."""
    plain = Engine(path).answers(prompts(8), [GREEDY] * 8)
    words = (plain[6][2:3], plain[6][3:5], plain[6][6:9], plain[6][9:14])
    biases = tuple((token, -100.0 if at % 2 else -6.0) for at, token in enumerate(dict.fromkeys(plain[4])))
    ends = tuple(range(0, VOCAB, 2))
    return [
        replace(GREEDY, logprobs=0, prompt_logprobs=3),
        replace(GREEDY, repetition_penalty=1.8, logprobs=2),
        replace(GREEDY, presence_penalty=2.0, frequency_penalty=1.5, prompt_logprobs=0),
        replace(GREEDY, temperature=0.9, seed=3, repetition_penalty=0.6, frequency_penalty=-0.5),
        replace(GREEDY, logit_bias=biases, logprobs=20),
        replace(GREEDY, min_tokens=7, stop_token_ids=ends, prompt_logprobs=20),
        replace(GREEDY, bad_words=tuple(map(tuple, words)), logprobs=1),
        SamplingParams(
            max_new_tokens=99,
            temperature=1.2,
            seed=9,
            repetition_penalty=1.2,
            presence_penalty=1.0,
            logit_bias=biases,
            min_tokens=5,
            stop_token_ids=ends,
            bad_words=tuple(map(tuple, words)),
            logprobs=5,
            prompt_logprobs=5,
        ),
    ]


@dataclass(slots=True, eq=False)
class Recorder:
    """An engine, and what its results told of each row."""

    engine: Engine
    told: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    of_prompts: dict[int, list[TokenLogprob]] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        result = self.engine.run(plan)
        for heard, logprobs in ((self.told, result.logprobs), (self.of_prompts, result.prompt_logprobs)):
            for row, these in logprobs.by_row().items():
                heard.setdefault(row, []).extend(these)
        return result

    def answers(self, given: list[Int32Array], asked: list[SamplingParams], tokens: int, answered: int = 0) -> list[list[int]]:
        driver = Driver(self.run, self.engine.description, growing=True)
        return driver.answers(given, tokens, asked, chunk_tokens=20, answered=answered)


def logits_of(model: PreTrainedModel, tokens: list[int]) -> Logits:
    """The logits behind each token. [tokens, vocab]"""
    with torch.inference_mode():
        return np.asarray(model(torch.tensor([tokens])).logits[0].double().numpy())


def assert_told(told: list[TokenLogprob] | None, tokens: list[int], raw: Logits, most: int | None) -> None:
    """told: of tokens, of which raw are the logits, [tokens, vocab]."""
    if most is None:
        assert told is None
        return
    assert told is not None and [each.token_id for each in told] == tokens
    for own, logits in zip(told, raw, strict=True):
        expected = log_softmax(logits)
        assert own.logprob == pytest.approx(expected[own.token_id], abs=NEAR)
        ahead = (expected > own.logprob + NEAR).sum(), (expected >= own.logprob - NEAR).sum()
        assert ahead[0] < own.rank <= ahead[1], "rank"
        assert [share for _, share in own.top] == pytest.approx(np.sort(expected)[::-1][:most].tolist(), abs=NEAR)
        assert [share for _, share in own.top] == pytest.approx([expected[token] for token, _ in own.top], abs=NEAR)


@pytest.mark.parametrize("sizes", [(), (4, 8)], ids=["eager", "graphs"])
def test_mixed_rows_draw_and_report_what_transformers_and_the_definitions_say(
    model: PreTrainedModel, path: Path, asked: list[SamplingParams], sizes: tuple[int, ...]
) -> None:
    recorder = Recorder(Engine(path, sizes))
    answers = recorder.answers(prompts(8), asked, TOKENS)
    noise, others = token_noise(VOCAB, torch.device("cpu")), set[int]()
    for row, (prompt, answer, sampling) in enumerate(zip(prompts(8), answers, asked, strict=True)):
        known = prompt.tolist()
        raw = logits_of(model, [*known, *answer])[:-1]
        of_answer = raw[len(known) - 1 :]
        for at, (logits, token) in enumerate(zip(of_answer, answer, strict=True)):
            scores = processed(logits, known, answer[:at], sampling, EOS)
            if sampling.temperature:
                drawn = gumbel(torch.tensor([sampling.seed]), torch.tensor([len(known) + at]), noise)[0]
                scores = (scores - scores.max()) / sampling.temperature + drawn.double().numpy()
            assert scores[token] > scores.max() - NEAR, f"token {at} of row {row}"
            if token != int(logits.argmax()):
                others.add(row)
        assert_told(recorder.told.get(row), answer, of_answer, sampling.logprobs)
        of_prompt = recorder.of_prompts.get(row, [] if sampling.prompt_logprobs is not None else None)
        assert_told(of_prompt, known[1:], raw[: len(known) - 1], sampling.prompt_logprobs)
    assert others == set(range(1, 8)), "each parameter has changed some token"
    assert bool(recorder.engine.replays) == bool(sizes)


def test_an_answer_that_is_resumed_anywhere_goes_on_as_it_would_have(path: Path, asked: list[SamplingParams]) -> None:
    """In a graph, beside others. Prompts are not reported again."""
    through = Engine(path).answers(prompts(8), asked)
    for answered in (1, 6):
        known = [np.array([*p, *a[:answered]], dtype=np.int32) for p, a in zip(prompts(8), through, strict=True)]
        recorder = Recorder(Engine(path, (8,)))
        assert recorder.answers(known, asked, TOKENS - answered, answered) == [answer[answered:] for answer in through]
        assert recorder.of_prompts == {}


def test_a_row_that_is_handed_off_into_a_row_of_another_goes_on_as_it_would_have(path: Path, asked: list[SamplingParams]) -> None:
    """The rows 4 to 7 have served others. They get the pages of the rows 0 to 3, whose prompts are computed."""
    given, engine = prompts(4), Engine(path)
    wanted = [sampling for sampling in asked if sampling.temperature or sampling.needs_tokens][-4:]
    through = Engine(path).answers(given, wanted)
    Driver(engine.run, engine.description).answers(prompts(8), 5, [asked[(at + 3) % 8] for at in range(8)])
    assert handed_off(engine.run, given, wanted, TOKENS, pages_per_row=6, first_row=4) == through
