"""A run: a fleet, its answers without faults, the same requests again under faults, and everything that must hold afterwards.

Owns the order of it. Raises nothing that concerns the fleet: what goes wrong is in the outcome.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from common.processes.local_fleet import FleetFailed
from demo.evaluate import MODEL
from tests.chaos.checks import Checks, Oracle
from tests.chaos.faults import Fault, Faults, Plan
from tests.chaos.fleet import Fleet
from tests.chaos.report import Outcome
from tests.chaos.workload import Workload
from tests.rig.client import Answer, Client, Request
from tests.rig.pages import FleetPages, NotInTime

RECORD_S = 0.5


async def run(plan: Plan, logs: Path, say: Callable[[str], object]) -> Outcome:
    """say: told how it goes, line by line."""
    outcome = Outcome(plan.shape)
    workload = Workload()
    requests = workload.requests(plan.requests, plan.seed)
    fleet = Fleet(plan.shape, logs)
    try:
        url = await fleet.start()
        await _Run(plan, fleet, outcome, say, asyncio.get_running_loop().time).play(url, requests)
        await fleet.stop()
    except (NotInTime, FleetFailed, TimeoutError, httpx.HTTPError) as error:
        outcome.problems.append(f"{type(error).__name__}: {error}")
    finally:
        await fleet.clear()
    outcome.problems += fleet.problems
    await asyncio.to_thread(_check, outcome, workload)
    return outcome


@dataclass(frozen=True, slots=True)
class _Run:
    """What happens while the fleet is there."""

    plan: Plan
    fleet: Fleet
    outcome: Outcome
    say: Callable[[str], object]
    clock: Callable[[], float]

    async def play(self, url: str, requests: Sequence[Request]) -> None:
        """Raises NotInTime, FleetFailed, TimeoutError, httpx.HTTPError."""
        names = [*self.plan.shape.names("prefill"), *self.plan.shape.names("decode")]
        pages = FleetPages(url)
        await asyncio.to_thread(pages.wait_until_whole, *names)
        async with Client(url, await asyncio.to_thread(pages.model)) as client:
            if self.plan.is_compared:
                began_s = self.clock()
                await self._send(client, iter(requests), self.outcome.reference)
                self.say(f"without faults: {len(requests)} requests in {self.clock() - began_s:.0f} s")
            before = await asyncio.to_thread(_resumes, pages)
            recording = asyncio.create_task(_record(pages, self.fleet.logs / "cluster.jsonl"))
            try:
                await self._send_under_faults(client, pages, requests)
                await asyncio.to_thread(pages.wait_until_home, names)
            finally:
                recording.cancel()
                self.outcome.resumes = await asyncio.to_thread(_resumes, pages) - before
                self.outcome.most_attempts = await asyncio.to_thread(_most_attempts, pages)

    async def _send_under_faults(self, client: Client, pages: FleetPages, requests: Sequence[Request]) -> None:
        plan, outcome = self.plan, self.outcome
        began_s = self.clock()

        def on_whole(fault: Fault) -> None:
            words = f"{fault.at_s - began_s:6.1f} s  {fault}, whole after {fault.whole_s - fault.at_s:.1f} s"
            self.say(f"{words}; {len(outcome.answers)} answers, {sum(bool(a.errors) for a in outcome.answers)} with errors")

        faults = Faults(self.fleet, pages, plan, on_whole)
        striking = asyncio.create_task(faults.run(plan.faults))
        try:
            await self._send(client, _until(requests, striking.done), outcome.answers)
            await striking
        finally:
            striking.cancel()
            outcome.faults = faults.past
            outcome.seconds = self.clock() - began_s

    async def _send(self, client: Client, requests: Iterator[Request], answers: list[Answer]) -> None:
        """So many at once; returns when every answer has ended."""

        async def keep_asking() -> None:
            for request in requests:
                answers.append(await client.ask(request))

        async with asyncio.TaskGroup() as group:
            for _ in range(self.plan.at_once):
                group.create_task(keep_asking())


def _until(requests: Sequence[Request], is_over: Callable[[], bool]) -> Iterator[Request]:
    """Every request once, and again in turn until it is over."""
    yield from requests
    while not is_over():
        for request in requests:
            if is_over():
                return
            yield request


async def _record(pages: FleetPages, path: Path) -> None:
    """Write /cluster to a file again and again, a line each time, until cancelled: to find the cause of what goes wrong."""
    with path.open("w") as lines:
        while True:
            page = await asyncio.to_thread(pages.cluster)
            lines.write(json.dumps({"at_s": asyncio.get_running_loop().time(), **page}) + "\n")
            await asyncio.sleep(RECORD_S)


def _resumes(pages: FleetPages) -> Counter[str]:
    return Counter({labels["reason"]: int(value) for labels, value in pages.samples("tandem_resumes_total")})


def _most_attempts(pages: FleetPages) -> float:
    """The least bound of the histogram that holds every request."""
    buckets = [(float(labels["le"]), count) for labels, count in pages.samples("tandem_attempts_bucket")]
    return min((bound for bound, count in buckets if count == max(count for _, count in buckets)), default=0.0)


def _check(outcome: Outcome, workload: Workload) -> None:
    """Judge every answer."""
    checks = Checks(workload, Oracle(MODEL))
    for answer in outcome.answers:
        outcome.errors += checks.of_answer(answer)
    if outcome.reference:
        for answer in outcome.reference:
            outcome.problems += (f"without faults: {error}" for error in checks.of_answer(answer))
        outcome.problems += checks.of_reference(outcome.reference)
        reference = {answer.request.number: answer for answer in outcome.reference}
        outcome.differences += checks.differences(reference, outcome.answers)
