"""What commands ask a router about its fleet: which members are missing, how to send a first request, and whether an instance
that drains may be deleted (`launch drain`).

Owns the questions. What is proven, the router says; what it does not know is no proof. The router may be away for a while, as in
an upgrade: `launch drain` asks again until its time is over. Knows the router's pages. Imports nothing heavy.
"""

import json
import shlex
import ssl
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from common.access import read_api_keys, read_control_key
from common.addresses import LOOPBACK, reachable
from common.config import AccessConfig
from common.options import option, require, require_above_0
from common.processes.router_client import RequestFailed, RouterClient

ANSWER_S = 5.0
"""How long the router may take for an answer."""
ASK_S = 0.5
"""How often it is asked about an instance that drains. What it knows comes with heartbeats, which are as frequent."""
FINAL = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
OPEN_TO_ALL = AccessConfig()


class FleetPage:
    """The router's pages at `url`. access: of the router; its keys are read here too, and its certificate is the one expected."""

    def __init__(self, url: str, access: AccessConfig = OPEN_TO_ALL) -> None:
        tls, control_key = trusting(access.tls_cert), read_control_key(access.control_key)
        api_key = next(iter(read_api_keys(access.api_keys))) if access.api_keys else ""
        self._control, self._api = (RouterClient(url, key, ANSWER_S, tls) for key in (control_key, api_key))

    def missing(self, prefill: Sequence[str], decode: Sequence[str]) -> list[str]:
        """Why the fleet is not complete yet: missing members and links, or what keeps the router from using them."""
        cluster = self.get("/cluster")
        if cluster is None:
            return ["the router does not answer"]
        members = {instance["id"]: instance for instance in cluster["instances"]}
        reasons = [f"{name} has not joined the fleet" for name in (*prefill, *decode) if name not in members]
        if not reasons and not cluster["router"]["settled"]:
            reasons.append("the instances are being told of each other")
        for name in prefill if not reasons else ():
            if members[name]["usable"] < members[name]["peers"]:
                reasons += self._links_missing(name)
        router = cluster["router"]
        return reasons or [str(reason) for reason in (*router["unready"], *router["degraded"])]

    def _links_missing(self, name: str) -> list[str]:
        """Why this prefill instance cannot use all its links. It tells more of them than the page of all instances does."""
        links = (self.get(f"/cluster?links={quote(name)}") or {}).get("links", ())
        reasons = [
            f"the link of {name} to {link['peer']} is {link['state']} {link['detail']}".rstrip()
            for link in links
            if link["state"] != "ready"
        ]
        return reasons or [f"{name} and its peers have not all heard of each other"]

    def get(self, path: str) -> Any:
        """The JSON of a page, or None when there is no answer."""
        try:
            return (self._control if path.startswith("/cluster") else self._api).get(path)
        except RequestFailed:
            return None


def trusting(cert: str) -> ssl.SSLContext | None:
    """The context of a client that knows the server by this certificate, not by its host name: it uses a loopback address. None
    where no certificate is named."""
    if not cert:
        return None
    context = ssl.create_default_context(cafile=cert)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is trusted, whoever has signed it
    return context


def curl_line(url: str, access: AccessConfig = OPEN_TO_ALL) -> str:
    """A first request to paste into a shell: a greeting to the served model. It shows no key."""
    url = reachable(url, LOOPBACK)
    models = FleetPage(url, access).get("/v1/models") or {"data": [{"id": "demo"}]}
    body = {"model": models["data"][0]["id"], "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}
    trust = "--insecure " if access.tls_cert else ""  # the certificate is for a name, and this host is asked by its address
    key = '-H "Authorization: Bearer $API_KEY" ' if access.api_keys else ""
    head = f"curl {trust}{url}/v1/chat/completions {key}-H 'Content-Type: application/json'"
    return f"{head} \\\n  -d {shlex.quote(json.dumps(body))}"


# --- launch drain ------------------------------------------------------------------------------------------------------------


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


def drain(flags: DrainFlags, control_key: str) -> int:
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
        warning = router.post(f"{path}/drain", {}).get("warning")
    except RequestFailed as error:
        if error.http_status != HTTPStatus.NOT_FOUND:
            raise
        return False
    if warning:
        sys.stderr.write(f"launch drain: {warning}\n")
    return True
