"""The pipes between a driver and the benchmark: loads come on stdin, and what arrived goes to stdout, each as a line of JSON.

Owns the lines, as `benchmarks/cpu_peers.py` reads and writes them: a line with nothing says that the driver is ready for the next
load. Imports the standard library alone: it runs in the peers' environments.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

_reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)  # what a library prints goes to the log


def requests_of_each_load() -> Iterator[list[dict[str, Any]]]:
    """The requests of one load after the other: `prompt`, token ids, and `answer_tokens`. Ends with the benchmark."""
    arrived(())
    for line in sys.stdin:
        yield json.loads(line)
        arrived(())


def arrived(requests: Iterable[int]) -> None:
    """A token came for each of these requests."""
    print(json.dumps(list(requests)), file=_reports, flush=True)
