"""What the host may read and overwrite while a card is behind: each part waits for its own event, and for no more than that."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.executor import StepPlan
from common.pages.layout import KVLayout
from engine.gpu.flashinfer import AttentionNeeds, FlashInferAttention
from engine.kv_memory import KVMemory
from engine.ports import Attention, LayerAttention, Segment, StepTokens
from engine.rows import BUFFERS, Staging
from engine.sampling import TokenLogprobsOnDevice, measure_logprobs
from engine.step_runner import LayerProgress, PendingStep
from engine.torch_kernels import Kernels
from tests.engine.fake_cuda import CARD, CardTensor, FakeStream, fake_card


@pytest.fixture
def card() -> Iterator[FakeStream]:
    with fake_card() as stream:
        yield stream


def test_a_step_gets_its_own_numbers_however_many_are_launched_before_it_runs(card: FakeStream) -> None:
    """The second time a buffer's turn comes, it is too short."""
    staging = Staging(CARD)
    sizes = [3] * BUFFERS + [5000] + [4] * (2 * BUFFERS)
    steps = [[np.full(size, number), np.full(2, -number)] for number, size in enumerate(sizes)]
    expected = [[array.tolist() for array in step] for step in steps]
    sent = []
    for number, step in enumerate(steps):
        sent.append(staging.send(step))
        for array in step:
            array.fill(-1)
        if number < BUFFERS:
            assert card.done == 0, "the host waits while there are buffers"
    card.run()
    assert [[array.tolist() for array in step] for step in sent] == expected


def silent() -> LayerProgress:
    return LayerProgress(CARD, 1, 0, None)


def drawn(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and their logits."""
    return torch.tensor(tokens, dtype=torch.int64, device=CARD), torch.zeros(len(tokens), device=CARD)


def test_tokens_are_read_when_their_own_step_is_done(card: FakeStream) -> None:
    ran: list[str] = []
    steps = []
    for name, tokens in (("first", [5, 6]), ("second", []), ("third", [8])):
        card.start(lambda name=name: ran.append(name))  # type: ignore[misc]
        steps.append(PendingStep(StepPlan(1), *drawn(tokens), silent()))
    assert ran == [] and not any(step.is_complete for step in steps)
    assert (steps[0].wait().tokens.tolist(), ran) == ([5, 6], ["first"])
    assert (steps[1].wait().tokens.tolist(), ran) == ([], ["first", "second"]), "its KV is written, though it samples nothing"
    assert (steps[2].wait().tokens.tolist(), ran) == ([8], ["first", "second", "third"])


def test_log_probabilities_are_read_when_their_step_is_done(card: FakeStream) -> None:
    packed = measure_logprobs(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([1]), most=1)
    told = TokenLogprobsOnDevice(np.array([5]), np.array([1]), packed.as_subclass(CardTensor))
    step = PendingStep(StepPlan(1), *drawn([1]), silent(), told, told)
    assert card.done == 0
    result = step.wait()
    for logprobs in (result.logprobs, result.prompt_logprobs):
        ((row, (own,)),) = logprobs.by_row().items()
        assert (row, own.token_id, own.rank, own.top[0][0]) == (5, 1, 2, 2)
        assert (own.logprob, own.top[0][1]) == pytest.approx((-1.407606, -0.407606))


def test_layers_are_reported_when_the_card_has_written_them_and_before_it_goes_on(card: FakeStream) -> None:
    written: list[int] = []
    reported: list[tuple[int, list[int]]] = []
    progress = LayerProgress(CARD, 4, 2, lambda layers: reported.append((layers, written.copy())))
    for layer in range(1, 5):
        card.start(lambda layer=layer: written.append(layer))  # type: ignore[misc]
        progress.written(layer)
    card.start(lambda: written.append(99))
    step = PendingStep(StepPlan(1), *drawn([3]), progress)
    assert written == [] and reported == []
    assert step.wait().tokens.tolist() == [3]
    assert reported == [(2, [1, 2]), (4, [1, 2, 3, 4])]


class Wrapper:
    """A wrapper as FlashInfer's: a plan writes its schedule to a buffer of the host, and starts its copy to the card."""

    def __init__(self, card: FakeStream) -> None:
        self._card, self._in_flight = card, False

    def plan(self, *args: object, **kwargs: object) -> None:
        assert not self._in_flight, "the schedule of the step before is overwritten while the card copies it"
        self._in_flight = True
        self._card.start(self._copied)

    def _copied(self) -> None:
        self._in_flight = False

    def reset_workspace_buffer(self, workspace: Tensor, schedule: Tensor) -> None:
        """The buffer of the host stays."""


class Library:
    """Stands in for the module `flashinfer`."""

    def __init__(self, card: FakeStream) -> None:
        self._card = card

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: object, **kwargs: object) -> Wrapper:
        return Wrapper(self._card)

    BatchDecodeWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper

    def fast_decode_plan(self, wrapper: Any, *args: object, **kwargs: object) -> None:
        wrapper.plan()


class NoKernels(Kernels):
    def page_indices(self, table: Tensor, rows: Tensor, indptr: Tensor, out: Tensor) -> None:
        """Its kernel would read what is not copied yet."""


def flashinfer(card: FakeStream) -> FlashInferAttention:
    layout = KVLayout(layers=2, kv_heads=2, head_dim=64, page_size=4, dtype="float16")
    layers = (LayerAttention(0.1), LayerAttention(0.1, window=7))
    needs = AttentionNeeds(KVMemory(layout, 8, CARD), 4, layers, torch.float16, max_rows=2, pages_per_row=4, prefill="fa2")
    return FlashInferAttention(needs, NoKernels(), Library(card))


CHUNK = (Segment(0, 1, 0, 1, 0),)


@pytest.mark.parametrize(
    ("kind", "chunks"),
    [(lambda made: made, ()), (lambda made: made, CHUNK), (lambda made: made.for_graph(2), ())],
    ids=["decode", "chunk and decode", "graph"],
)
def test_a_plan_waits_for_the_copies_of_the_one_before_and_not_for_its_own(
    card: FakeStream, kind: Callable[[FlashInferAttention], Attention], chunks: tuple[Segment, ...]
) -> None:
    attention = kind(flashinfer(card))
    table, rows = torch.zeros(3, 4, dtype=torch.int32, device=CARD), torch.arange(2, device=CARD)
    step = StepTokens(chunks, table, rows, rows + 9, np.array([9, 10]))
    started = [0]
    for _ in range(4):
        attention.plan(step)
        assert card.done == started[-1], "it waits for the plan before, and for nothing else"
        started.append(card.started)
    assert started[-1] > started[1] > 0
