"""The attention of one step as a model sees it: writes each layer's KV to its pages, reports it, and attends.

Owns the order of these three. Knows no models, rows or plans.
"""

from collections.abc import Callable

from torch import Tensor

from common.engine.attention.port import Attention
from common.engine.kernels.port import HeadNorm, Kernels, PagePlaces, Rotation
from common.engine.kernels.torch_kernels import write
from common.engine.kv_memory import KVMemory


class PagedStep:
    """Implements `StepAttention`. attention: planned for the step. pages, slots: [tokens] int64, where its tokens' KV is written.

    written: called with the number of layers that are written.
    """

    def __init__(
        self,
        memory: KVMemory,
        attention: Attention,
        kernels: Kernels,
        pages: Tensor,
        slots: Tensor,
        written: Callable[[int], None],
    ) -> None:
        self._memory = memory
        self._attention = attention
        self._kernels = kernels
        self._pages = pages
        self._slots = slots
        self._written = written

    def rotate_and_attend(self, layer: int, heads: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        query = self._kernels.rotate_and_write(heads, rotation, norm, self._places(layer))
        self._written(layer + 1)
        return self._attention.run(layer, query)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        write(self._places(layer), key, value)
        self._written(layer + 1)
        return self._attention.run(layer, query)

    def _places(self, layer: int) -> PagePlaces:
        keys, values = self._memory.layers[layer]
        return PagePlaces(keys, values, self._pages, self._slots)
