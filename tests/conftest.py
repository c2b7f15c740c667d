"""What every test has in common: the flag for long runs, and no deadline for generated examples.

Owns no fixtures: those live where they are used.
"""

import pytest
from hypothesis import settings

settings.register_profile("tandem", deadline=None)  # a busy machine is no bug
settings.load_profile("tandem")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="also run the tests that are marked as soak: long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--soak"):
        return
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="long: runs with --soak"))
