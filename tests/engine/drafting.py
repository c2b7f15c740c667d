"""Requests that are served by one engine, colocated, with what proposes tokens beside it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from common.config import EngineConfig, ModelConfig
from common.drafting import Drafting
from common.executor import StepResult
from common.ids import ROUTER, AttemptId, Int32Array, RequestId, pack_ids
from common.instance.ports import RouterJoined, Send, StepsMeasured
from common.messages import Counters, Generate, TokenBatch
from common.sampling_params import SamplingParams
from common.step_cost import StepCost
from decode.scheduler import DecodeScheduler
from engine.kv_budget import Agree, as_offered
from engine.model_runner import ModelRunner
from engine.parallel import ALONE, Group
from tests.builders import instance, limits
from tests.engine.checkpoints import VOCAB

CONTEXT, DRAFTS = 128, 4
PAYS = StepCost(step_s=1.0, chunk_token_s=0.001, decode_row_s=0.001)
"""A step costs as much as a thousand rows of it: every draft pays."""
KINDS = [
    SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True),
    SamplingParams(max_new_tokens=33, temperature=0.9, seed=5, ignore_eos=True),
    SamplingParams(max_new_tokens=40, temperature=0.8, top_p=0.9, min_p=0.02, seed=7, stop_token_ids=tuple(range(400, VOCAB))),
    SamplingParams(max_new_tokens=26, temperature=1.0, top_k=9, seed=6, repetition_penalty=1.3, logprobs=1),
]


@dataclass(slots=True)
class Served:
    """answers: of each request. steps: what each step had. drafts: what clients are told of them."""

    answers: list[list[int]]
    drafts: tuple[int, int] = (0, 0)
    counters: Counters = field(default_factory=Counters)
    steps: list[StepResult] = field(default_factory=list)


def requests(
    count: int, kinds: Sequence[SamplingParams], seed: int, longest: int = 60
) -> list[tuple[Int32Array, SamplingParams]]:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest, count).tolist()
    return [(random.integers(3, VOCAB, each).astype(np.int32), kinds[at % len(kinds)]) for at, each in enumerate(lengths)]


def made(
    path: Path, draft: Path | None, group: Group = ALONE, agree: Agree = as_offered, *, is_head: bool = False, **changes: Any
) -> ModelRunner:
    fields: dict[str, Any] = {"device": "cpu", "page_size": 7, "kv_memory": "1360KiB", "max_running": 24, "grammar": "off"}
    engine = EngineConfig(**(fields | {"context_tokens": CONTEXT, "dtype": "float32"} | changes))
    drafting = None if draft is None else Drafting(DRAFTS, model=str(draft), is_head=is_head)
    return ModelRunner(ModelConfig(model=str(path)), engine, lambda text: None, group, agree, drafting=drafting)


def serve(runner: ModelRunner, asked: Sequence[tuple[Int32Array, SamplingParams]], chunk_tokens: int = 24) -> Served:
    """As a colocated instance does."""
    limited = replace(limits(chunk_tokens=chunk_tokens, max_waiting=99), drafting=runner.drafting)
    scheduler = DecodeScheduler(instance("d", "decode"), runner.description, limited)
    scheduler.handle(RouterJoined(ROUTER, 1), 0.0)
    scheduler.handle(StepsMeasured(PAYS), 0.0)
    for number, (prompt, sampling) in enumerate(asked):
        key = AttemptId(RequestId(f"{number}"), 0, ROUTER)
        scheduler.receive(ROUTER, Generate(key=key, prompt=pack_ids(prompt), sampling=sampling, first=0), 0.0)
    served, over = Served([[] for _ in asked]), 0
    while over < len(asked):
        decision = scheduler.decide(0.0)
        assert decision.plan is not None, "nothing more would come"
        served.steps.append(
            replace(runner.run(decision.plan), drafting_s=(0.001, 0.001))
        )  # each rank here plans for itself: all alike
        for action in [*decision.actions, *scheduler.step_done(served.steps[-1], 0.0)]:
            if isinstance(action, Send) and isinstance(action.message, TokenBatch):
                for delta in action.message.deltas:
                    served.answers[int(delta.key.request_id)] += delta.token_ids
                    served.drafts = served.drafts[0] + delta.drafts[0], served.drafts[1] + delta.drafts[1]
                    over += delta.ending is not None
    assert scheduler.report().load.pages_free == runner.description.total_pages
    served.counters = scheduler.report().counters
    return served


def take_in(known: dict[int, list[int]], result: StepResult) -> None:
    """What a step has sampled goes behind what is known of its rows, as far as its drafts are right."""
    plan = result.plan
    for row, token in zip(plan.sampled_rows.tolist(), result.tokens.tolist(), strict=True):
        known[row].append(token)
        drafts = plan.draft_rows == row
        for draft, more in zip(plan.draft_tokens[drafts].tolist(), result.drafted[drafts].tolist(), strict=True):
            if draft != known[row][-1]:
                break
            known[row].append(more)
