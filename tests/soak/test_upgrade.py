"""The short form of the soak: a fleet goes up, back and up again, and no client notices.

The gate has the messages of both releases judge each other (`tests/common/test_versions.py`): processes take too long for it.
"""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.fleet import Shape
from tests.rig.previous import NoHistory, unpack_previous
from tests.rig.report import say
from tests.soak.upgrade import Plan, run, verdict


@pytest.mark.soak  # ./check --long has three upgrades of two and two
@pytest.mark.timeout(900)
def test_a_fleet_is_upgraded_from_the_previous_release_and_back_and_no_client_notices(tmp_path: Path) -> None:
    try:
        previous = unpack_previous(tmp_path / "previous")
    except NoHistory as error:
        pytest.skip(str(error))
    plan = Plan(shape=Shape(), upgrades=2, requests=12, at_once=3, kills=0.0)
    result = asyncio.run(run(plan, previous, tmp_path))
    say(*result.errors, *result.wrong, *result.problems)
    assert [check.text for check in verdict(plan, result) if not check.holds] == []
    assert result.counts["left, and safe to delete"] and result.counts["left, and not known to be safe"]
