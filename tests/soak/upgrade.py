"""python -m tests.soak.upgrade: a fleet of processes that is upgraded under load, and back, one process at a time.

Owns the order of it and the verdict. Two routers and instances of both roles run the previous release's real code, or this one's
(`tests.rig.previous`; the libraries are the same). Streams run all the time. Each answer is held against those of the fleet at
rest, and each token against an oracle that computes alone. Between two steps an instance is killed now and then, and each mixed
fleet changes its weights and loads an adapter.

    up      routers first, then instances      the next time: instances first, then routers
    back    the other way round

A router that is to be stopped gets no new requests, as behind a load balancer, and ends what it has.
"""

import argparse
import asyncio
import itertools
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import httpx
from transformers import AutoModelForCausalLM

from common.messages import WIRE_VERSION
from common.options import add_flags, read_config
from common.processes.local_fleet import FleetFailed
from demo.evaluate import MODEL
from tests.chaos.checks import Checks, Difference, Oracle
from tests.chaos.fleet import Fleet, Shape
from tests.chaos.workload import Workload
from tests.e2e.test_token_exact import Reference
from tests.engine.lora_folders import ATTENTION, Lora
from tests.rig.client import Answer, Client, Request
from tests.rig.pages import FleetPages, NotInTime, until, until_nothing_lacks
from tests.rig.previous import NoHistory, previous_commit, unpack_previous
from tests.rig.report import Check, print_checks, say

Part = Literal["routers", "instances"]
ROUTERS = ("router-0", "router-1")
LEAVES_BALANCER_S = 0.5
"""A router is stopped so long after no new requests are sent to it: those on their way arrive before."""
WHOLE_S, TOLD_S = 120.0, 10.0
KILLS = 0.3
"""Share of the steps after which an instance is killed."""
NAME, PROMPT, TOKENS = "mixed", list(range(300, 340)), 12
"""The adapter of a mixed fleet, and what it is asked."""
NEAR = 1e-3
"""As in `tests.chaos.checks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """upgrades: each is followed by the way back, save the last. requests: different ones; they are sent again and again until
    the upgrades are through. at_once: open at the same time. kills: see KILLS."""

    shape: Shape = field(default_factory=Shape)
    upgrades: int = 20
    requests: int = 200
    at_once: int = 8
    seed: int = 1
    kills: float = KILLS


@dataclass(slots=True)
class Result:
    """What a run brought. reference: answers of the fleet at rest; answers: those during upgrades."""

    reference: list[Answer] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    """What clients saw that they should not."""
    differences: list[Difference] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Everything else that is wrong."""

    @property
    def wrong(self) -> list[str]:
        return [str(each) for each in self.differences if not each.is_right]


class UpgradedFleet(Fleet):
    """Two routers with addresses that stay, and instances that know both. previous: the folder of the former release's code."""

    def __init__(self, shape: Shape, logs: Path, previous: Path) -> None:
        super().__init__(shape, logs)
        self.previous = previous
        self.urls: dict[str, str] = {}
        self.instances = [*shape.names("prefill"), *shape.names("decode")]
        self.others = (f"--model={MODEL}", "--max-loaded-loras=1")
        self.code = dict.fromkeys((*ROUTERS, *self.instances), previous)
        self._ports: dict[str, tuple[str, str]] = {}

    async def start(self) -> str:
        """Returns the first router's URL; raises TimeoutError."""
        for name in ROUTERS:
            await self.start_router(name)
        self._control = ",".join(f"tcp://127.0.0.1:{control}" for _, control in self._ports.values())
        await self._start_instances()
        return self.urls[ROUTERS[0]]

    async def start_router(self, name: str) -> None:
        """For the first time or again, at the same ports. Raises TimeoutError."""
        port, control = self._ports.get(name, ("0", "0"))
        times = [f"--heartbeat-s={self.shape.heartbeat_s}", f"--dead-after-s={self.shape.dead_after_s}"]
        flags = [f"--model={MODEL}", f"--port={port}", f"--control-port={control}", *times]
        addresses = await self._start(name, "router", flags)
        self.urls[name] = addresses["http"]
        http, inbox = (addresses[kind].rpartition(":")[2] for kind in ("http", "control"))
        self._ports[name] = http, inbox

    def choose(self, name: str, *, is_new: bool) -> None:
        """Which release this process runs from its next start on."""
        if is_new:
            self.code.pop(name, None)
        else:
            self.code[name] = self.previous

    def is_new(self, name: str) -> bool:
        return name not in self.code


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter in a folder, and the model in which it is merged."""

    folder: Path
    merged: Reference

    @classmethod
    def made(cls, folder: Path) -> "Adapter":
        model, lora = AutoModelForCausalLM.from_pretrained(MODEL).eval(), Lora(seed=5, rank=4, modules=ATTENTION)
        return cls(lora.saved(model, folder), Reference(lora.merged(model)))


async def run(plan: Plan, previous: Path, folder: Path) -> Result:
    """previous: the folder of the former release's code. folder: for logs, and for the adapter."""
    result, workload = Result(), Workload()
    requests = workload.requests(plan.requests, plan.seed)
    fleet = UpgradedFleet(plan.shape, folder, previous)
    try:
        await fleet.start()
        await _Run(plan, fleet, Adapter.made(folder / "adapter"), result).play(requests)
        await fleet.stop()
    except (NotInTime, FleetFailed, TimeoutError, httpx.HTTPError) as error:
        result.problems.append(f"{type(error).__name__}: {error}")
    finally:
        await fleet.clear()
    result.problems += fleet.problems
    await asyncio.to_thread(_judge, result, workload)
    return result


