"""Settings for every test: one thread for each process, fixed examples, and the flag for long runs.

Owns no fixtures: those live where they are used.

Verdicts do not depend on luck or load. Hypothesis has no deadline and makes the same examples each time. `./check --long` passes
`--hypothesis-profile=random`, which makes new ones. A deadline in a test only ends a test that hangs, and is a minute or more.
"""

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: its threads spin when other processes have the cores

pytest.register_assert_rewrite("tests.kv_transfer.contract", "tests.kv_transfer.agents")  # they fail like a test file

SLOWEST_FIRST = (
    *("tests/kv_transfer/test_transports.py", "tests/e2e", "tests/chaos", "tests/bench", "tests/launch", "tests/simulation"),
    *("tests/engine/kernels/test_kernels.py", "tests/engine/test_weight_groups.py", "tests/soak", "tests/shape"),
)
"""When several workers share the tests, the slowest files go first: otherwise one of them runs alone at the end."""
UNHURRIED = [HealthCheck.too_slow]
settings.register_profile("fixed", deadline=None, suppress_health_check=UNHURRIED, derandomize=True)
settings.register_profile("random", deadline=None, suppress_health_check=UNHURRIED)
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="also run the tests that are marked as soak: long")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests and the libraries that they import stay until the end: a garbage collector that looks at them takes a
    third of the time of collecting tests, and then a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: [not item.nodeid.startswith(path) for path in SLOWEST_FIRST])
    if config.getoption("--soak"):
        return
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="long: runs with --soak"))
