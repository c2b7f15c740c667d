"""Replays of the decode step: what it started once is started again by one call.

Owns CUDA graphs and the ladder of their batch sizes, and on CPU the recordings of what a function computed in C, with the memory
of what its calls return. Both start the same functions on the same memory each time. Does not know what a step computes. Source:
CUDA C++ Programming Guide, "CUDA Graphs".

Between two calls of C, Python takes a few microseconds, and ten times that where a layer's weights have just gone through the
caches. docs/measurements/cpu.md has what that was of a step.
"""

import contextlib
import ctypes
import itertools
import math
import weakref
from bisect import bisect_left, insort_left
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import ConfigError
from engine.cpu.build import HEADERS, LISTENING, load

Replay = Callable[[], None]


class GraphMaker(Protocol):
    """Captures what a function starts on the device, so that it can be started again at once, on the same storage."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """run: called a few times; it must start the same kernels on the same tensors each time, and wait for none of them.
        Returns a callable that starts them again."""


class CudaGraphs:
    """Implements `GraphMaker`. All graphs share one memory pool, because they run one after the other."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Replay:
        stream = torch.cuda.current_stream()
        run()  # libraries make their handles, and Triton compiles, at the first call
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                run()
        except RuntimeError as error:
            # torch 2.13 leaves its allocator waiting for the end of a capture that CUDA has ended: no memory would go back.
            with contextlib.suppress(RuntimeError):  # where it does not wait, it says so
                torch._C._cuda_endAllocateToPool(stream.device_index, self._pool)
            first = error.__context__  # torch ends the capture behind it, which fails with what came of it
            if isinstance(first, RuntimeError):
                raise first from None
            raise
        return graph.replay


