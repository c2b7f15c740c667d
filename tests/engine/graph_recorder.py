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
from torch.utils._pytree import tree_flatten

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
        self._steps: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in SIZED_BY_DATA or (name in BY_INDICES and by_mask(name, *args)):
            raise NotCapturable(f"{name} counts on the host what a tensor holds")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise NotCapturable("repeat_interleave needs output_size")
        out = func(*args, **kwargs)
        self._steps.append((func, args, kwargs, tree_flatten(out)[0]))
        return out

    def replay(self) -> None:
        for func, args, kwargs, outs in self._steps:
            given = {x.untyped_storage().data_ptr() for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)}
            is_new = [isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in given for out in outs]
            if not any(is_new) and not func._schema.is_mutable:
                continue  # a view of storage that others write
            again = tree_flatten(func(*args, **kwargs))[0]
            for out, result, new in zip(outs, again, is_new, strict=True):
                if new:
                    assert out.shape == result.shape and out.dtype == result.dtype, f"{func} allocates another size"
                    out.copy_(result)


def by_mask(name: str, values: Tensor, indices: Any, new: Tensor | None = None, *_: object) -> bool:
    """A mask among the indices is counted on the host, unless one number is put wherever it holds."""
    has_mask = any(index is not None and index.dtype == torch.bool for index in indices)
    return has_mask and (new is None or new.numel() > 1)


def _refused(*args: object, **kwargs: object) -> Tensor:
    """For functions that no mode of torch sees."""
    raise NotCapturable("a tensor is made from data of the host")
