"""What the C library does with memory that a step has given back, on CPU.

Owns that setting. Knows no tensors.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_BYTES = 2**30
_NEVER = 2**31 - 1


def keep_step_memory() -> None:
    """The memory of a step's tensors stays with this process, for the next step. Else glibc gives large tensors back to the
    system at once. Then the system clears each page again when it is next touched, which takes 5 % of a prefill. Threads share
    one arena, because glibc gives back those of threads whatever is set.

    It holds for what is allocated from now on: call it when the weights are loaded. Does nothing where the C library is another.
    Source: mallopt(3).
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    try:
        mallopt = library.mallopt
    except AttributeError:  # musl
        return
    for parameter, value in ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _LARGEST_BYTES), (_M_TRIM_THRESHOLD, _NEVER)):
        mallopt(parameter, value)
