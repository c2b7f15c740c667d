"""Of how many layers a step's KV is in the pages, told while the step computes, so that pages can be pushed layer by layer.

Owns the groups of layers, and on CUDA the events between them. Knows no pages or pushes.

On CPU a layer's KV is in memory when it has been written. On CUDA it is when the stream has come that far: an event is recorded
after each group, and `wait`, called when the whole forward is in the stream, follows them one by one.
"""

from collections.abc import Callable

import torch


class LayerProgress:
    """groups: of layers; each costs a turn of the instance's loop and a push. The last is pushed while the last layer attends and
    the first token is sampled. 0: nothing is told.

    told: called after each group with the number of layers that are done; None: nobody asks.
    """

    def __init__(self, device: torch.device, layers: int, groups: int, told: Callable[[int], None] | None) -> None:
        self._told = told
        self._on_stream = device.type == "cuda"
        self._ends = {layers * group // groups for group in range(1, groups + 1)} - {0}
        self._events: list[tuple[int, torch.cuda.Event]] = []

    def written(self, layers: int) -> None:
        """The KV of the first `layers` layers has been written, or will be by what is in the stream."""
        if self._told is None or layers not in self._ends:
            return
        if not self._on_stream:
            self._told(layers)
            return
        event = torch.cuda.current_stream().record_event()
        self._events.append((layers, event))

    def wait(self) -> None:
        """Tell of the groups as the device gets there."""
        if self._told is not None:
            for layers, event in self._events:
                event.synchronize()
                self._told(layers)
