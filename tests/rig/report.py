"""What runs on real processes print, and how: sentences that hold or fail, and figures of many measurements.

Owns the verdict's form and percentiles, and the keys of a fleet's clients. Does not know what is judged or measured.
"""

import contextlib
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

CONTROL = "c" * 24


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence of a verdict."""

    holds: bool
    text: str


def say(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def print_checks(checks: Iterable[Check]) -> int:
    """Print each sentence as soon as it is known. Returns the exit status."""
    is_good = True
    for check in checks:
        say(f"{'holds' if check.holds else 'FAILS'}: {check.text}")
        is_good = is_good and check.holds
    return 0 if is_good else 1


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that so large a share of them does not exceed; not a number when there are none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan


@contextlib.contextmanager
def key_flags(**keys: str) -> Iterator[list[str]]:
    """The flags of a router that knows these keys, by the names of their clients, and the key for control."""
    with tempfile.TemporaryDirectory(prefix="tandem-keys-") as folder:
        files = {"api-keys": "".join(f"{name} {key}\n" for name, key in keys.items()), "control-key": CONTROL}
        for name, text in files.items():
            path = Path(folder, name)
            path.touch(0o600)
            path.write_text(text)
        yield [f"--{name}={folder}/{name}" for name in files]
