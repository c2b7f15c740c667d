"""A row's fault ends that row: its neighbours' tokens are those that they have without it, on every way through a step.

Owns the faults: logits that are not finite, a processor that raises where a row begins, and one that raises where it computes.
Those of matchers are in `grammar/test_masks.py`, those of adapters in `test_lora.py`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from common.executor import Chunk, EngineDescription, RowStart, StepPlan, StepResult
from common.ids import Int32Array
from common.sampling_params import SamplingParams
from engine import logits_processors
from engine.models.weights import WeightSlots
from engine.ports import SampledRows
from tests.engine.checkpoints import llama, prompts_of, saved
from tests.engine.churn import answer_without_drafts, asked_by, check
from tests.engine.driver import Driver
from tests.engine.exact import runner
from tests.engine.packed import CAN_RECORD, pack_everything
from tests.engine.test_graphs import Engine

BROKEN = 7
"""The token whose embedding is no number. No prompt but the faulty one has it."""
GREEDY = SamplingParams(max_new_tokens=99, temperature=0.0, seed=11)
KINDS = [
    GREEDY,
    SamplingParams(max_new_tokens=99, temperature=0.9, seed=5),
    SamplingParams(max_new_tokens=99, temperature=0.8, top_k=40, top_p=0.9, seed=7, repetition_penalty=1.2, logprobs=2),
    SamplingParams(max_new_tokens=99, temperature=0.0, logprobs=1),
]
TOKENS = 12
Run = Callable[[StepPlan], StepResult]
Served = tuple[Run, EngineDescription]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its own answers hold no BROKEN: that logit is far below the others."""
    made = llama(tie_word_embeddings=False)
    with torch.no_grad():
        made.model.embed_tokens.weight[BROKEN] = torch.nan
        made.lm_head.weight[BROKEN] = 0.0
    return saved(made, tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def loads_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints with such weights are refused; here they stand for numbers that overflow while they are computed."""
    monkeypatch.setattr(WeightSlots, "_refuse_infinite", lambda self, ranges: None)


@pytest.fixture(params=["layer by layer", "in graphs", "recorded"])
def engine(
    request: pytest.FixtureRequest, model: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Run, EngineDescription]]:
    if request.param != "recorded":
        made = Engine(model, (1, 2, 4, 6) if request.param == "in graphs" else ())
        yield made.run, made.description
        return
    if not CAN_RECORD:
        pytest.skip("there is no C compiler")
    pack_everything(monkeypatch)
    one = runner(model, lambda text: None, max_running=8, page_size=8, dtype="float32")
    yield lambda plan: one.launch(plan).wait(), one.description


def prompts() -> list[Int32Array]:
    """Without the broken token."""
    return [np.where(prompt == BROKEN, BROKEN + 1, prompt).astype(np.int32) for prompt in prompts_of(3, 17, 9, 30)]


def faulty(length: int, at: int) -> Int32Array:
    prompt = prompts_of(length)[0].copy()
    prompt[at] = BROKEN
    return prompt


def test_a_row_whose_logits_are_not_finite_fails_and_its_neighbours_tokens_are_as_without_it(
    engine: Served,
) -> None:
    run, description = engine
    quiet = Driver(run, description).answers(prompts(), TOKENS, KINDS)
    failed: list[dict[int, str]] = []

    def kept(plan: StepPlan) -> StepResult:
        result = run(plan)
        failed.append({row: str(error) for row, error in result.failed.items()})
        return result

    for at, kind in enumerate([GREEDY, KINDS[1], KINDS[2], replace(GREEDY, min_tokens=50)]):
        asked = [*prompts()[:at], faulty(21, 4), *prompts()[at:]]
        failed.clear()
        answers = Driver(kept, description, growing=True).answers(
            asked, TOKENS, [*KINDS[:at], kind, *KINDS[at:]], chunk_tokens=16
        )
        assert answers[:at] + answers[at + 1 :] == quiet
        told = [each for each in failed if each]
        assert told and all(set(each) == {at} for each in told)
        assert all("not finite" in each[at] for each in told)


def test_pages_that_a_broken_row_has_written_break_nobody_who_takes_them_next(engine: Served) -> None:
    run, description = engine
    quiet = Driver(run, description).answers(prompts(), TOKENS, KINDS)
    for length in (60, 61, 63, 64):
        Driver(run, description).answers([faulty(length, 0), faulty(length, 30)], TOKENS, GREEDY)
        assert Driver(run, description, growing=True).answers(prompts(), TOKENS, KINDS, chunk_tokens=7) == quiet


@pytest.mark.parametrize("is_right", [True, False])
def test_what_breaks_behind_a_draft_fails_the_row_behind_the_tokens_before_it_if_the_draft_is_right(
    model: Path, is_right: bool
) -> None:
    """The draft is the broken token itself. A bias makes it right."""
    engine, prompt = Engine(model), prompts()[1]
    pages = np.arange(9, dtype=np.int32)
    sampling = replace(GREEDY, logit_bias=((BROKEN, 99.0),)) if is_right else GREEDY
    engine.run(StepPlan(1, (RowStart(0, pages, GREEDY),), (Chunk(0, 0, prompt[:-1], last=False),)))
    begins = RowStart(0, pages, sampling, len(prompt) - 1, last_token=int(prompt[-1]), token_ids=prompt)
    row, drafts = np.zeros(1, dtype=np.int32), np.full(2, BROKEN, dtype=np.int32)
    result = engine.run(StepPlan(2, (begins,), decode_rows=row, draft_rows=np.repeat(row, 2), draft_tokens=drafts))
    assert set(result.failed) == ({0} if is_right else set()) and result.failed_behind == ({0: 1} if is_right else {})
    assert (result.tokens[0] == BROKEN) is np.bool_(is_right) and min(result.drafted) >= 0


class Faulty(logits_processors.LogitBias):
    """Raises at the bias 13, when a row begins or when it is applied."""

    at: str

    def entries(self, start: RowStart) -> object:  # type: ignore[override]
        if self.at == "start" and any(bias == 13.0 for _, bias in start.sampling.logit_bias):
            raise IndexError("no such token")
        return super().entries(start)

    def apply(self, logits: torch.Tensor, rows: SampledRows) -> None:
        if self.at == "apply":
            raise RuntimeError("out of scratch")
        super().apply(logits, rows)


@pytest.mark.parametrize("at", ["start", "apply"])
@pytest.mark.parametrize("sizes", [(), (1, 2, 4, 6)], ids=["layer by layer", "in graphs"])
def test_a_processor_that_raises_ends_the_row_that_asked_for_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, at: str, sizes: tuple[int, ...]
) -> None:
    engine = Engine(model, sizes)
    quiet = Driver(engine.run, engine.description).answers(prompts(), TOKENS, KINDS)
    monkeypatch.setattr(logits_processors, "LogitBias", Faulty)
    monkeypatch.setattr(Faulty, "at", at, raising=False)
    engine, failed = Engine(model, sizes), list[dict[int, str]]()

    def kept(plan: StepPlan) -> StepResult:
        result = engine.run(plan)
        failed.append({row: str(error) for row, error in result.failed.items()})
        return result

    asked = [*prompts()[:2], prompts_of(11)[0], *prompts()[2:]]
    kinds = [*KINDS[:2], replace(GREEDY, logit_bias=((20, 13.0),)), *KINDS[2:]]
    answers = Driver(kept, engine.description, growing=True).answers(asked, TOKENS, kinds)
    assert answers[:2] + answers[3:] == quiet
    assert all(set(each) == {2} and "Faulty failed for this request" in each[2] for each in failed)


def test_a_step_of_sound_rows_fails_nobody(model: Path) -> None:
    """Rows of every kind, with drafts: see `churn`."""
    engine = Engine(model)
    requests = [each for each in asked_by(8, seed=9) if BROKEN not in each.prompt.tolist()]
    told = answer_without_drafts(engine.run, engine.description, requests)
    check(engine.run, engine.description, requests, told, wrong=0.4)
