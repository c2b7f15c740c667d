"""The processor cores of this host, and how instances share them. Owns no thread."""

import os


def core_count() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def divide_cores(cores: int, instances: int) -> int:
    """Threads for each of the instances on one host: at least one each, and together no more than the cores where possible."""
    return max(1, cores // max(1, instances))
