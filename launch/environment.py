"""The environment of a process, set before the libraries that read it are imported.

Owns the variables for programs, threads, logs and transports. Imports nothing heavy.
"""

import os
import sys
from pathlib import Path

from common.cores import core_count

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS")
_SPINS = "1000"
"""How often a thread of GNU's OpenMP, which torch has, looks whether there is work before it sleeps: for about 50 us. The default
is 300,000 times, which is no faster on an idle host, and three times slower where anybody else wants the cores: threads that wait
then keep those from running that they wait for (docs/measurements/cpu.md)."""
_INFINIBAND = Path("/sys/class/infiniband")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def prepare(threads: int) -> None:
    """Set the environment of this process. threads: the size of a thread pool; 0 means one thread for each core.

    Settings of transports and of waiting threads that are already set stay, so a person can override ours.
    """
    find_programs()
    for name in _THREAD_VARIABLES:
        os.environ[name] = str(threads or core_count())
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    if _HUGE_PAGES.exists():  # torch asks for them, so weights take fewer lookups of addresses; it complains where there are none
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
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


def find_programs() -> None:
    """The programs of this Python's environment are found, activated or not: FlashInfer starts `ninja` by its name."""
    ours, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    if ours not in path.split(os.pathsep):
        os.environ["PATH"] = f"{ours}{os.pathsep}{path}" if path else ours
