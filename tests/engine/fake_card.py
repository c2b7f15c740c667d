"""A card whose tensors have shapes, dtypes, strides and a device, and no numbers: a whole engine starts and steps on it at the
real sizes of a model, without memory or a GPU.

Owns what a card refuses of one step: tensors of two devices in one operation, copies for which the host would wait, sizes that
depend on data, kernels that are started with the wrong arguments, and in a capture whatever crosses to the host. torch's own meta
functions check each operation (`FakeTensorMode`); Triton's kernels and FlashInfer's compiled modules are replaced by checks of
what they are given. Does not know what is computed.
"""

import contextlib
import ctypes
import functools
import importlib
import inspect
import math
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from engine import backends, model_runner, parallel
from engine.backends import FlashInferHost
from engine.cpu import build
from engine.gpu import flashinfer
from engine.models.weights import WeightSlots
from engine.parallel import Group, TorchGroup
from tests.engine.graph_recorder import BY_INDICES, by_mask

GiB = 2**30
CARD = torch.device("cuda", 0)
CARD_BYTES = 80 * GiB
GUARD = """#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""
"""Without it, torch for CPU indexes no fake tensor that says it lies on a card."""
STAGED_BYTES = 2**16
_COPIES = ("copy_", "_to_copy")


class Refused(AssertionError):
    """What a card would not do, do wrong, or make the host wait for."""


@functools.cache
def load_guard(folder: Path) -> None:
    """Lets torch for CPU handle tensors that say they lie on a card, for as long as this process lasts."""
    source, library, torch_folder = folder / "guard.cpp", folder / "guard.so", Path(torch.__file__).parent
    source.write_text(GUARD)
    options = ["-std=c++20", "-O0", "-w", "-shared", "-fPIC", f"-I{torch_folder / 'include'}"]
    subprocess.run(["c++", *options, source, f"-L{torch_folder / 'lib'}", "-lc10", "-o", library], check=True, timeout=120)
    ctypes.CDLL(str(library))


class FakeCard:
    """started: the names of the kernels of Triton and FlashInfer that were started, and of collectives, in order."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability
        self.started: list[str] = []
        self.is_strict, self.is_capturing = False, False
        self.captures = self.replays = 0

    @contextlib.contextmanager
    def steps(self) -> Iterator[None]:
        """From here on the host must wait for nothing: what an engine does while it serves. A start may."""
        self.is_strict = True
        try:
            yield
        finally:
            self.is_strict = False

    # --- what stands in for torch.cuda --------------------------------------------------------------------------------------

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Implements `GraphMaker`."""
        run()
        self.is_capturing = True
        try:
            run()
        finally:
            self.is_capturing = False
        self.captures += 1

        def replay() -> None:
            self.replays += 1

        return replay

    def synchronize(self, device: object = None) -> None:
        if self.is_strict or self.is_capturing:
            raise Refused("the host waits for the whole card")

    def start_kernel(self, name: str, tensors: Sequence[object]) -> None:
        """tensors: what the kernel reads and writes on the device."""
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor) or tensor.device != CARD:
                where = tensor.device if isinstance(tensor, Tensor) else type(tensor).__name__
                raise Refused(f"the kernel {name} is given a tensor on {where}")
        self.started.append(name)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets host tensors have numbers, and watches what passes between them and the card."""

    def __init__(self, card: FakeCard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._card = card
        self._pinned: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if kwargs.pop("pin_memory", None) or name == "_pin_memory":
            with unset_fake_temporarily():
                pinned = args[0].clone() if name == "_pin_memory" else func(*args, **kwargs)
            self._pinned[pinned.untyped_storage().data_ptr()] = pinned  # kept, so that no other memory gets this address
            return pinned
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_host = [tensor for tensor in given if not isinstance(tensor, FakeTensor)]
        if name not in (*_COPIES, *BY_INDICES):  # a number travels among a kernel's arguments
            on_host = [tensor for tensor in on_host if tensor.ndim > 0]
        asks = kwargs.get("device")
        to_card = any(isinstance(tensor, FakeTensor) for tensor in given) or (asks is not None and asks.type == "cuda")
        if not to_card:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if on_host or (asks is not None and asks.type == "cpu"):
            return self._cross(func, name, args, kwargs, on_host)
        if name in BY_INDICES and by_mask(name, *args):
            raise Refused(f"{name} counts on the host what a mask holds")
        return func(*args, **kwargs)

    def _cross(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], on_host: Sequence[Tensor]) -> Any:
        """An operation over tensors of the host and of the card: a copy, or a mistake."""
        if name not in _COPIES:
            with self:
                made_of_others = func.decompose(*args, **kwargs)
            if made_of_others is not NotImplemented:
                return made_of_others
            raise Refused(f"{name} is given tensors of the host and of the card")
        if self._card.is_capturing:
            raise Refused(f"{name} copies between host and card in a capture")
        waits = not (kwargs.get("non_blocking") or args[2:3] == (True,))
        to_host = name == "copy_" and not isinstance(args[0], FakeTensor)
        pageable = any(self._is_pageable(tensor, to_host) for tensor in on_host)
        if self._card.is_strict and (waits or pageable or not on_host):
            raise Refused(f"{name}: the host waits for a copy" + (" from pageable memory" if pageable else ""))
        if to_host:
            return args[0]
        if name == "_to_copy" and isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        fake = tree_map_only(Tensor, _as_fake, (args, kwargs))
        return func(*fake[0], **fake[1])

    def _is_pageable(self, tensor: Tensor, to_host: bool) -> bool:
        """CUDA stages few bytes of pageable memory on their way to a card, and does not wait (API synchronization behavior)."""
        is_staged = not to_host and tensor.nbytes <= STAGED_BYTES
        return not is_staged and tensor.untyped_storage().data_ptr() not in self._pinned


