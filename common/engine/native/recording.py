"""Recordings: what a function computed in C, to be computed again by one call.

Owns how calls are noted, and the memory of what they return. Does not know what they compute. As a CUDA graph does, a recording
starts the same functions on the same memory each time; but it is made by a run that counts, so it costs nothing.

Between two calls of C, Python takes a few microseconds, and ten times that where a layer's weights have just gone through the
caches. A small model has no time for this: see "Recorded steps" in docs/measurements/cpu.md.
"""

import ctypes
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from common.engine.native.build import load
from common.engine.native.function import LISTENING

SOURCE = Path(__file__).with_name("replay.c")
T = TypeVar("T")

_aten = torch.ops.aten


class CannotRecord(Exception):
    """Something is computed outside of C. The message says what."""


class _Recorded(ctypes.Structure):
    """`recorded` in C."""

    _fields_ = (("function", ctypes.c_void_p), ("call", ctypes.c_void_p))


class Recorder:
    """Makes recordings that run one after the other, on one thread, and share the memory of what is computed.

    So what a recording returns lasts until the next one runs.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._replay = library.replay
        self._replay.argtypes, self._replay.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int], None
        self._memory = _Memory()

    def record(self, run: Callable[[Callable[[int], None]], Tensor]) -> tuple[Tensor, "Recording"]:
        """Returns what `run` does, in memory of the recorder, and the recording of it.

        run: computes in C alone, and from the same tensors each time. It gets a function to call where others may have their say:
        see `Recording.run`. Raises CannotRecord.
        """
        listener = _Listener(self._memory)
        LISTENING.to = listener
        try:
            with listener:
                made = run(listener.mark)
        finally:
            LISTENING.to = None
        result = self._memory.lasting(made)
        return result, Recording(self._replay, listener.calls, listener.marks, result)


class Recording:
    """Computes again what was recorded."""

    def __init__(
        self, replay: Callable[[int, int, int], None], calls: list[tuple[int, bytes]], marks: list[int], result: Tensor
    ) -> None:
        begins = itertools.accumulate((len(call) for _, call in calls), initial=0)
        self._structures = ctypes.create_string_buffer(b"".join(call for _, call in calls))
        address = ctypes.addressof(self._structures)
        self._calls = (_Recorded * len(calls))(
            *(_Recorded(function, address + begin) for (function, _), begin in zip(calls, begins, strict=False))
        )
        self._ends = [*marks, len(calls)]
        self._replay = replay
        self._result = result

    def run(self, between: Callable[[], None] | None = None) -> Tensor:
        """between: called where the recorded function called what it was given; None: all is one call of C. Threads are torch's
        of the moment. Returns the result, in the same memory each time."""
        if between is None:
            self._replay(ctypes.addressof(self._calls), len(self._calls), torch.get_num_threads())
            return self._result
        begin = 0
        for end in self._ends:
            self._replay(ctypes.addressof(self._calls[begin]) if end > begin else 0, end - begin, torch.get_num_threads())
            if end < len(self._calls):
                between()
            begin = end
        return self._result


class _Listener(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the calls of C, gives torch the recorder's memory, and refuses whatever else torch computes."""

    def __init__(self, memory: "_Memory") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self.calls: list[tuple[int, bytes]] = []
        self.marks: list[int] = []

    def called(self, address: int, call: ctypes.Structure) -> None:
        self.calls.append((address, bytes(call)))

    def mark(self, _: int) -> None:
        self.marks.append(len(self.calls))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.new_empty.default:
            return self._memory.empty(args[1], kwargs.get("dtype") or args[0].dtype)
        if func is _aten.empty.memory_format:
            return self._memory.empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        made = func(*args, **kwargs)
        if func._schema.is_mutable or not _storages(made) <= _storages(args):
            raise CannotRecord(f"torch computes {func}")
        return made  # a view: a recording does without it


def _storages(values: Any) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tree_flatten(values)[0] if isinstance(x, Tensor)}


class _Memory:
    """Gives tensors, takes back the memory of those that are gone, and never gives it back itself: recordings point to it."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._blocks: dict[int, Tensor] = {}

    def empty(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """In memory that no tensor uses; what was used last comes first, because it is in the caches."""
        count = int(np.prod(shape, dtype=np.int64))
        nbytes = max(1, count * dtype.itemsize)
        size = 1 << (nbytes - 1).bit_length()  # of few sizes, so that steps of all numbers of rows share them
        free = self._free[size]
        if not free:
            block = torch.empty(size, dtype=torch.uint8)
            self._blocks[block.data_ptr()] = block
            free.append(block)
        block = free.pop()
        lent = block.numpy()[:nbytes]  # torch keeps this object for as long as a tensor or a view of it lives
        weakref.finalize(lent, free.append, block).atexit = False
        return torch.from_numpy(lent)[: count * dtype.itemsize].view(dtype).view(*shape)

    def lasting(self, tensor: Tensor) -> Tensor:
        """The same memory, which others may be given too."""
        block = self._blocks[tensor.data_ptr()]
        return block[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def load_recorder() -> Recorder | None:
    """None, and the log says why, where C cannot be compiled."""
    library = load(SOURCE)
    return None if library is None else Recorder(library)