@dataclass(slots=True)
class _Run:
    """What happens while the fleet is there."""

    plan: Plan
    fleet: UpgradedFleet
    adapter: Adapter
    result: Result
    open_routers: list[str] = field(default_factory=lambda: list(ROUTERS))
    """Those that get new requests."""
    clients: dict[str, Client] = field(default_factory=dict)
    former: dict[str, str] = field(default_factory=dict)
    """Incarnations that were ended."""

    async def play(self, requests: Sequence[Request]) -> None:
        """Raises NotInTime, FleetFailed, TimeoutError, httpx.HTTPError."""
        await self._until_whole()
        model = await asyncio.to_thread(self._pages(ROUTERS[0]).model)
        self.clients = {name: Client(self.fleet.urls[name], model) for name in ROUTERS}
        await self._send(iter(requests), self.result.reference)
        self._tell("at rest, all of the previous release", self.result.reference)
        upgrading = asyncio.create_task(self._upgrade_again_and_again())
        try:
            await self._send(_until(requests, upgrading.done), self.result.answers)
            await upgrading
        finally:
            upgrading.cancel()
            for client in self.clients.values():
                await client.aclose()
        for name in ROUTERS:
            await asyncio.to_thread(self._pages(name).wait_until_home, self.fleet.instances)
            await asyncio.to_thread(self._count_resumes, name)

    def _pages(self, router: str) -> FleetPages:
        return FleetPages(self.fleet.urls[router])

    def _tell(self, what: str, answers: Sequence[Answer]) -> None:
        say(f"{what}: {len(answers)} answers, {sum(bool(answer.errors) for answer in answers)} with errors")

    async def _send(self, requests: Iterator[Request], answers: list[Answer]) -> None:
        """So many at once, to the routers in turn; returns when every answer has ended."""
        turns = itertools.count()

        async def keep_asking() -> None:
            for request in requests:
                router = self.open_routers[next(turns) % len(self.open_routers)]
                answers.append(await self.clients[router].ask(request))

        async with asyncio.TaskGroup() as group:
            for _ in range(self.plan.at_once):
                group.create_task(keep_asking())

    # --- upgrades --------------------------------------------------------------------------------------------------------

    async def _upgrade_again_and_again(self) -> None:
        random, counts = Random(f"upgrades {self.plan.seed}"), self.result.counts
        orders: tuple[tuple[Part, Part], ...] = (("routers", "instances"), ("instances", "routers"))
        for number in range(self.plan.upgrades):
            order = orders[number % 2]
            await self._roll(order, random, is_new=True)
            counts["upgrades"] += 1
            self._tell(f"upgrade {number + 1}, {order[0]} first", self.result.answers)
            if number + 1 < self.plan.upgrades:
                await self._roll((order[1], order[0]), random, is_new=False)
                counts["ways back"] += 1
                self._tell(f"back, {order[1]} first", self.result.answers)

    async def _roll(self, order: tuple[Part, Part], random: Random, *, is_new: bool) -> None:
        """Give every process this release, one after the other."""
        for part in order:
            instances = random.sample(self.fleet.instances, len(self.fleet.instances))
            for place, name in enumerate(ROUTERS if part == "routers" else instances, 1):
                if part == "routers":
                    await self._replace_router(name, is_new=is_new)
                else:
                    await self._replace_instance(name, is_new=is_new)
                    if place == len(instances) // 2:
                        await asyncio.to_thread(self._change_mixed_fleet)
                self.result.counts[f"{part} replaced"] += 1
                if random.random() < self.plan.kills:
                    await self._kill_instance(random.choice(instances))

    async def _replace_router(self, name: str, *, is_new: bool) -> None:
        self.open_routers.remove(name)
        await asyncio.sleep(LEAVES_BALANCER_S)
        await asyncio.to_thread(self._count_resumes, name)
        process = self.fleet.process(name)
        process.strike(signal.SIGTERM)
        await self.fleet.expect_end(process)
        self.fleet.choose(name, is_new=is_new)
        await self.fleet.start_router(name)
        await self._until_whole()
        self.open_routers.append(name)

    async def _replace_instance(self, name: str, *, is_new: bool) -> None:
        await self._note_life(name)
        process = self.fleet.process(name)
        process.strike(signal.SIGTERM)
        await self.fleet.expect_end(process)
        for router in filter(self.fleet.is_new, self.open_routers):
            await asyncio.to_thread(self._ask_whether_safe, router, name)
        self.fleet.choose(name, is_new=is_new)
        await self.fleet.start_instance(name)
        await self._until_whole()

    async def _kill_instance(self, name: str) -> None:
        await self._note_life(name)
        process = self.fleet.process(name)
        process.strike(signal.SIGKILL)
        await process.end(WHOLE_S)
        await self.fleet.start_instance(name)
        await self._until_whole()
        self.result.counts["instances killed"] += 1

    async def _note_life(self, name: str) -> None:
        members = await asyncio.to_thread(self._pages(self.open_routers[0]).members)
        self.former[name] = members[name]["incarnation"]

    async def _until_whole(self) -> None:
        """At every router. Raises NotInTime."""

        def lacks() -> list[str]:
            return [what for name in ROUTERS for what in self._pages(name).not_whole(self.fleet.instances, self.former)]

        await asyncio.to_thread(until_nothing_lacks, lacks, WHOLE_S)
        await asyncio.to_thread(self._check_releases)

    def _check_releases(self) -> None:
        """The processes are what they are meant to be, or nothing is proven."""
        for name in filter(self.fleet.is_new, ROUTERS):
            page = self._pages(name).cluster()
            versions = {name: page["router"]["wire_version"]} | {each["id"]: each["wire_version"] for each in page["instances"]}
            meant = {each: WIRE_VERSION - (not self.fleet.is_new(each)) for each in versions}
            if versions != meant:
                self.result.problems.append(f"{name} sees the versions {versions} instead of {meant}")
        for name in itertools.filterfalse(self.fleet.is_new, ROUTERS):
            if self._pages(name).cluster()["router"].get("wire_version", WIRE_VERSION - 1) != WIRE_VERSION - 1:
                self.result.problems.append(f"{name} is not of the previous release")

    # --- what is asked meanwhile -------------------------------------------------------------------------------------------

    def _ask_whether_safe(self, router: str, name: str) -> None:
        """A router knows of an instance of this release that has drained that nothing is lost with it. One of the previous
        release does not say so, and then nobody may take it for granted."""
        path = f"/cluster/{name}/safe_to_delete"
        if self.fleet.is_new(name):
            until(lambda: self._pages(router).get(path).json().get("safe_to_delete"), f"{router} knows of {name}", TOLD_S)
            self.result.counts["left, and safe to delete"] += 1
        elif self._pages(router).get(path).json().get("safe_to_delete") is not False:
            self.result.problems.append(f"{name} of the previous release has drained, and {router} is sure of its transfers")
        else:
            self.result.counts["left, and not known to be safe"] += 1

    def _change_mixed_fleet(self) -> None:
        """Instances of both releases have the same weights staged, and load, use and unload an adapter."""
        pages, is_mixed = self._pages(self.open_routers[0]), len(set(map(self.fleet.is_new, self.fleet.instances))) == 2
        self._require(pages, "/load_lora_adapter", {"lora_name": NAME, "lora_path": str(self.adapter.folder)})
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        answer = self._require(pages, "/generate", {"input_ids": PROMPT, "sampling_params": sampling, "lora_path": NAME})
        if len(answer["output_ids"]) != TOKENS or max(self.adapter.merged.regrets(PROMPT, answer["output_ids"])) > NEAR:
            self.result.problems.append(f"with the adapter, a mixed fleet answers {answer['output_ids']}")
        self._require(pages, "/unload_lora_adapter", {"lora_name": NAME})
        self._require(pages, "/update_weights_from_disk", {"model_path": str(MODEL)})
        self.result.counts["changes of a mixed fleet"] += is_mixed

    def _require(self, pages: FleetPages, path: str, body: Mapping[str, object]) -> Any:
        """The answer. Raises FleetFailed when it is an error."""
        reply = pages.post(path, body)
        if reply.status != httpx.codes.OK:
            raise FleetFailed(f"{path} in a mixed fleet: HTTP {reply.status}: {reply.text}")
        return reply.json()

    def _count_resumes(self, router: str) -> None:
        """Before it ends, and its counts with it."""
        self.result.counts["resumes"] += int(sum(value for _, value in self._pages(router).samples("tandem_resumes_total")))


