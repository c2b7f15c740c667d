"""`launch top` against a real router's states: what it writes, and how it ends."""

import asyncio
from functools import partial

import pytest

from common.access import Access, KeyRing
from launch.fleet_options import TopFlags
from launch.top import median, plain, run
from tests.router.calls import chat, until
from tests.router.fakes import EchoFleet, Site, listening

CONTROL = "c" * 20


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_one_state_is_printed_with_its_instances_and_requests_and_a_wrong_key_ends_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    fleet = EchoFleet(stall_at=3)
    access = Access(None, KeyRing({CONTROL: "control"}))
    async with Site(fleet, access=access) as site, listening(site) as port, site.client() as client:
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=chat(), headers={"X-Request-Id": "[bold]mine"}))
        await until(lambda: any(len(record.token_ids) == 3 for record in site.core.requests.records()))
        flags = TopFlags(url=f"http://127.0.0.1:{port}", once="on")
        assert await asyncio.to_thread(partial(run, flags, CONTROL)) == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in ("p0", "d0", "[bold]mine", "p0 → d0 → decode"))
        assert await asyncio.to_thread(partial(run, flags, "wrong")) == 1
        assert "key" in capsys.readouterr().err
        asked.cancel()


def test_what_others_named_is_no_command_to_the_terminal() -> None:
    assert plain("gone\x1b[31m\a\n") == "gone·[31m··"


def test_the_median_of_a_histogram_lies_where_half_of_its_new_values_are() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert median((5, 0, 0, 0), (5, 0, 0, 0), bounds) is None
    assert median((5, 0, 0, 0), (5, 10, 0, 0), bounds) == 1.5
    assert median((0, 0, 0, 0), (4, 2, 2, 0), bounds) == 1.0
    assert median((0, 0, 0, 0), (1, 0, 4, 0), bounds) == 2.0 + 2.0 * 1.5 / 4
    assert median((0, 0, 0, 0), (0, 0, 0, 3), bounds) == 4.0, "beyond all bounds: at least that"
