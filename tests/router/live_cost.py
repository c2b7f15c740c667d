"""What the live page costs a router: CPU time of its process with 0, 1 and 20 viewers, for 4 instances and for 1,000.

    python -m tests.router.live_cost

Owns the measurement and the instances that it plays: they send heartbeats at the pace that the router asks for and compute
nothing, and 64 streams get a token each every 50 ms. Viewers and clients are processes of their own. Judges nothing. The played
instances work in the router's process: what is measured without viewers is theirs too, and what viewers add is the page's.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
from msgspec.json import encode
from msgspec.structs import replace

from common.config import RouterConfig
from common.ids import AttemptId, InstanceId, Life
from common.messages import (
    AnyMessage,
    Counters,
    Generate,
    Heartbeat,
    InstanceInfo,
    Load,
    Placed,
    Register,
    RouterInbox,
    TextBatch,
    TextDelta,
)
from common.messages.requests import Cancel
from router.live import LiveView
from tests.builders import instance
from tests.router.calls import completion
from tests.router.fakes import EchoFleet, Site, flush, listening, says

STREAMS, TOKEN_EVERY_S, WARM_S = 64, 0.05, 3.0
ROUNDS, LOOKS, VIEWERS = 3, 20, (0, 1, 20)
PAGES, ROWS, CONTEXT = 40_000, 256, 100_000
SPAWN = multiprocessing.get_context("spawn")


class PlayedFleet(EchoFleet):
    """Instances that say what real ones say, and streams that never end."""

    def __init__(self, instances: int) -> None:
        super().__init__(joins=False, context_tokens=CONTEXT)
        half = instances // 2
        self.members = [_played(f"{role}-{number:03}", role) for role in ("prefill", "decode") for number in range(half)]
        self.open: dict[AttemptId, int] = {}
        """How many tokens each stream has got."""
        self._random = random.Random(1)

    def send(self, to: InstanceId, message: AnyMessage) -> None:
        if isinstance(message, Cancel):
            self.open.pop(message.key, None)
        if isinstance(message, Generate):
            asyncio.get_running_loop().call_later(self._random.uniform(0.05, 0.6), self._begin, to, message)

    def receive(self, most: int = 1) -> list[tuple[InstanceId, RouterInbox]]:
        return []

    def tell(self, *messages: RouterInbox) -> None:
        assert self.gateway is not None
        for message in messages:
            self.gateway.deliver(self.gateway.core.receive(message, self.gateway.clock()))

    def link_up(self) -> None:
        assert self.gateway is not None
        core = self.gateway.core
        self.tell(*(Register(instance=member) for member in self.members))
        flush(core.fleet, self.gateway.clock())
        for member in (*self.members, *self.members):
            self.beat(member)

    def beat(self, of: InstanceInfo) -> None:
        assert self.gateway is not None
        fleet = self.gateway.core.fleet
        member = fleet.find(Life(of.id, of.incarnation))
        peers = [partner.info for partner in member.partners.values()] if member is not None else []
        running = self._random.randrange(ROWS // 2)
        held = min(PAGES, running * 300)
        load = Load(
            waiting_requests=self._random.choice((0, 0, 0, 4)),
            running_requests=running,
            running_tokens=held * 4,
            pages_free=PAGES - held,
            pages_cached=self._random.randrange(PAGES - held + 1) // 3,
            pages_total=PAGES,
            step_s=0.006,
            chunk_token_s=0.00004,
            decode_row_s=0.0001,
        )
        done = int(2_000 * self.gateway.clock())
        for message in says(fleet, of, *peers, load=load):
            self.tell(replace(message, counters=Counters(tokens_generated=done)) if isinstance(message, Heartbeat) else message)

    def _begin(self, to: InstanceId, message: Generate) -> None:
        first = next(member for member in self.members if member.id == to)
        for decode in message.decodes[:1]:
            life = next(Life(member.id, member.incarnation) for member in self.members if member.id == decode)
            self.tell(Placed(id=first.id, incarnation=first.incarnation, key=message.key, decode=life))
        self.open[message.key] = message.first

    async def work(self) -> None:
        """Heartbeats, spread evenly, and tokens."""
        assert self.gateway is not None
        turn = 0
        while True:
            pace_s = max(0.5, len(self.members) / 1_000)
            each = max(1, round(len(self.members) * TOKEN_EVERY_S / pace_s))
            for number in range(turn, turn + each):
                self.beat(self.members[number % len(self.members)])
            turn += each
            deltas = tuple(TextDelta(key, number, (97,), "a", None) for key, number in self.open.items())
            self.open = {key: number + 1 for key, number in self.open.items()}
            if deltas:
                self.tell(TextBatch(deltas=deltas))
            await asyncio.sleep(TOKEN_EVERY_S)


def _played(name: str, role: Any) -> InstanceInfo:
    info = instance(name, role)
    pool = replace(info.pools[0], total_pages=PAGES, backend="nixl")
    return replace(info, pools=(pool,), max_running=ROWS, model=replace(info.model, context_tokens=CONTEXT))


@contextlib.asynccontextmanager
async def playing(instances: int) -> AsyncIterator[tuple[Site, int]]:
    """A router on a port, with a fleet that works."""
    fleet = PlayedFleet(instances)
    async with Site(fleet, RouterConfig(dead_after_s=60.0, request_timeout_s=3600.0, peers_per_instance=16)) as site:
        fleet.link_up()
        working = asyncio.create_task(fleet.work())
        try:
            async with listening(site) as port:
                yield site, port
        finally:
            working.cancel()


def clients(port: int, streams: int) -> None:
    """The process of all clients."""

    async def one(client: httpx.AsyncClient) -> None:
        body = completion("x" * 40, max_tokens=90_000, stream=True, ignore_eos=True)
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_raw():
                pass

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None, limits=limits) as client:
            await asyncio.gather(*(one(client) for _ in range(streams)), return_exceptions=True)

    asyncio.run(all_of_them())


def viewers(port: int, count: int) -> None:
    """The process of all viewers. Says nothing of what it reads."""

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
        writer.write(b"GET /cluster/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        while await reader.read(2**20):
            pass

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)

    asyncio.run(all_of_them())


@contextlib.contextmanager
def process(target: Any, *arguments: int) -> Any:
    child = SPAWN.Process(target=target, args=arguments, daemon=True)
    child.start()
    try:
        yield
    finally:
        child.terminate()
        child.join()


async def share_of_core(seconds: float) -> float:
    """Percent of one core that this process takes meanwhile."""
    began_s, cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    return 100 * (time.process_time() - cpu_s) / (time.monotonic() - began_s)


async def measure(instances: int, seconds: float) -> None:
    async with playing(instances) as (site, port):
        with process(clients, port, STREAMS):
            while len(site.core.requests) < STREAMS:
                await asyncio.sleep(0.1)
            shares: dict[int, list[float]] = {count: [] for count in VIEWERS}
            for _ in range(ROUNDS):
                for count in VIEWERS:
                    with process(viewers, port, count) if count else contextlib.nullcontext():
                        while site.api.live.viewers < count:
                            await asyncio.sleep(0.1)
                        await asyncio.sleep(WARM_S)
                        shares[count].append(await share_of_core(seconds))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                size = await size_of_a_state(client)
            least_ms = await ms_of_a_state(site)
    for count, found in shares.items():
        told = f"{sorted(found)[ROUNDS // 2]:.1f} % of a core ({min(found):.1f} … {max(found):.1f})"
        print(f"{instances} instances, {STREAMS} streams, {count} viewers: {told}", flush=True)  # noqa: T201
    print(f"{instances} instances: a state is {size / 1e3:.1f} kB and takes {least_ms:.1f} ms", flush=True)  # noqa: T201


async def ms_of_a_state(site: Site) -> float:
    """CPU time to compute and encode one: the least of several, because the loop does other work meanwhile."""
    view, found = LiveView(site.core, site.metrics, ("", "", "", ""), site.gateway.clock()), list[float]()
    for _ in range(LOOKS):
        began_s = time.process_time()
        encode(await view.look(site.gateway.clock()))
        found.append(time.process_time() - began_s)
    return 1e3 * min(found)


async def size_of_a_state(client: httpx.AsyncClient) -> int:
    async with client.stream("GET", "/cluster/events") as events:
        lines = [line async for line in _first(events.aiter_lines(), 3)]
    return len(lines[2])


async def _first(lines: AsyncIterator[str], count: int) -> AsyncIterator[str]:
    async for line in lines:
        yield line
        count -= 1
        if not count:
            return


async def serve(instances: int) -> None:
    """Play until interrupted, for a look at the page."""
    async with playing(instances) as (_, port):
        print(f"http://127.0.0.1:{port}/", flush=True)  # noqa: T201
        with process(clients, port, STREAMS):
            await asyncio.Event().wait()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.router.live_cost", description="What the live page costs a router.")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--serve", type=int, default=0, metavar="INSTANCES", help="play a fleet of so many, to look at its page")
    flags = parser.parse_args(arguments)
    if flags.serve:
        asyncio.run(serve(flags.serve))
        return
    for instances in (4, 1_000):
        asyncio.run(measure(instances, flags.seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
