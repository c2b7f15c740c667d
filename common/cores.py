"""The processor cores and GPUs of this host, and how instances share them. Owns no thread."""

import os
from collections import Counter
from collections.abc import Sequence

from common.errors import ConfigError
from common.host_limits import processor_quota


def core_count() -> int:
    """Cores that this process may run on, and has the processor time for: a container may have less than the host shows."""
    cores, quota = len(os.sched_getaffinity(0)), processor_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def divide_cores(cores: int, instances: int) -> int:
    """Threads for each of the instances on one host: at least one each, and together no more than the cores where possible."""
    return max(1, cores // max(1, instances))


def sharers_of_host(sharers: int, threads: int, ranks: int) -> int:
    """How many ranks have equal parts of this host's memory.

    sharers: instances here; 0: not told. Then there is room for another one at least, and for as many as there are cores for.
    threads: of each rank; 0: all cores. ranks: of each instance.
    """
    if sharers:
        return sharers * ranks
    return max(2 * ranks, core_count() // threads if threads else 1)


def place_on_gpus(device: str, instances: int, gpus: int, ranks: int = 1) -> list[tuple[str, int]]:
    """For each instance the device of its first rank, and how many instances share a device at most: all take equal parts of
    memory, because the instances of a fleet must agree on the context. Raises ConfigError.

    device: as `--device`. With auto, instances take the GPUs in turn, so that neighbours are on different ones; without a GPU
    each of them finds the processor. ranks: of each instance, on GPUs side by side.
    """
    devices: Sequence[str] = [device] * instances
    if device == "auto" and gpus:
        devices_of_ranks("cuda", ranks, gpus)
        devices = [f"cuda:{number % (gpus // ranks) * ranks}" for number in range(instances)]
    sharers = max(Counter(devices).values(), default=1)
    return [(name, sharers) for name in devices]


def devices_of_ranks(device: str, ranks: int, gpus: int) -> list[str]:
    """The device of each rank that one host starts: GPUs side by side, from that of `--device` on, or the processor for all.
    Raises ConfigError when there are not enough GPUs."""
    if device == "cpu" or (device == "auto" and not gpus):
        return [device] * ranks
    first = int(device.partition(":")[2] or 0)
    if ranks > 1 and first + ranks > gpus:
        raise ConfigError(
            f"{ranks} ranks need the GPUs {first} to {first + ranks - 1}, and this host has {gpus}: lower --tp, start some "
            f"of the ranks on another host with --rank, or give --device cpu"
        )
    return [f"cuda:{first + number}" for number in range(ranks)] if ranks > 1 else [device]