def ladder(asked: str, max_rows: int) -> tuple[int, ...]:
    """The batch sizes of the graphs, ascending, up to max_rows. asked: "auto" or sizes such as "1,2,4,8". Raises ConfigError.

    auto: steps of one eighth to a half of the size, so that padding wastes little: 1, 2, 4, 8, 16, 24, …, 64, 80, …, 256, 288, …
    """
    if asked == "auto":
        steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 32)]
        return (*(size for size in steps if size < max_rows), max_rows)
    try:
        sizes = sorted({int(size) for size in asked.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1:
        raise ConfigError(f"--graph-sizes must be auto or batch sizes such as 1,2,4,8; it is {asked!r}")
    if sizes[-1] > max_rows:
        raise ConfigError(f"--graph-sizes: {sizes[-1]} is more than --max-running {max_rows}")
    return tuple(sizes)


def fitting(sizes: Sequence[int], rows: int) -> int | None:
    """The smallest of the ascending sizes that holds so many rows; None if none does."""
    return next((size for size in sizes if size >= rows), None)


SOURCE = HEADERS / "elementwise.c"
_LINE = 64
"""Bytes of a cache line: blocks are whole ones."""
_aten = torch.ops.aten


class CannotRecord(Exception):
    """Something is computed outside of C. The message says what."""


class _Recorded(ctypes.Structure):
    """`recorded` in C."""

    _fields_ = (("function", ctypes.c_void_p), ("call", ctypes.c_void_p))


class CallRecorder:
    """Makes recordings that run one after the other, on one thread, and share the memory of what is computed.

    So what a recording returns lasts until the next one runs.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._replay = library.replay
        self._replay.argtypes, self._replay.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int], None
        self._memory = _Memory()

    def record(self, function: Callable[[Callable[[int], None]], tuple[Tensor, ...]]) -> "Recording":
        """The recording of a function that computes in C alone, from the same tensors each time. It is not computed now, so
        what the function reads of it does not count.

        It is given a function to call where others may have their say: see `Recording.run`. Raises CannotRecord.
        """
        listener = _Listener(self._memory)
        LISTENING.to = listener
        try:
            with listener:
                results = function(listener.mark)
        finally:
            LISTENING.to = None
        return Recording(self._replay, self._memory, listener.calls, listener.marks, results)


class Recording:
    """Computes what was recorded."""

    def __init__(
        self,
        replay: Callable[[int, int, int], None],
        memory: "_Memory",
        calls: list[tuple[int, bytes]],
        marks: list[int],
        results: tuple[Tensor, ...],
    ) -> None:
        self._replay, self._results = replay, tuple(map(memory.lasting, results))
        self._memory = memory  # the calls point to it
        begins = itertools.accumulate((len(call) for _, call in calls), initial=0)
        self._structures = ctypes.create_string_buffer(b"".join(call for _, call in calls))
        address = ctypes.addressof(self._structures)
        recorded = [_Recorded(function, address + begin) for (function, _), begin in zip(calls, begins, strict=False)]
        self._calls = (_Recorded * len(calls))(*recorded)
        ends = [*marks, len(calls)]
        self._parts = [(begin, end - begin) for begin, end in itertools.pairwise([0, *ends])]

    def run(self, between: Callable[[], None] | None = None) -> tuple[Tensor, ...]:
        """between: called where the recorded function called what it was given; None: all is one call of C. Threads are torch's
        of the moment. Returns the results, in the same memory each time."""
        if between is None:
            self._replay(ctypes.addressof(self._calls), len(self._calls), torch.get_num_threads())
            return self._results
        for number, (begin, count) in enumerate(self._parts):
            if number:
                between()
            address = ctypes.addressof(self._calls) + begin * ctypes.sizeof(_Recorded)
            self._replay(address, count, torch.get_num_threads())
        return self._results


class _Listener(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the calls of C, gives torch the recorder's memory, and refuses whatever else torch computes."""

    def __init__(self, memory: "_Memory") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self.calls: list[tuple[int, bytes]] = []
        self.marks: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled by torch here, and to skip its compiler loads it, which takes a second and 100 MB."""
        return False

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
        if not func._schema.is_mutable:
            with contextlib.suppress(RuntimeError, IndexError, ValueError):  # of what is not computed yet
                made = func(*args, **kwargs)
                if _is_view(made, args[0]):
                    return made  # a recording does without it
        raise CannotRecord(f"torch computes {func}")


def _is_view(made: Any, of: Any) -> bool:
    first = made[0] if isinstance(made, list | tuple) else made
    if not isinstance(of, Tensor) or not isinstance(first, Tensor):
        return False
    storage, other = first.untyped_storage(), of.untyped_storage()
    return storage.data_ptr() == other.data_ptr() and storage.nbytes() > 0


class _Memory:
    """Gives tensors, takes back the memory of those that are gone, and never gives it back itself: recordings point to it."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # the smallest first
        self._blocks: dict[int, Tensor] = {}

    def empty(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """In the smallest block that no tensor uses and that is large enough: so whoever records the largest step first, records
        all others in the same memory."""
        count = math.prod(shape)
        nbytes = -(-max(1, count * dtype.itemsize) // _LINE) * _LINE
        at = bisect_left(self._free, nbytes, key=len)
        block = self._free.pop(at) if at < len(self._free) else self._made(nbytes)
        lent = block.numpy()[:nbytes]  # torch keeps this object for as long as a tensor or a view of it lives
        weakref.finalize(lent, self._take, block).atexit = False
        return torch.from_numpy(lent)[: count * dtype.itemsize].view(dtype).view(*shape)

    def _made(self, nbytes: int) -> Tensor:
        block = torch.empty(nbytes, dtype=torch.uint8)
        self._blocks[block.data_ptr()] = block
        return block

    def _take(self, block: Tensor) -> None:
        insort_left(self._free, block, key=len)  # of equal ones, what was used last is in the caches and comes first

    def lasting(self, tensor: Tensor) -> Tensor:
        """The same numbers in the same memory, which others may be given too."""
        block = self._blocks.get(tensor.untyped_storage().data_ptr())
        if block is None:  # not made by the function
            return tensor
        at = tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(block.untyped_storage(), *at)


def load_recorder() -> CallRecorder | None:
    """None, and the log says why, where C cannot be compiled."""
    library = load(SOURCE)
    return None if library is None else CallRecorder(library)
