"""What is told of the fleet: in the log, on the page of the fleet and to those who look on."""

import logging

import pytest
from msgspec.structs import replace

from common.config import RouterConfig
from common.ids import Incarnation
from common.messages import Goodbye, Load, Register
from router.history import MOST_KEPT, MOST_LOGGED, FleetHistory
from tests.builders import instance
from tests.router.bench import D0, D1, P0, Bench, spec

UNIX_S = 1_700_000_000.0


def told(bench: Bench) -> list[tuple[str, str, str]]:
    return [(event.kind, event.who, event.text) for event in bench.core.fleet.history.events]


def test_joins_deaths_resumes_troubles_drains_and_refusals_are_lines_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="router.history")
    bench = Bench(P0, D0, D1, config=RouterConfig(dead_after_s=3.0))
    (at,) = {route.id for route in bench.members if route.role == "prefill"}
    assert at == "p0" and told(bench)[0] == ("joined", "p0", "joined from 127.0.0.1:11 (prefill, 64 pages)")
    bench.submit(*[spec(name) for name in ("a", "b")])
    bench.report(D1, 1.0, load=Load(oldest_transfer_s=31.0))
    bench.beat(2.0, D0)
    before = len(told(bench))
    bench.tick(3.0)
    odd = replace(instance("odd", "decode"), model=replace(D0.model, dtype="float16"))
    bench.core.receive(Register(instance=odd), 3.2)
    bench.core.receive(Register(instance=odd), 3.3)
    bench.core.fleet.drain(D1.id, 4.0)
    bench.core.receive(Goodbye(id=D1.id, incarnation=D1.incarnation, is_quiet=True), 5.0)
    bench.core.receive(Goodbye(id=P0.id, incarnation=P0.incarnation, reason="step 3 failed"), 6.0)
    kinds = [(kind, who) for kind, who, _ in told(bench)[before:]]
    assert ("left", "d0") in kinds and kinds.count(("refused", "odd")) == 1, "who asks again is not told again"
    lines = "\n".join(record.getMessage() for record in caplog.records)
    for line in (
        "d1 live → stuck: its oldest transfer has not moved for 31 s",
        "d0 is lost: not heard of in time",
        "d1 drained and left",
        "p0 is lost: step 3 failed",
    ):
        assert line in lines
    levels = {record.getMessage().split(":")[0]: record.levelname for record in caplog.records}
    assert levels["d0 is lost"] == "WARNING" and levels["d1 drained and left"] == "INFO"


def test_requests_of_an_instance_that_is_lost_are_counted() -> None:
    bench = Bench(D0, D1)
    bench.submit(*[spec(name) for name in ("a", "b", "c")])
    count = sum(member.assigned_requests for member in bench.core.fleet.members() if member.info.id == D0.id)
    bench.core.receive(Goodbye(id=D0.id, incarnation=D0.incarnation, reason="killed"), 1.0)
    assert count and ("resumed", "d0", f"{count} of its requests are resumed") in told(bench)


def test_an_instance_that_takes_another_role_or_comes_back_says_so() -> None:
    bench = Bench(D0, D1)
    bench.core.receive(Goodbye(id=D0.id, incarnation=D0.incarnation), 1.0)
    changed = replace(instance("d0", "prefill"), incarnation=Incarnation("1.2"), started_ns=9)
    bench.core.receive(Register(instance=changed), 1.25)
    assert told(bench)[-1][:2] in (("role", "d0"), ("joined", "d0"))
    bench.core.receive(Goodbye(id=D1.id, incarnation=D1.incarnation, reason="out of memory"), 2.0)
    bench.core.receive(Register(instance=replace(D1, incarnation=Incarnation("other"), started_ns=9)), 3.0)
    assert told(bench)[-1][2].startswith("is back from 127.0.0.1:")


def test_the_log_is_spared_where_a_thousand_change_at_once_and_the_latest_are_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="router.history")
    history = FleetHistory(UNIX_S)
    for number in range(1000):
        history.tell("joined", f"d{number}", "joined", 0.5)
    history.tell("left", "d0", "left", 1.5)
    assert len(history.events) == MOST_KEPT and history.events[-1].at == UNIX_S + 1.5
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == MOST_LOGGED + 2 and lines[-2].startswith(f"{1000 - MOST_LOGGED} more changes")


def test_a_warning_is_written_although_many_joined_in_its_second(caplog: pytest.LogCaptureFixture) -> None:
    history = FleetHistory(UNIX_S)
    for number in range(MOST_LOGGED + 5):
        history.tell("joined", f"d{number}", "joined", 0.5)
    history.tell("left", "d0", "is lost: step 7 failed", 0.6, level=logging.WARNING)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "d0 is lost: step 7 failed"
    ]
