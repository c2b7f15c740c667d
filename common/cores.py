"""The processor cores and GPUs of this host, and how instances share them. Owns no thread."""

import os
from collections import Counter
from collections.abc import Sequence


def core_count() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def divide_cores(cores: int, instances: int) -> int:
    """Threads for each of the instances on one host: at least one each, and together no more than the cores where possible."""
    return max(1, cores // max(1, instances))


def place_on_gpus(device: str, instances: int, gpus: int) -> list[tuple[str, int]]:
    """For each instance its device, and how many instances share a GPU at most: all take equal parts of memory, because the
    instances of a fleet must agree on the context.

    device: as `--device`. With auto, instances take the GPUs in turn, so that neighbours are on different ones; without a GPU
    each of them finds the processor.
    """
    devices: Sequence[str] = [device] * instances
    if device == "auto" and gpus:
        devices = [f"cuda:{number % gpus}" for number in range(instances)]
    sharers = max(Counter(name for name in devices if name.startswith("cuda")).values(), default=1)
    return [(name, sharers) for name in devices]
