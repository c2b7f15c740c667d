"""This host: its memory, processor cores and GPUs, as far as this process may use them, and how instances share them.

Owns the reading of /proc and of control groups (version 2 and 1), which is where containers have their limits. Decides nothing,
and takes no memory of a GPU.
"""

import os
import resource
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
_BOUNDLESS = 2**60
"""Version 1 writes a huge number where there is no limit."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory of a host, or of a container."""

    total_bytes: int
    """The same on hosts of one kind."""
    free_bytes: int
    """What can be used now; caches that the kernel gives back count as free."""


def host_memory_now(proc: Path = PROC, cgroups: Path = CGROUPS) -> HostMemory:
    """The memory of the host, or that of the tightest control group around this process."""
    lines = _fields(proc / "meminfo")
    total_bytes, free_bytes = lines["MemTotal"] * 1024, lines["MemAvailable"] * 1024
    for folder, limit_name, used_name, prefix in (
        *((folder, "memory.max", "memory.current", "") for folder in _groups("", proc, cgroups)),
        *(
            (folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            for folder in _groups("memory", proc, cgroups / "memory")
        ),
    ):
        limit = _number(folder / limit_name)
        if limit is None or limit >= _BOUNDLESS:
            continue
        total_bytes = min(total_bytes, limit)
        fields = _fields(folder / "memory.stat")
        cache_bytes = sum(fields.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))  # active: read more than once
        used_bytes = (_number(folder / used_name) or 0) - cache_bytes
        free_bytes = min(free_bytes, max(0, limit - used_bytes))
    return HostMemory(total_bytes, free_bytes)


def own_memory_bytes(proc: Path = PROC) -> int:
    """What this process holds in memory of its own: neither files that it maps nor what it has not touched."""
    return _fields(proc / "self" / "status")["RssAnon"] * 1024


def processor_quota(proc: Path = PROC, cgroups: Path = CGROUPS) -> float | None:
    """Processors' worth of time that the control groups around this process let it use. None: no limit."""
    quotas = [
        float(parts[0]) / float(parts[1])
        for folder in _groups("", proc, cgroups)
        if len(parts := _words(folder / "cpu.max")) == 2 and parts[0] != "max"
    ]
    for folder in _groups("cpu", proc, cgroups / "cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _groups(controller: str, proc: Path, root: Path) -> Iterator[Path]:
    """The folders of the group of this process and of those around it. In a container, the innermost is often the root.
    controller: of version 1; "" for version 2."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = root / path.strip("/")
            yield group
            yield from (folder for folder in group.parents if folder == root or root in folder.parents)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _number(path: Path) -> int | None:
    """None: there is no such file, or it says `max`."""
    words = _words(path)
    return int(words[0]) if words and words[0].lstrip("-").isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """The numbers of lines such as `MemTotal: 16 kB` or `inactive_file 4096`."""
    words = (line.replace(":", " ").split() for line in _lines(path))
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


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


DRIVER = (Path("/proc/driver/nvidia"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Where NVIDIA's driver shows itself: on Linux, in containers, in WSL."""


def count_gpus(driver: Sequence[Path] = DRIVER) -> int:
    """GPUs that torch can use, as CUDA_VISIBLE_DEVICES allows. A host without the driver answers at once: importing torch takes
    seconds."""
    if not any(path.exists() for path in driver):
        return 0
    import torch

    return torch.cuda.device_count()


MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
"""The variable by which CUDA, too, finds MPS."""


def mps_is_there(environment: Mapping[str, str], pipes: Path = Path("/tmp/nvidia-mps")) -> bool:
    """Whether processes on one GPU compute through NVIDIA's MPS: its daemon has a pipe or socket `control` in this folder.

    pipes: where it is if the variable does not say. Source: NVIDIA Multi-Process Service, "Environment Variables".
    """
    control = Path(environment.get(MPS_PIPES) or pipes) / "control"
    return control.is_fifo() or control.is_socket()


def allow_many_files() -> None:
    """Raise this process's limit to the highest that it may have. Sockets count as files, and systems start processes with a
    limit as low as 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
