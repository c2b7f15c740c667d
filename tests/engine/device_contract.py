"""The contract of an engine on a device, run on the CPU and on a card: answers, steps in flight, rows that are given up, and
layers that are reported.

Owns what is compared. All of it is in float32 with attention in torch, where a token does not depend on its batch.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from common.executor import Chunk, RowStart, StepPlan, StepResult
from common.sampling_params import SamplingParams
from engine.model_runner import ModelRunner
from engine.step_runner import PendingStep
from tests.engine import exact
from tests.engine.checkpoints import llama, mistral, prompts_of, qwen2, qwen3, saved
from tests.engine.driver import Driver
from tests.engine.exact import GREEDY
from tests.engine.planned import SequencePlanner

SAMPLED = SamplingParams(max_new_tokens=99, temperature=0.9, top_p=0.95, seed=11)
MANY_IN_FLIGHT = 12
"""More than the pinned buffers through which a step's arrays reach a card."""
PAUSE_CYCLES = 10**8
"""About 50 ms of a card, in which no step can begin."""


class EngineContract:
    """device: as `--device`; a subclass says it."""

    device: str

    def runner(self, path: Path, **changes: object) -> ModelRunner:
        fields: dict[str, object] = {"device": self.device, "dtype": "float32", "attention": "torch", "graphs": "off"}
        return exact.runner(path, lambda text: None, **(fields | changes))

    def results(self, made: ModelRunner, plans: Sequence[StepPlan], in_flight: int) -> list[StepResult]:
        """The result of each plan, with so many in flight on a card that begins late. None is read before the last has come."""
        results: list[StepResult] = []
        waiting: deque[PendingStep] = deque()
        with made.on_device():
            if self.device != "cpu":
                torch.cuda._sleep(PAUSE_CYCLES)  # type: ignore[no-untyped-call]
            for plan in plans:
                waiting.append(made.steps.launch(plan))
                if len(waiting) == in_flight:
                    results.append(waiting.popleft().wait())
            results += [pending.wait() for pending in waiting]
        return results

    @pytest.mark.parametrize("make", [llama, qwen3, qwen2, mistral])
    def test_greedy_answers_are_those_of_transformers(self, tmp_path: Path, make: Callable[[], PreTrainedModel]) -> None:
        model = make()
        made = self.runner(saved(model, tmp_path))
        exact.assert_exact(model, exact.answers(made, prompts_of(1, 17, 90), 6, chunk_tokens=37))

    @pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_steps_in_flight_give_the_tokens_of_one_step_at_a_time(self, tmp_path: Path, sampling: SamplingParams) -> None:
        """Rows start, grow, end and start again while earlier steps of theirs are in flight, and take over pages of such rows."""
        made = self.runner(saved(qwen3(), tmp_path), max_running=4, kv_memory="336KiB", context_tokens=64)
        random = np.random.default_rng(1)
        asked, counts = random.integers(1, 40, (2, 14))
        assert int(((asked + counts) // 16).sum()) > made.description.total_pages, "pages are used again"
        planner = SequencePlanner(made.description, 24, asked, np.minimum(counts, 20), sampling)
        plans = list(iter(planner.next, None))
        one, two, many = ([r.tokens.tolist() for r in self.results(made, plans, count)] for count in (1, 2, MANY_IN_FLIGHT))
        assert two == one and many == one
        assert len({token for tokens in one for token in tokens}) > 20, "tokens that would show a difference"

    def test_a_row_that_is_given_up_in_flight_is_another_requests_at_once(self, tmp_path: Path) -> None:
        """On the same pages, beside a row that goes on."""
        made = self.runner(saved(llama(), tmp_path), max_running=2)
        given_up, after, beside = prompts_of(20, 33, 9)
        alone = [Driver(made.run, made.description).answers([prompt], 12, GREEDY)[0] for prompt in (after, beside)]
        pages = np.arange(4, dtype=np.int32)
        both, step = np.arange(2, dtype=np.int32), 0
        plans = [
            StepPlan(
                step,
                starts=(RowStart(0, pages, GREEDY), RowStart(1, pages + 4, GREEDY)),
                chunks=(Chunk(0, 0, given_up, last=True), Chunk(1, 0, beside, last=True)),
            ),
            *(StepPlan(1 + number, decode_rows=both) for number in range(3)),
            StepPlan(4, starts=(RowStart(0, pages, GREEDY),), chunks=(Chunk(0, 0, after, last=True),), decode_rows=both[1:]),
            *(StepPlan(5 + number, decode_rows=both) for number in range(7)),
        ]
        results = self.results(made, plans, len(plans))
        of_row = {row: [int(r.tokens[r.plan.sampled_rows.tolist().index(row)]) for r in results] for row in (0, 1)}
        assert of_row[0][4:] == alone[0][:8] and of_row[1] == alone[1]

    def test_layers_that_are_reported_are_in_their_pages(self, tmp_path: Path) -> None:
        """What is read then, by another stream of a card, is what is there after the step."""
        made = self.runner(saved(llama(num_hidden_layers=6), tmp_path), layer_groups=3)
        layout = made.description.layout
        (prompt,) = prompts_of(200)
        pages = layout.pages_for(len(prompt))
        kv = made.memory.pool[:pages].view(torch.uint8).view(pages, layout.layers, -1)
        aside = contextlib.nullcontext() if self.device == "cpu" else torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        seen: list[tuple[int, torch.Tensor]] = []

        def look(layers: int) -> None:
            with aside:
                seen.append((layers, kv[:, :layers].cpu().clone()))

        start = RowStart(0, np.arange(pages, dtype=np.int32), GREEDY)
        made.run(StepPlan(1, starts=(start,), chunks=(Chunk(0, 0, prompt, last=True),)), look)
        assert [layers for layers, _ in seen] == [2, 4, 6]
        after = kv.cpu()
        assert all(torch.equal(then, after[:, :layers]) for layers, then in seen)
        assert bool(after.view(torch.float32).abs().amax(-1).gt(0).all()), "every layer was written"
