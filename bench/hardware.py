"""What a measurement ran on: the machine, its kernel, the libraries and the date.

Owns the questions to the system. Decides nothing.
"""

import importlib.metadata
import os
import platform
import subprocess
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
    "triton",
    "flashinfer-python",
    "transformers",
    "numpy",
)


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """cores: those that this process may run on. load: the machine's over the last minute, when measuring began. gpus: the
    name of each, its driver, and the highest clocks of its processors and its memory. torch's version names that of CUDA."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    libraries: dict[str, str]
    load: float
    date: str
    gpus: tuple[str, ...] = ()


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
        gpus=_gpus(),
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _gpus() -> tuple[str, ...]:
    """As NVIDIA's tool names them, which makes no context on them. Empty where the tool is not."""
    command = ("nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem", "--format=csv,noheader")
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(listed.splitlines())


def _version_of(library: str) -> str:
    """Empty when it is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""
