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
    """For each instance its device, and how many instances share that.

    device: as `--device`. With auto, instances take the GPUs in turn, so that neighbours are on different ones; without a GPU
    each of them finds the processor.
    """
    devices: Sequence[str] = [device] * instances
    if device == "auto" and gpus:
        devices = [f"cuda:{number % gpus}" for number in range(instances)]
    sharers = Counter(devices)
    return [(name, sharers[name] if name.startswith("cuda") else 1) for name in devices]
