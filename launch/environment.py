"""The environment of a process, set before the libraries that read it are imported.

Owns the variables for threads, logs and transports, and the question how many cores there are. Imports nothing heavy.
"""

import os
from pathlib import Path

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS")
_INFINIBAND = Path("/sys/class/infiniband")


def core_count() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def divide_cores(cores: int, instances: int) -> int:
    """Threads for each of so many instances on one host: at least one, and together no more than the cores if that can be."""
    return max(1, cores // max(1, instances))


def prepare(threads: int) -> None:
    """Set the environment of this process. threads: what a thread pool may have; 0: all cores.

    Transport settings that are already set stay: they are how a person overrides them.
    """
    for name in _THREAD_VARIABLES:
        os.environ[name] = str(threads or core_count())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOG_minloglevel", "2")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not _INFINIBAND.exists():
        # The library that UCX loads for InfiniBand crashes at exit on a host that has none.
        os.environ.setdefault("UCX_MODULES", "^ib")
