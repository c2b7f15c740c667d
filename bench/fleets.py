"""A fleet that is measured: sent one request at a time, and asked what it counted.

Owns the clock of the client. Knows the public API and /cluster. Does not know what is compared with what.
"""

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from bench.client import completion_of_ids
from common.processes.local_fleet import FleetFailed, connected

ANSWER_TOKENS = 2
"""The second token is the first that a decode instance computes."""
COUNTED_S = 60.0
LOOK_EVERY_S = 0.02
EVENT = b"data: "


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """When the first and the last token came to the client, in seconds since it sent the request, and all of them."""

    first_s: float
    last_s: float
    token_ids: tuple[int, ...]


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of all instances of a fleet, added up, since it was started."""

    requests_ended: int = 0
    bytes_pushed: int = 0
    push_seconds: float = 0.0
    exposed_seconds: float = 0.0

    def since(self, before: "Totals") -> "Totals":
        ours, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(before)
        return Totals(**{name: ours[name] - theirs[name] for name in ours})


class Fleet:
    """A running fleet. Every method raises FleetFailed."""

    def __init__(self, url: str, instances: int) -> None:
        self._url = url
        self._instances = instances
        self._model = ""

    def serve(self, prompt: Sequence[int], answer_tokens: int = ANSWER_TOKENS) -> tuple[Arrivals, Totals]:
        """Send one request and wait until every instance has counted it. Returns the client's times and what was counted."""
        before = self._totals()
        arrivals = self._ask(prompt, answer_tokens)
        deadline = time.monotonic() + COUNTED_S
        while (counted := self._totals().since(before)).requests_ended < self._instances:
            if time.monotonic() > deadline:
                raise FleetFailed(f"an answered request is not over on each instance after {COUNTED_S:g} s: {counted}")
            time.sleep(LOOK_EVERY_S)
        return arrivals, counted

    def _totals(self) -> Totals:
        with connected(self._url) as connection:
            connection.request("GET", "/cluster")
            cluster = json.loads(connection.getresponse().read())
        if len(cluster["instances"]) < self._instances:
            raise FleetFailed("an instance has left")
        counters = [instance["counters"] for instance in cluster["instances"]]
        self._model = cluster["instances"][0]["model"]["name"]
        return Totals(**{name: sum(each[name] for each in counters) for name in Totals.__struct_fields__})

    def _ask(self, prompt: Sequence[int], answer_tokens: int) -> Arrivals:
        data = completion_of_ids(self._model, prompt, answer_tokens, stream=True, return_token_ids=True)
        with connected(self._url) as connection:
            began = time.perf_counter()
            connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise FleetFailed(f"HTTP {response.status}: {response.read().decode(errors='replace')}")
            tokens = [(at - began, token_id) for at, token_id in _tokens(response)]
        if len(tokens) != answer_tokens:
            raise FleetFailed(f"an answer has {len(tokens)} tokens instead of {answer_tokens}")
        return Arrivals(first_s=tokens[0][0], last_s=tokens[-1][0], token_ids=tuple(token_id for _, token_id in tokens))


def _tokens(response: http.client.HTTPResponse) -> Iterator[tuple[float, int]]:
    """Each token of a streamed completion, and when it arrived on `time.perf_counter`. Raises FleetFailed for an error event."""
    for line in response:
        now = time.perf_counter()
        data = line.strip().removeprefix(EVENT)
        if not data or data.startswith(b":") or data == b"[DONE]":
            continue
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise FleetFailed(f"a request failed: {event['error']}")
        for choice in event["choices"]:
            yield from ((now, token_id) for token_id in choice.get("token_ids", ()))
