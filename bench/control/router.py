"""The router under measure: `launch router` as a process, what it uses of the machine, and how fast it answers.

Owns the process and the prober's. Knows the command line, and nothing of the inside.
"""

import sys
import time
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from bench.control.lines import Get, Got, Pings, ProberOrder, ProberReport, RouterReport, Tell, Watch
from bench.processes import cpu_s, resident_mb
from common.processes.child import KILL_S, ChildEnded, Respondent, stop_children
from common.processes.lines import Broken, Ready
from common.processes.local_fleet import FleetFailed

START_S = 60.0
STOP_S = 20.0
PAGE_S = 300.0

T = TypeVar("T", bound=ProberReport)


class RouterUnderMeasure:
    """`launch router` with the demo model, and a prober beside it."""

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self._ports = 0, 0
        self._prober: Respondent[ProberOrder, ProberReport] = Respondent(
            "prober", [sys.executable, "-P", "-m", "bench.control.prober"], msgspec.json.Decoder[ProberReport](ProberReport)
        )
        self._child: Respondent[ProberOrder, RouterReport] | None = None
        self.url = self.control = ""

    def start(self) -> None:
        """Start it, later again on the same ports, and wait until it serves. Raises FleetFailed."""
        http_port, control_port = self._ports
        command = [sys.executable, "-P", "-m", "launch.main", "router", f"--port={http_port}", f"--control-port={control_port}"]
        child = self._child = Respondent("router", [*command, *self._flags], msgspec.json.Decoder[RouterReport](RouterReport))
        until = time.monotonic() + START_S
        while not self._serves(child, until):
            pass
        self._ask(Watch(url=self.url))

    def kill(self) -> None:
        """End it as a crash does."""
        assert self._child is not None
        self._child.kill()
        self._child.wait(KILL_S)

    def close(self) -> None:
        stop_children([child for child in (self._child, self._prober) if child is not None], STOP_S)

    def cpu_s(self) -> float:
        """The CPU time of all its threads so far, in user and system mode, without the detokenizer's process."""
        assert self._child is not None
        return cpu_s(self._child.pid)

    def resident_mb(self) -> float:
        assert self._child is not None
        return resident_mb(self._child.pid)

    def pings(self) -> Pings:
        """Those since it was last asked."""
        told = self._ask(Tell())
        assert isinstance(told, Pings)
        return told

    def ask_for(self, path: str) -> None:
        """Get this page; `got` tells when it has arrived."""
        self._prober.order(Get(path=path))

    def got(self) -> Got | None:
        """Raises FleetFailed."""
        return self._heard(Got, 0.0)

    def _ask(self, order: Watch | Tell) -> Pings:
        self._prober.order(order)
        told = self._heard(Pings, PAGE_S)
        if told is None:
            raise FleetFailed(f"the prober did not answer within {PAGE_S:g} s")
        return told

    def _heard(self, kind: type[T], timeout_s: float) -> T | None:
        try:
            report = self._prober.next_report(timeout_s)
        except ChildEnded as error:
            raise FleetFailed(str(error)) from error
        if report is None:
            return None
        assert isinstance(report, kind)
        return report

    def _serves(self, child: Respondent[ProberOrder, RouterReport], until: float) -> bool:
        try:
            report = child.next_report(until - time.monotonic())
        except ChildEnded as error:
            raise FleetFailed(str(error)) from error
        if report is None or isinstance(report, Broken):
            raise FleetFailed(f"the router did not start: {child.account()}")
        if isinstance(report, Ready):
            self.url, self.control = report.addresses["http"], report.addresses["control"]
            self._ports = urlsplit(self.url).port or 0, urlsplit(self.control).port or 0
        return isinstance(report, Ready)
