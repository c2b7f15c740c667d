"""The pipes between a driver and the benchmark: orders come in, and what arrived goes out, each as a line of JSON.

Owns the lines, as `bench/cpu_peers/driven.py` reads and writes them. Imports the standard library alone: it runs in the peers'
environments.
"""

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any


def requests_of_each_load() -> Iterator[list[dict[str, Any]]]:
    """The requests of one load after the other: `prompt`, token ids, and `answer_tokens`. Ends with the benchmark."""
    report("Ready")
    with os.fdopen(int(os.environ["TANDEM_ORDER_FD"]), encoding="utf-8") as orders:
        for line in orders:
            yield json.loads(line)["requests"]


def arrived(requests: Iterable[int]) -> None:
    """A token came for each of these requests."""
    report("Arrived", requests=list(requests))


def report(kind: str, **fields: Any) -> None:
    data = json.dumps({"type": kind, **fields}).encode() + b"\n"
    while data:
        data = data[os.write(int(os.environ["TANDEM_REPORT_FD"]), data) :]
