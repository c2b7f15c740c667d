"""Models whose decode steps are recorded on CPU, however small they are.

Owns how the measurement of products is replaced by one that chooses C for everything, and a count of replays.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
from torch import Tensor

from engine.cpu.products import load_panel_product
from engine.models import linear as packing
from engine.models.linear import MeasuredProduct
from engine.replay import Recording, load_recorder

IN_C = load_panel_product()
CAN_RECORD = IN_C is not None and load_recorder() is not None


def pack_everything(monkeypatch: pytest.MonkeyPatch, ratios: dict[int, float] | None = None) -> None:
    """Every layer in float32 that is loaded from now on is packed for the product in C. ratios: its times beside torch's."""
    assert IN_C is not None
    product = IN_C
    measured = MeasuredProduct(product, ratios or dict.fromkeys(packing.ROWS, 0.5))
    monkeypatch.setattr(packing, "_LEAST_ITEMS", 0)
    monkeypatch.setattr(packing, "_LEAST_OUTPUTS", 0)
    monkeypatch.setattr(packing, "measure", lambda samples, products: measured)


@contextmanager
def counted_replays() -> Iterator[list[int]]:
    """How many calls each replay makes while this lasts."""
    made: list[int] = []
    original = Recording.run

    def counted(self: Recording, *args: object) -> tuple[Tensor, ...]:
        made.append(len(self._calls))
        return original(self, *args)  # type: ignore[arg-type]

    with mock.patch.object(Recording, "run", counted):
        yield made
