"""The environment of a process, set before the libraries that read it are imported.

Owns the variables for threads, logs and transports. Imports nothing heavy.
"""

import os
from pathlib import Path

from common.cores import core_count

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS")
_INFINIBAND = Path("/sys/class/infiniband")


def prepare(threads: int) -> None:
    """Set the environment of this process. threads: the size of a thread pool; 0 means one thread for each core.

    Transport settings that are already set stay, so a person can override ours.
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
