"""A stand-in for CUDA graphs: records the operations of a function on CPU tensors, and replays them on the same storage.

It refuses what the capture of a CUDA graph refuses: reading a tensor on the host, making one from host data, and results whose
size depends on data. What is computed on the host meanwhile is frozen in the recording, as it would be in a graph.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = {
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
}
HOST_DATA = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
SIZED_BY_DATA = ("nonzero", "masked_select", "unique", "_unique2", "bincount", "_local_scalar_dense", "equal", "is_nonzero")
BY_INDICES = ("index", "index_put", "index_put_")


class NotCapturable(Exception):
    """What a capture would refuse."""


class RecordedGraphs:
    """Implements `engine.replay.GraphMaker`."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        recorder = _Recorder()
        with (
            _HostDoor(),
            recorder,
            mock.patch.object(torch, "from_numpy", _refused),
            mock.patch.object(torch, "frombuffer", _refused),
        ):
            run()
        return recorder.replay


class _HostDoor(TorchFunctionMode):
    """Between tensors and the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_READS or func in HOST_DATA or (func is Tensor.to and "cpu" in (*args, *(kwargs or {}).values())):
            raise NotCapturable(f"{func.__name__} waits for the device, or needs data of the host")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []
        """Each operation that writes, with its arguments, and the place and tensor of each result in storage of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in SIZED_BY_DATA or (name in BY_INDICES and by_mask(name, *args)):
            raise NotCapturable(f"{name} counts on the host what a tensor holds")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise NotCapturable("repeat_interleave needs output_size")
        out = func(*args, **kwargs)
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        tensors = [(at, each) for at, each in enumerate(tree_leaves(out)) if isinstance(each, Tensor)]
        new = [(at, each) for at, each in tensors if each.untyped_storage().data_ptr() not in given]
        if new or func._schema.is_mutable:  # else it is a view of storage that others write
            self._steps.append((func, args, kwargs, new))
        return out

    def replay(self) -> None:
        for func, args, kwargs, new in self._steps:
            again = func(*args, **kwargs)
            results = [again] if isinstance(again, Tensor) else tree_leaves(again)
            for at, out in new:
                assert out.shape == results[at].shape and out.dtype == results[at].dtype, f"{func} allocates another size"
                out.copy_(results[at])


def by_mask(name: str, values: Tensor, indices: Any, new: Tensor | None = None, *_: object) -> bool:
    """A mask among the indices is counted on the host, unless one number is put wherever it holds."""
    has_mask = any(index is not None and index.dtype == torch.bool for index in indices)
    return has_mask and (new is None or new.numel() > 1)


def _refused(*args: object, **kwargs: object) -> Tensor:
    """For functions that no mode of torch sees."""
    raise NotCapturable("a tensor is made from data of the host")
