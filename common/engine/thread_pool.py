"""The threads that OpenMP keeps for a thread that computes, on CPU.

Owns their end. Does not set how many they are, or how long they wait for work (`launch/environment.py`).
"""

import ctypes

import torch

_HARD = 2
"""omp_pause_hard: everything of a pool is given back. GNU's runtime does the same for omp_pause_soft."""


def end_own_pool() -> None:
    """End the threads that OpenMP keeps for the calling thread, which gets others when it next computes.

    Each thread that computes has a pool of its own, for as long as it lives. Where all pools together have more threads than
    there are processors, GNU's runtime lets a thread that waits sleep at once, and must wake it for each layer. So whoever
    computes no more should end its pool. Other runtimes have one pool for all threads, and are left alone. Source: libgomp's
    team.c and env.c; OpenMP 5.0, section 3.2.44.
    """
    try:
        library = ctypes.CDLL(torch._C.__file__)  # finds the symbols of what torch depends on, too
        end = library.omp_pause_resource_all
    except (OSError, AttributeError):
        return
    if not _is_llvm(library):
        end(_HARD)


def _is_llvm(library: ctypes.CDLL) -> bool:
    """Whether the runtime is LLVM's or Intel's."""
    try:
        return bool(library.__kmpc_fork_call)
    except AttributeError:
        return False
