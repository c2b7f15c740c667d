"""`launch drain`: an instance drains, and the command ends when the instance may be deleted.

Owns the asking. What is proven, the router says; what it does not know is no proof. The router may be away for a while, as in an
upgrade: it is asked again until the time is over.
"""

import sys
import time
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import quote

from common.options import option, require, require_above_0
from common.processes.router_client import RequestFailed, RouterClient

ASK_S = 0.5
"""How often the router is asked. What it knows comes with heartbeats, which are as frequent."""
ANSWER_S = 5.0
FINAL = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


@dataclass(frozen=True, kw_only=True)
class DrainFlags:
    """What `launch drain` asks for."""

    url: str = option("http://127.0.0.1:8000", "of the router")
    name: str = option("", "of the instance that is to drain")
    control_key: str = option("", "file with the router's control key; without it: none is sent")
    within_s: float = option(60.0, "how long it may take until the instance may be deleted")

    def __post_init__(self) -> None:
        require(bool(self.name), "name", "the name of an instance, as /cluster shows it", self.name)
        require_above_0(self, "within_s")


def run(flags: DrainFlags, control_key: str) -> int:
    """Returns the exit status: 1 when it is not known in time that the instance may be deleted."""
    until_s, is_told = time.monotonic() + flags.within_s, False
    path = f"/cluster/{quote(flags.name, safe='')}"
    while True:
        try:
            router = RouterClient(flags.url, control_key, ANSWER_S)
            is_told = is_told or _is_told(router, path)
            page = router.get(f"{path}/safe_to_delete")
            if page["safe_to_delete"]:
                sys.stdout.write(f"{flags.name} may be deleted\n")
                return 0
            why, is_final = "; ".join(page["reasons"]), False
        except RequestFailed as error:
            why, is_final = str(error), error.http_status in FINAL
        if is_final or time.monotonic() >= until_s:
            sys.stderr.write(f"launch drain: it is not known that {flags.name} may be deleted: {why}\n")
            return 1
        time.sleep(ASK_S)


def _is_told(router: RouterClient, path: str) -> bool:
    """Tell it to drain. False: it is no member now: it has left, or it is silent and may come back. Raises RequestFailed."""
    try:
        router.post(f"{path}/drain", {})
    except RequestFailed as error:
        if error.http_status != HTTPStatus.NOT_FOUND:
            raise
        return False
    return True
