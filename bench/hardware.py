"""What a measurement ran on: the machine, its kernel, the libraries and the date.

Owns the questions to the system. Decides nothing.
"""

import importlib.metadata
import os
import platform
import time
from pathlib import Path

import msgspec

from common.cores import core_count

LIBRARIES = (
    "nixl",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
    "torch",
    "numpy",
)


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """cores: those that this process may run on. load: the machine's over the last minute, when measuring began."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    libraries: dict[str, str]
    load: float
    date: str


def this_hardware() -> Hardware:
    return Hardware(
        cpu=_cpu_model(),
        cores=core_count(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        python=platform.python_version(),
        libraries={name: version for name in LIBRARIES if (version := _version_of(name))},
        load=os.getloadavg()[0],
        date=time.strftime("%Y-%m-%d"),
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _version_of(library: str) -> str:
    """Empty when it is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""
