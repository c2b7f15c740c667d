"""What the router says of the fleet: who is whole, what is not home yet, and how often requests were resumed.

Owns the questions to /cluster, /ready and /metrics. Knows these pages; does not know processes or requests.
"""

import asyncio
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from tests.fleet_pages import FleetPages, Json, not_home

WAIT_S = 0.1
"""Between two looks at a page."""
RECORD_S = 0.5


class NotInTime(Exception):
    """Something that must happen did not; says what was lacking."""


class Cluster:
    """The router's pages at a URL."""

    def __init__(self, url: str) -> None:
        self._pages = FleetPages(url)

    async def model(self) -> str:
        return await asyncio.to_thread(self._pages.model)

    async def incarnation(self, name: str) -> str | None:
        """That of the member of this name."""
        member = _members(await self._page()).get(name)
        return None if member is None else str(member["incarnation"])

    async def rank_pids(self, name: str) -> list[int]:
        """The processes of a member, in the order of ranks. Raises KeyError when there is no such member."""
        return [rank["pid"] for rank in _members(await self._page())[name]["ranks"]]

    async def samples(self, name: str) -> list[tuple[Mapping[str, str], float]]:
        """Labels and values of one metric."""
        return await asyncio.to_thread(self._pages.samples, name)

    async def until_whole(
        self, members: Collection[str], peers: Collection[str], former: Mapping[str, str], limit_s: float
    ) -> None:
        """Each of `members` is live and linked with each of the `peers`, both ways, and the router is ready.

        former: incarnations that do not count, for they are gone. Raises NotInTime.
        """

        def lacking(page: Json) -> list[str]:
            what = _not_whole(page, members, peers, former)
            return what or ([] if self._pages.is_ready() else ["/ready says no"])

        await self._until(lacking, limit_s)

    async def until_busy(self, name: str, limit_s: float) -> None:
        """The router has given this member work that is not finished. Raises NotInTime."""

        def lacking(page: Json) -> list[str]:
            member = _members(page).get(name)
            return [] if member is not None and member["assigned_tokens"] else [f"{name} has nothing to do"]

        await self._until(lacking, limit_s)

    async def until_home(self, members: Collection[str], limit_s: float) -> None:
        """Every one of `members` is there, every page is home and every queue is empty. Raises NotInTime."""
        await self._until(lambda page: not_home(page, members), limit_s)

    async def record(self, path: Path) -> None:
        """Write the page to a file again and again, a line each time, until cancelled: to find the cause of what goes wrong."""
        with path.open("w") as lines:
            while True:
                lines.write(json.dumps({"at_s": asyncio.get_running_loop().time(), **await self._page()}) + "\n")
                await asyncio.sleep(RECORD_S)

    async def _page(self) -> Json:
        return await asyncio.to_thread(self._pages.cluster)

    async def _until(self, lacking: Callable[[Json], list[str]], limit_s: float) -> None:
        """Look at the page until nothing is lacking. Raises NotInTime."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + limit_s
        while what := await asyncio.to_thread(lambda: lacking(self._pages.cluster())):
            if clock() > until_s:
                raise NotInTime(f"not within {limit_s:g} s: {'; '.join(what)}")
            await asyncio.sleep(WAIT_S)


def _members(page: Json) -> dict[str, Json]:
    return {instance["id"]: instance for instance in page["instances"]}


def _not_whole(page: Json, names: Collection[str], peers: Collection[str], former: Mapping[str, str]) -> list[str]:
    members = _members(page)
    lacks = []
    for name in (*names, *peers):
        member = members.get(name)
        if member is None or member["incarnation"] == former.get(name):
            lacks.append(f"{name} is no member")
        elif member["state"] != "live":
            lacks.append(f"{name} is {member['state']}")
    decodes = sum(members[name]["role"] == "decode" for name in (*names, *peers) if name in members)
    for name in (*names, *peers) if not lacks else ():
        member = members[name]
        if member["role"] == "prefill" and member["usable"] < decodes:
            lacks.append(f"{name} can use {member['usable']} of {decodes} links")
    return lacks
