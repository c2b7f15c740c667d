"""A draft model beside the served one, driven by the scheduler that decodes: answers are those without it, and what it proposes
is what transformers' model says of the same tokens, whatever was drafted before."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from common.errors import ConfigError
from common.executor import count_right
from engine.parallel import Group
from tests.engine.checkpoints import VOCAB, llama, qwen3, saved
from tests.engine.drafting import CONTEXT, KINDS, made, requests, serve, take_in
from tests.engine.ranks import least_of, on_ranks


def nearly(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    """The same model with other weights, by so much of their deviation."""
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight += noise * weight.std() * torch.randn_like(weight)
    return model


def drafted_by(model: PreTrainedModel, known: list[int], count: int) -> list[int]:
    with torch.no_grad():
        for _ in range(count):
            known = [*known, int(model(torch.tensor([known])).logits[0, -1].argmax())]
    return known[-count:]


@pytest.mark.parametrize("changes", [{}, {"graphs": "off"}, {"quantization": "int8"}], ids=["recorded", "layer by layer", "int8"])
def test_the_drafts_of_the_same_model_are_all_right(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Also sampled ones, because they have the same noise; a penalty is nothing that it knows."""
    path = saved(qwen3(), tmp_path)
    asked = requests(11, KINDS[:3], 1)
    without, with_it = (serve(made(path, drafts, **changes), asked, chunk_tokens=400) for drafts in (None, path))
    assert with_it.answers == without.answers
    counters = with_it.counters
    right = sum(int(count_right(each.plan, each.tokens, each.drafted).sum()) for each in with_it.steps)
    assert right == counters.tokens_drafted > 100
    assert with_it.drafts == (counters.tokens_drafted, counters.tokens_accepted)
    assert right - 24 < counters.tokens_accepted <= right, "some are behind an ending"
    assert counters.steps < 0.6 * without.counters.steps


def test_a_model_that_agrees_now_and_then_changes_no_answer_and_proposes_what_transformers_says(tmp_path: Path) -> None:
    """Prompts are longer than what it may compute before a step, and some drafts of a row are right."""
    served, draft = qwen3(), tmp_path / "small"
    path, small = saved(served, tmp_path / "served"), nearly(served, 0.15)
    small.save_pretrained(draft)
    asked = requests(12, KINDS, 2)
    without, with_it = serve(made(path, None), asked), serve(made(path, draft), asked)
    assert with_it.answers == without.answers
    counters = with_it.counters
    assert counters.tokens_drafted > 100
    assert 0.05 < counters.tokens_accepted / counters.tokens_drafted < 0.95
    greedy = requests(1, KINDS[:1], 4) + requests(1, KINDS[:1], 5)
    known: dict[int, list[int]] = {}
    for result in serve(made(path, draft), greedy).steps:
        plan = result.plan
        for start in plan.starts:
            known[start.row] = greedy[len(known)][0].tolist()
        for row in np.unique(plan.draft_rows).tolist():
            ours = plan.draft_tokens[plan.draft_rows == row].tolist()
            assert ours == drafted_by(small, known[row], len(ours))
        take_in(known, result)


def test_two_ranks_share_out_a_draft_model_of_another_shape(tmp_path: Path) -> None:
    path, draft = saved(qwen3(), tmp_path / "served"), saved(llama(num_hidden_layers=1), tmp_path / "small")
    agree, asked = least_of(2), requests(4, KINDS, 3)

    def run(group: Group) -> tuple[list[list[int]], int]:
        served = serve(made(path, draft, group, agree), asked)
        return served.answers, served.counters.tokens_drafted

    (ours, drafted), theirs = on_ranks(2, run)
    assert (ours, drafted) == theirs and drafted > 50
    assert ours == serve(made(path, None), asked).answers


def test_pages_are_shared_out_between_both_models(tmp_path: Path) -> None:
    path = saved(qwen3(), tmp_path)
    alone, beside = made(path, None), made(path, path)
    assert beside.description.total_pages == alone.description.total_pages // 2
    assert beside.draft_model is not None
    needed = 2 * beside.description.layout.page_bytes * beside.description.layout.pages_for(CONTEXT)
    with pytest.raises(ConfigError, match=f"--speculative-config: with the draft model .*--kv-memory at least {needed} bytes"):
        made(path, path, kv_memory=f"{needed - 1}")
    assert made(path, path, kv_memory=f"{needed}").description.model.context_tokens == CONTEXT
    useful = [made(path, each, kv_memory="auto", max_running=2).description.total_pages for each in (None, path)]
    assert useful[0] == useful[1], "a host with memory for both has pages for all that rows can use"


def test_what_a_draft_model_lacks_is_said_of_it(tmp_path: Path) -> None:
    path = saved(qwen3(), tmp_path / "served")
    with pytest.raises(ConfigError, match=r"--speculative-config: with the draft model .*nowhere"):
        made(path, tmp_path / "nowhere")


def test_a_draft_model_with_a_shorter_context_is_refused_by_name(tmp_path: Path) -> None:
    path, short = saved(qwen3(), tmp_path / "served"), saved(qwen3(max_position_embeddings=64), tmp_path / "short")
    with pytest.raises(ConfigError, match=r"the draft model .*short: it has a context of 64 tokens.*--context-tokens 64"):
        made(path, short)


def test_a_vocabulary_of_another_size_is_no_hindrance(tmp_path: Path) -> None:
    """Checkpoints of one family pad their tables differently."""
    path = saved(qwen3(), tmp_path / "served")
    asked = requests(4, KINDS, 6)
    expected = serve(made(path, None), asked).answers
    for vocab in (VOCAB - 7, VOCAB + 9):
        draft = saved(nearly(qwen3(vocab_size=vocab), 0.0), tmp_path / f"{vocab}")
        assert serve(made(path, draft), asked).answers == expected