def _as_fake(tensor: Tensor) -> Tensor:
    """The same shape on the host without numbers."""
    return tensor if isinstance(tensor, FakeTensor) else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _address(tensor: Tensor) -> int:
    """As `Tensor.data_ptr`. Fake tensors begin at a multiple of 256 and what their offset adds."""
    if isinstance(tensor, FakeTensor):
        return 2**40 + int(tensor.storage_offset()) * tensor.itemsize
    return torch._C.TensorBase.data_ptr(tensor)


def _pinned(tensor: Tensor) -> Tensor:
    """As `Tensor.pin_memory`."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _contiguous_strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[at + 1 :]) for at in range(len(shape))]


class CheckedKernel:
    """Stands in for a kernel of Triton: checks how it is started, and computes nothing.

    A parameter `NAME_row`, or with another dimension, is the stride of the tensor NAME (or NAMEs); of the dimensions for which
    there is none, the strides are those of a contiguous tensor.
    """

    DIMENSIONS = ("page", "head", "slot", "token", "row")
    SHARED = {"cos": "angle", "sin": "angle"}  # noqa: RUF012

    def __init__(self, card: FakeCard, name: str, kernel: Any) -> None:
        self._card, self._name = card, name
        self._signature = inspect.signature(kernel.fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if not 1 <= len(grid) <= 3 or any(not isinstance(size, int) or size < 1 for size in grid):
            raise Refused(f"{self._name}: the grid {grid}")
        if grid[0] >= 2**31 or any(size >= 2**16 for size in grid[1:]):
            raise Refused(f"{self._name}: the grid {grid} is larger than CUDA's")
        return self._start

    def _start(self, *args: object, num_warps: int = 4, **named: object) -> None:
        from triton.backends.nvidia.compiler import CUDAOptions

        if num_warps not in (1, 2, 4, 8, 16, 32):
            raise Refused(f"{self._name}: {num_warps} warps")
        arguments = {name: value for name, value in named.items() if name not in CUDAOptions.__dataclass_fields__}
        try:
            given = self._signature.bind(*args, **arguments).arguments
        except TypeError as error:
            raise Refused(f"{self._name}: {error}") from error
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        for name, value in given.items():
            is_constant = "constexpr" in str(self._signature.parameters[name].annotation)
            if is_constant and not isinstance(value, int | bool | float | str):
                raise Refused(f"{self._name}: {name} is to be a constant and is {type(value).__name__}")
            if type(value) is int and not -(2**31) <= value < 2**31 and not is_constant:
                raise Refused(f"{self._name}: {name} is {value}, which Triton takes for 64 bits and compiles anew")
        for name, tensor in tensors.items():
            self._check_strides(name, tensor, given)
        self._card.start_kernel(self._name, list(tensors.values()))

    def _check_strides(self, name: str, tensor: Tensor, given: dict[str, Any]) -> None:
        stem = self.SHARED.get(name, name)
        told = [given[key] for key in self._signature.parameters if self._is_stride(key, stem)]
        contiguous = _contiguous_strides(tensor.shape)
        expected = (*told, *contiguous[len(told) :])
        for size, stride, wanted in zip(tensor.shape, tensor.stride(), expected, strict=True):
            if size > 1 and stride != wanted:
                raise Refused(f"{self._name}: {name} has strides {tensor.stride()}, and {expected} are meant")

    def _is_stride(self, key: str, stem: str) -> bool:
        before, _, dimension = key.rpartition("_")
        return dimension in self.DIMENSIONS and before in (stem, stem.removesuffix("s"))


class _CompiledModule:
    """Stands in for a compiled module of FlashInfer, as in `test_real_wrappers`: checks, and computes nothing."""

    def __init__(self, card: FakeCard, *arguments: object) -> None:
        self._card, self._host_arrays = card, 1 if len(arguments) == 9 else 3

    def plan(self, *arguments: Any) -> list[int]:
        for array in arguments[3 : 3 + self._host_arrays]:
            if isinstance(array, FakeTensor) or array.dtype != torch.int32:
                raise Refused("FlashInfer's plan reads lists on the host")
        return [0]

    def paged_run(self, *arguments: Any) -> None:
        """The kernel of chunks, and of decode rows on tensor cores."""
        query, keys, values, queries, indptr, indices, last, out = arguments[3:11]
        self._run("paged_run", query, keys, values, out, [queries, indptr, indices, last], len(queries) - 1)

    def run(self, *arguments: Any) -> None:
        """The kernel of decode rows on CUDA cores."""
        query, keys, values, indptr, indices, last, out = arguments[3:10]
        self._run("decode_run", query, keys, values, out, [indptr, indices, last], len(query))

    def _run(self, name: str, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, lists: list[Tensor], rows: int) -> None:
        self._card.start_kernel(name, [query, keys, values, out, *lists])
        if keys.stride() != values.stride() or keys.stride(-1) != 1 or not (query.is_contiguous() and out.is_contiguous()):
            raise Refused(f"{name}: keys {keys.stride()}, values {values.stride()}, queries {query.stride()}")
        if any(each.dtype != torch.int32 or not each.is_contiguous() for each in lists):
            raise Refused(f"{name}: lists of {[each.dtype for each in lists]}")
        if out.shape != query.shape or out.dtype != query.dtype or len(lists[-1]) != rows or len(lists[-3]) != rows + 1:
            raise Refused(f"{name}: {rows} rows, and lists of {[len(each) for each in lists]}")


class _Collectives:
    """Stands in for a group of NCCL."""

    def __init__(self, card: FakeCard, ranks: int) -> None:
        self._card, self._ranks = card, ranks

    def allreduce(self, tensors: list[Tensor], options: object) -> None:
        self._check("all_reduce", tensors)

    def _allgather_base(self, into: Tensor, part: Tensor, options: object) -> None:
        self._check("all_gather", [into, part])
        if into.numel() != self._ranks * part.numel() or into.dtype != part.dtype:
            raise Refused(f"all_gather of {tuple(part.shape)} into {tuple(into.shape)}")

    def _check(self, name: str, tensors: list[Tensor]) -> None:
        self._card.start_kernel(name, tensors)
        if any(not tensor.is_contiguous() for tensor in tensors):
            raise Refused(f"{name} of a tensor with strides")


def fake_group(card: FakeCard, rank: int, ranks: int) -> Group:
    """One rank of a group on this card."""
    collectives = mock.patch.object(parallel, "_nccl", lambda *given: _Collectives(card, ranks))
    with collectives, mock.patch.object(parallel, "share_memory", return_value="nothing is shared here"):
        return TorchGroup(HashStore(), rank, ranks, CARD, "", 1.0)


def _fill_with_anything(slots: WeightSlots, seed: int = 0) -> None:
    """As `fill_random`."""
    for slot in slots.slots.values():
        slot.put(torch.empty(slot.shape, dtype=slots.dtype, device=CARD)[slot.cut])


@contextlib.contextmanager
def fake_card(folder: Path, capability: tuple[int, int] = (9, 0)) -> Iterator[FakeCard]:
    """This process has such a card, Triton and FlashInfer while it lasts. folder: for what must be compiled."""
    load_guard(folder)
    from engine.gpu import triton_source

    card = FakeCard(capability)
    event = mock.Mock(side_effect=lambda **named: mock.Mock())
    on_cuda: dict[str, Any] = {
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device: mock.Mock(multi_processor_count=132),
        "mem_get_info": lambda device: (CARD_BYTES, CARD_BYTES),
        "memory_reserved": lambda device: 0,
        "empty_cache": lambda: None,
        "synchronize": card.synchronize,
        "device": lambda device: contextlib.nullcontext(),
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": mock.Mock(),
        "Event": event,
    }
    host = FlashInferHost(capability, "stands in")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **on_cuda))
        stack.enter_context(mock.patch.multiple(backends, host_of=lambda device: host))
        stack.enter_context(mock.patch.object(build, "for_triton", lambda: ()))
        stack.enter_context(mock.patch.object(model_runner, "CudaGraphs", lambda: card))
        stack.enter_context(mock.patch.object(WeightSlots, "fill_random", _fill_with_anything))
        _replace_flashinfer(stack, card)
        _replace_triton(stack, card, triton_source)
        stack.enter_context(mock.patch.multiple(Tensor, data_ptr=_address, pin_memory=_pinned))
        for mode in (FakeTensorMode(allow_non_fake_inputs=True), _Operations(card)):
            stack.enter_context(mode)
        yield card


def _replace_triton(stack: contextlib.ExitStack, card: FakeCard, module: Any) -> None:
    from triton.runtime.jit import JITFunction

    for name, kernel in inspect.getmembers(module):
        if isinstance(kernel, JITFunction):
            stack.enter_context(mock.patch.object(module, name, CheckedKernel(card, name, kernel)))


def _replace_flashinfer(stack: contextlib.ExitStack, card: FakeCard) -> None:
    """Its wrappers are its own, and its compiled modules are not."""
    stack.enter_context(mock.patch.object(flashinfer, "_Largest", Tensor))  # a fake tensor is of no other class
    made = functools.partial(_CompiledModule, card)
    for name in ("flashinfer.decode", "flashinfer.prefill"):
        module = importlib.import_module(name)
        for function, stands_in in (
            ("get_batch_prefill_module", made),
            ("get_batch_decode_module", made),
            ("device_support_pdl", lambda device: False),
        ):
            stack.enter_context(mock.patch.object(module, function, stands_in, create=True))
