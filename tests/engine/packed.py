"""Models whose decode steps are recorded on CPU, however small they are.

Owns how the measurement of products is replaced by one that chooses C for everything.
"""

import pytest

from engine.cpu.products import load_panel_product
from engine.models import linear as packing
from engine.models.linear import MeasuredProduct
from engine.replay import load_recorder

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
