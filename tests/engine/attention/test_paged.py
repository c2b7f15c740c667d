"""What only the torch backend promises: how much it gathers, and what it makes once for all layers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine import torch_attention as paged
from engine.ports import LayerAttention
from engine.torch_attention import PagedAttention
from tests.engine.attention.steps import Shape, Step

SHAPE = Shape(heads=6, kv_heads=2, dim=16, page_size=5, layers=(LayerAttention(0.25), LayerAttention(0.25, 7)) * 2)
CHUNKS = [(0, 1), (0, 7), (3, 1), (9, 6), (20, 20)]
LENGTHS = [1, 4, 5, 6, 23, 40, 11, 12, 12]
SLOT_BYTES = 2 * 2 * 16 * 4
"""The bytes of a token's keys and values in one layer."""


def gather_at_most(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(paged, "GATHER_BYTES", {"cpu": tokens * SLOT_BYTES})


def planned(step: Step) -> PagedAttention:
    attention = PagedAttention(step.memory, SHAPE.heads, SHAPE.layers, SHAPE.dtype)
    attention.plan(step.tokens)
    return attention


@pytest.mark.parametrize("tokens_at_once", [0, 24, 80])
def test_how_much_is_gathered_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch, tokens_at_once: int) -> None:
    gather_at_most(monkeypatch, tokens_at_once)
    step = Step(SHAPE, CHUNKS, LENGTHS)
    attention = planned(step)
    for layer in range(len(SHAPE.layers)):
        assert step.error(layer, attention.run(layer, step.query)) < 2e-6


@pytest.mark.parametrize("elements", [1, 100, 400])
def test_chunks_whose_masks_are_too_large_attend_in_pieces(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """A group has 3 heads: so one token at a time, or some."""
    monkeypatch.setattr(paged, "MASK_ELEMENTS", elements)
    step = Step(SHAPE, CHUNKS, LENGTHS)
    attention = planned(step)
    masks: list[int] = []
    attend = paged._attention

    def noted(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, how: LayerAttention) -> Tensor:
        masks.append(0 if mask is None or mask.ndim > 2 else mask.numel())
        return attend(query, keys, values, mask, how)

    monkeypatch.setattr(paged, "_attention", noted)
    for layer in range(len(SHAPE.layers)):
        assert step.error(layer, attention.run(layer, step.query)) < 2e-6
    assert 0 < max(masks) <= max(elements, 3 * 45)


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[str]:
    calls: list[str] = []
    true: Callable[..., Tensor] = getattr(owner, name)

    def counting(*args: object, **kwargs: object) -> Tensor:
        calls.append(name)
        return true(*args, **kwargs)

    monkeypatch.setattr(owner, name, counting)
    return calls


@pytest.mark.parametrize(("tokens_at_once", "calls"), [(10**6, 1), (80, 3), (0, len(LENGTHS))])
def test_decode_rows_attend_together_as_far_as_the_gathered_pages_stay_bounded(
    monkeypatch: pytest.MonkeyPatch, tokens_at_once: int, calls: int
) -> None:
    """80 tokens: four rows of up to 6, two of up to 40, three of up to 12."""
    gather_at_most(monkeypatch, tokens_at_once)
    step = Step(SHAPE, [], LENGTHS)
    attention = planned(step)
    attends = counted(monkeypatch, torch.nn.functional, "scaled_dot_product_attention")
    reads = counted(monkeypatch, Tensor, "tolist") + counted(monkeypatch, Tensor, "item")
    attention.run(0, step.query)
    assert len(attends) == calls
    assert reads == [], "a layer waits for the device"


def test_masks_and_positions_are_made_once_and_not_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    gather_at_most(monkeypatch, 80)
    step = Step(SHAPE, CHUNKS, LENGTHS)
    attention = planned(step)
    made = [counted(monkeypatch, torch, name) for name in ("arange", "zeros")]
    for layer in range(len(SHAPE.layers)):
        attention.run(layer, step.query)
    assert made == [[], []]


def test_a_window_bounds_what_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 tokens of context in 8 pages; a window of 7 touches 2 of them, or 3 when it begins within a page."""
    step = Step(SHAPE, [(35, 5)], [40])
    attention = planned(step)
    pages: list[int] = []
    true = PagedAttention._gathered

    def counting(self: PagedAttention, view: Tensor, at: Tensor) -> Tensor:
        pages.append(at.numel())
        return true(self, view, at)

    monkeypatch.setattr(PagedAttention, "_gathered", counting)
    attention.run(1, step.query)
    assert pages == [3, 3, 2, 2]  # keys and values of the chunk, then of the row
