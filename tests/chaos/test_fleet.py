"""A fleet that is cleared in the middle of everything, as when a run fails or is told to stop. Its processes only sleep."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos import fleet as fleet_module
from tests.chaos.fleet import Fleet, Shape


def test_a_fleet_that_runs_is_cleared_to_the_last_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fleet_module, "launch_command", lambda role, flags: ["sleep", "600"])

    async def run() -> list[str]:
        fleet = Fleet(Shape(), tmp_path)
        starting = asyncio.create_task(fleet.start())
        while not list(fleet._marked()):
            await asyncio.sleep(0.01)
        clearing = asyncio.create_task(fleet.clear())
        await asyncio.wait([clearing, starting])
        assert not clearing.cancelled() and starting.exception() is not None
        return [*fleet.problems, *map(str, fleet._marked())]

    assert asyncio.run(run()) == []
