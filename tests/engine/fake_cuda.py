"""A stand-in for a card: tensors that say that they lie on one, and a stream whose work waits until somebody waits for it.

Owns the stream, its events, and the copies between host and card. Computes everything else at once, on the CPU: so it shows the
order of copies and events, and not that of kernels.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CARD = torch.device("cuda", 0)
GARBAGE = 77
"""What memory holds before anything is written there."""


class FakeStream:
    """started, done: how many pieces of work the card was given, and how many it has done. It works as late as it may."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self.started = self.done = 0

    def start(self, work: Callable[[], object]) -> None:
        self._work.append(work)
        self.started += 1

    def run(self, until: int | None = None) -> None:
        """Do the first `until` pieces of all that were ever started; None: all."""
        while self.done < (self.started if until is None else until):
            self._work.popleft()()
            self.done += 1


class FakeEvent:
    """As torch.cuda.Event: waiting for it takes no time if it was not recorded."""

    def __init__(self, stream: FakeStream, blocking: bool = False) -> None:
        self._stream, self._behind = stream, 0

    def record(self) -> None:
        self._behind = self._stream.started

    def synchronize(self) -> None:
        self._stream.run(self._behind)


class CardTensor(Tensor):
    """Its numbers are in host memory, and its results are such tensors too."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CARD


class _Copies(TorchFunctionMode):
    """Copies between host and card wait in the stream. Those that would make the host wait are refused."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self._stream = stream
        self._pinned: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if named.pop("pin_memory", False):
            pinned = func(*args, **named).fill_(GARBAGE)
            self._pinned[pinned.data_ptr()] = pinned  # kept, so that no other memory gets this address
            return pinned
        if named.get("device") == CARD:
            return func(*args, **(named | {"device": "cpu"})).as_subclass(CardTensor)
        if func is Tensor.to and CARD in args[1:]:
            sent = torch.full_like(args[0], GARBAGE).as_subclass(CardTensor)
            return self._copy(sent, args[0], **named)
        if func is Tensor.copy_ and isinstance(args[0], CardTensor) != isinstance(args[1], CardTensor):
            return self._copy(args[0], args[1], **named)
        return func(*args, **named)

    def _copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        on_host = source if isinstance(to, CardTensor) else to
        assert non_blocking, "the host waits for this copy"
        assert on_host.untyped_storage().data_ptr() in self._pinned, "the card cannot copy pageable memory by itself"
        plain = [x.as_subclass(Tensor) for x in (to, source)]
        self._stream.start(lambda: plain[0].copy_(plain[1]))
        return to


@contextmanager
def fake_card() -> Iterator[FakeStream]:
    """torch has this card while it lasts."""
    stream = FakeStream()
    properties = mock.Mock(multi_processor_count=132)
    with (
        mock.patch.object(torch.cuda, "Event", partial(FakeEvent, stream)),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        _Copies(stream),
    ):
        yield stream
