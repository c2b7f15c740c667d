"""A flood of large schemas: how long another key's small ones wait. Prints the figures; judges nothing.

python -m tests.soak.grammar_flood --schemas 20
"""

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any

from common.processes.router_client import RequestFailed, RouterClient
from tests.rig.report import figures, keyed_fleet, say

PROPERTIES = 1_700
"""The properties of a large schema: about 60,000 characters, of at most 65,536."""
WAIT_S = 600.0
"""Nobody waits longer for an answer."""


def chat(schema: dict[str, Any]) -> dict[str, Any]:
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": "2+2"}],
        "max_tokens": 8,
        "response_format": response_format,
    }


def large(random: Random) -> dict[str, Any]:
    """No two are the same, and no compiler makes much of what they have in common."""
    properties = {f"p{number}_{random.randrange(10**6)}": {"type": "string"} for number in range(PROPERTIES)}
    return {"type": "object", "properties": properties}


def asking(bob: RouterClient) -> Callable[[], str]:
    """Each time a schema of one boolean that no instance has seen."""
    numbers = itertools.count()

    def ask() -> str:
        flag = f"flag{next(numbers)}"
        schema = {"type": "object", "properties": {flag: {"type": "boolean"}}, "required": [flag]}
        return outcome(bob, "/v1/chat/completions", chat(schema))

    return ask


def outcome(client: RouterClient, path: str, body: dict[str, Any]) -> str:
    """What became of a request, in a few words."""
    try:
        client.post(path, body)
    except RequestFailed as error:
        return f"{error.http_status}: {error}"[:120]
    return "200"


def while_pending(ask: Callable[[], str], pending: Sequence[Future[Any]], least: int) -> tuple[list[float], float]:
    """Ask again and again while one of these is not done, and at least so often. Returns the seconds of each answer, and of all.
    Raises RequestFailed for an answer that is none."""
    began_s, seconds = time.monotonic(), list[float]()
    while len(seconds) < least or not all(future.done() for future in pending):
        asked_s = time.monotonic()
        if (said := ask()) != "200":
            raise RequestFailed(said)
        seconds.append(time.monotonic() - asked_s)
    return seconds, time.monotonic() - began_s


def main() -> int:
    parser = argparse.ArgumentParser(description="a flood of large schemas of one key, beside small ones of another")
    parser.add_argument("--schemas", type=int, default=20, help="that alice sends at once")
    parser.add_argument("--idle", type=int, default=50, help="bob's requests before that")
    given, flags = parser.parse_known_args()
    random = Random(1)
    bodies = [chat(large(random)) for _ in range(given.schemas)]
    say(f"alice: {given.schemas} schemas of {len(json.dumps(large(random))):,} characters; bob: one boolean, a new one each time")
    with (
        keyed_fleet(*flags, timeout_s=WAIT_S, alice="a" * 24, bob="b" * 24) as clients,
        ThreadPoolExecutor(given.schemas) as pool,
    ):
        alice, bob = clients["alice"], clients["bob"]
        ask = asking(bob)
        first, _ = while_pending(ask, [], 1)
        say(f"bob's first:  {figures(first)}")
        idle, _ = while_pending(ask, [], given.idle)
        say(f"bob idle:     {figures(idle)}")
        flood = [pool.submit(outcome, alice, "/v1/chat/completions", body) for body in bodies]
        flooded, took_s = while_pending(ask, flood, 1)
        say(f"bob flooded:  {figures(flooded)}")
        say(f"alice, in {took_s:.1f} s:")
        for said, count in Counter(future.result() for future in flood).most_common():
            say(f"{count:5} x {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
