"""What the router says of the fleet: who is whole, what is not home yet, and how often requests were resumed.

Owns the questions to /cluster, /ready and /metrics. Knows these pages; does not know processes or requests.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import httpx

ASK_S = 60.0
WAIT_S = 0.1
"""Between two looks at a page."""
RECORD_S = 0.5
IDLE = ("waiting_requests", "running_requests", "reservations", "pushes_in_flight", "pages_quarantined")
_SAMPLE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Json = dict[str, Any]


class NotInTime(Exception):
    """Something that must happen did not; says what was lacking."""


class Cluster:
    """The router's pages at a URL. Use as `async with`."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=ASK_S)

    async def __aenter__(self) -> "Cluster":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        name: str = (await self._http.get("/v1/models")).json()["data"][0]["id"]
        return name

    async def incarnation(self, name: str) -> str | None:
        """That of the member of this name."""
        member = _members(await self._page()).get(name)
        return None if member is None else str(member["incarnation"])

    async def samples(self, name: str) -> list[tuple[Mapping[str, str], float]]:
        """Labels and values of one metric."""
        text = (await self._http.get("/metrics")).text
        found = [match for line in text.splitlines() if (match := _SAMPLE.fullmatch(line)) and match["name"] == name]
        return [(dict(_LABEL.findall(match["labels"] or "")), float(match["value"])) for match in found]

    async def until_whole(
        self, members: Collection[str], peers: Collection[str], former: Mapping[str, str], limit_s: float
    ) -> None:
        """Each of `members` is live and linked with each of the `peers`, both ways, and the router is ready.

        former: incarnations that do not count, for they are gone. Raises NotInTime.
        """

        async def lacking() -> list[str]:
            what = _not_whole(await self._page(), members, peers, former)
            if not what and (await self._http.get("/ready")).status_code != 200:
                what = ["/ready says no"]
            return what

        await _until(lacking, limit_s)

    async def until_busy(self, name: str, limit_s: float) -> None:
        """The router has given this member work that is not finished. Raises NotInTime."""

        async def lacking() -> list[str]:
            member = _members(await self._page()).get(name)
            return [] if member is not None and member["assigned_tokens"] else [f"{name} has nothing to do"]

        await _until(lacking, limit_s)

    async def until_home(self, members: Collection[str], limit_s: float) -> None:
        """Every one of `members` is there, every page is home and every queue is empty. Raises NotInTime."""

        async def lacking() -> list[str]:
            return _not_home(await self._page(), members)

        await _until(lacking, limit_s)

    async def record(self, path: Path) -> None:
        """Write the page to a file again and again, a line each time, until cancelled: to find the cause of what goes wrong."""
        with path.open("w") as lines:
            while True:
                lines.write(json.dumps({"at_s": asyncio.get_running_loop().time(), **await self._page()}) + "\n")
                await asyncio.sleep(RECORD_S)

    async def _page(self) -> Json:
        page: Json = (await self._http.get("/cluster")).json()
        return page


async def _until(lacking: Callable[[], Awaitable[list[str]]], limit_s: float) -> None:
    """Return when nothing is lacking. Raises NotInTime."""
    clock = asyncio.get_running_loop().time
    until_s = clock() + limit_s
    while what := await lacking():
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
    if not lacks:
        pairs = [(name, peer) for name in names for peer in peers]
        lacks = [
            f"{one} has no ready link to {other}"
            for one, other in (*pairs, *((peer, name) for name, peer in pairs))
            if not _is_linked(members[one], members[other])
        ]
    return lacks


def _is_linked(member: Json, peer: Json) -> bool:
    """Whether it has a ready link to this very incarnation of the peer."""
    wanted = (peer["id"], peer["incarnation"], "ready")
    return any((link["peer"], link["incarnation"], link["state"]) == wanted for link in member["links"])


def _not_home(page: Json, names: Collection[str]) -> list[str]:
    members = _members(page)
    lacks = [f"{name} is no member" for name in names if name not in members]
    for name, member in members.items():
        load = member["load"]
        if load["pages_free"] != load["pages_total"]:
            lacks.append(f"{name} has {load['pages_total'] - load['pages_free']} of {load['pages_total']} pages out")
        lacks += [f"{name} has {field} {load[field]}" for field in IDLE if load[field]]
    if page["router"]["requests_open"]:
        lacks.append(f"the router has {page['router']['requests_open']} requests open")
    return lacks
