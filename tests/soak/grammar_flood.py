"""A flood of large schemas: how long another key's small ones wait. Prints the figures; judges nothing.

python -m tests.soak.grammar_flood --schemas 20
"""

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import Any

from common.processes.router_client import RouterClient
from tests.soak.floods import figures, keyed_fleet, outcome, while_pending

PROPERTIES = 1_700
"""Of a large schema: about 60,000 characters, of at most 65,536."""
_print = partial(print, flush=True)


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


def main() -> int:
    parser = argparse.ArgumentParser(description="a flood of large schemas of one key, beside small ones of another")
    parser.add_argument("--schemas", type=int, default=20, help="that alice sends at once")
    parser.add_argument("--idle", type=int, default=50, help="bob's requests before that")
    given, flags = parser.parse_known_args()
    random = Random(1)
    bodies = [chat(large(random)) for _ in range(given.schemas)]
    _print(
        f"alice: {given.schemas} schemas of {len(json.dumps(large(random))):,} characters; bob: one boolean, a new one each time"
    )
    with keyed_fleet(*flags) as (alice, bob), ThreadPoolExecutor(given.schemas) as pool:
        ask = asking(bob)
        first, _ = while_pending(ask, [], 1)
        _print(f"bob's first:  {figures(first)}")
        idle, _ = while_pending(ask, [], given.idle)
        _print(f"bob idle:     {figures(idle)}")
        flood = [pool.submit(outcome, alice, "/v1/chat/completions", body) for body in bodies]
        flooded, took_s = while_pending(ask, flood, 1)
        _print(f"bob flooded:  {figures(flooded)}")
        _print(f"alice, in {took_s:.1f} s:")
        for said, count in Counter(future.result() for future in flood).most_common():
            _print(f"{count:5} x {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
