"""The tests in this folder need a CUDA card. They are marked `gpu`, and skipped where there is none.

Owns which warnings are errors here: ours, and not those of what is imported on a host with a card.
"""

from pathlib import Path

import pytest
import torch

from launch.child import find_programs

FILTERS = (
    "default",
    r"error:::(common|engine|prefill|decode|kv_transfer|router|simulation|bench|benchmarks|launch|demo|tests)(\.|$)",
    "ignore:Synchronization debug mode is a prototype feature",
)
"""The later ones come first. torch says the last one at the first `set_sync_debug_mode`, and would not set it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here, has_card = Path(__file__).parent, torch.cuda.is_available()
    if has_card:
        find_programs()
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker("gpu")
            item.add_marker(pytest.mark.filterwarnings(*FILTERS))
            if not has_card:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
