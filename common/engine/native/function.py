"""A function of our C libraries, as the engine calls it: with one structure, on torch's threads.

Owns the one way into C, so that whoever records a step hears of all that it computes there. Does not know what a function does,
or what becomes of a record (`recording.py`).
"""

import ctypes
import threading
from typing import Protocol

import torch


class Listener(Protocol):
    """Hears of the calls of one thread."""

    def called(self, address: int, call: ctypes.Structure) -> None:
        """address: of the function. call: what it got; what that points to may be gone later."""


class _Listening(threading.local):
    to: Listener | None = None


LISTENING = _Listening()
"""Who listens to the calls of this thread, if anyone does."""


class NativeFunction:
    """`void name(const call *, int threads)` of a library."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        function = library[name]  # by index: each time a function of its own
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int], None
        self._function = function
        self._address = ctypes.cast(function, ctypes.c_void_p).value or 0

    def __call__(self, call: ctypes.Structure) -> None:
        """call: the C structure that the function takes. What it points to must be there until this returns."""
        if LISTENING.to is not None:
            LISTENING.to.called(self._address, call)
            return
        # Asked at each call: torch's number follows the cores that other instances lend, and the runtime has one pool for both.
        self._function(ctypes.addressof(call), torch.get_num_threads())
