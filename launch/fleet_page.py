"""What `launch local` asks the router about the fleet: which members are missing, and how to send a first request.

Owns the questions. Knows the router's pages. Imports nothing heavy.
"""

import http.client
import json
import shlex
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from common.addresses import LOOPBACK, reachable

ASK_S = 5.0


class FleetPage:
    """The router's pages at `url`."""

    def __init__(self, url: str) -> None:
        self._netloc = urlsplit(url).netloc

    def missing(self, prefill: Sequence[str], decode: Sequence[str]) -> list[str]:
        """Why the fleet is not complete yet: missing members and links, or what keeps the router unready."""
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
        return reasons or [str(reason) for reason in cluster["router"]["unready"]]

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
        connection = http.client.HTTPConnection(self._netloc, timeout=ASK_S)
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()


def curl_line(url: str) -> str:
    """A first request to paste into a shell: a greeting to the served model."""
    url = reachable(url, LOOPBACK)
    models = FleetPage(url).get("/v1/models") or {"data": [{"id": "demo"}]}
    body = {"model": models["data"][0]["id"], "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d {shlex.quote(json.dumps(body))}"