def _until(requests: Sequence[Request], is_over: Callable[[], bool]) -> Iterator[Request]:
    """The requests in turn, again and again, until it is over."""
    return itertools.takewhile(lambda _: not is_over(), itertools.cycle(requests))


def _judge(result: Result, workload: Workload) -> None:
    """Judge every answer."""
    checks = Checks(workload, Oracle(MODEL))
    result.problems += (f"at rest: {error}" for answer in result.reference for error in checks.of_answer(answer))
    result.problems += checks.of_reference(result.reference)
    result.errors += (error for answer in result.answers for error in checks.of_answer(answer))
    reference = {answer.request.number: answer for answer in result.reference}
    result.differences += checks.differences(reference, result.answers)


def verdict(plan: Plan, result: Result) -> Iterator[Check]:
    counts = result.counts
    of = f"of {len(result.answers)} answers with {sum(answer.tokens for answer in result.answers)} tokens"
    near = len(result.differences) - len(result.wrong)
    yield Check(holds=not result.errors, text=f"{len(result.errors)} errors, {of}")
    yield Check(holds=not result.wrong, text=f"{len(result.wrong)} wrong, and {near} near ties, {of}")
    yield Check(holds=counts["upgrades"] == plan.upgrades, text=", ".join(f"{name} {count}" for name, count in counts.items()))
    yield Check(holds=counts["changes of a mixed fleet"] > 0, text="a mixed fleet changed its weights and its adapters")
    yield Check(holds=not result.problems, text=f"{len(result.problems)} other problems")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.upgrade", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--upgrades", type=int, default=20, help="how often it is upgraded (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=200, help="different requests (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=8, help="requests open at the same time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of requests, order and kills (default: %(default)s)")
    parser.add_argument("--kills", type=float, default=KILLS, help="share of steps followed by a kill (default: %(default)s)")
    add_flags(parser, Shape)
    flags = parser.parse_args()
    plan = Plan(
        shape=read_config(Shape, flags),
        upgrades=flags.upgrades,
        requests=flags.requests,
        at_once=flags.at_once,
        seed=flags.seed,
        kills=flags.kills,
    )
    folder = Path(tempfile.mkdtemp(prefix="tandem-upgrade-"))
    try:
        previous = unpack_previous(folder / "previous")
    except NoHistory as error:
        say(f"skipped: {error}")
        return 0
    say(f"the previous release is {previous_commit()}; logs: {folder}")
    result = asyncio.run(run(plan, previous, folder))
    say(*(f"  {line[:1000]}" for line in [*result.errors, *result.wrong, *result.problems][:30]))
    status = print_checks(verdict(plan, result))
    if status == 0:
        shutil.rmtree(folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
