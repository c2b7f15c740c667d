"""Reports how many layers of KV a running step has written, so that pages can be pushed while it computes.

Owns the groups of layers, and on CUDA the events between them. Knows no pages or pushes.

On CPU a layer's KV is in memory as soon as `written` is called. On CUDA it is there when the stream has come that far: `written`
records an event after each group, and `wait`, called when the whole forward is in the stream, waits for them one by one.
"""

from collections.abc import Callable

import torch


class LayerProgress:
    """groups: how many groups of layers to report; each costs a turn of the instance's loop and a push. 0: report nothing.

    The last group is pushed while the last layer attends and the first token is sampled. report: called after each group with
    the number of layers that are done; None: nobody asks. between: called at every layer.
    """

    def __init__(
        self,
        device: torch.device,
        layers: int,
        groups: int,
        report: Callable[[int], None] | None,
        between: Callable[[], None] | None = None,
    ) -> None:
        self._report, self.between = report, between
        self._on_stream = device.type == "cuda"
        self._ends = {layers * group // groups for group in range(1, groups + 1)} - {0}
        self._events: list[tuple[int, torch.cuda.Event]] = []

    def written(self, layers: int) -> None:
        """Call when the KV of the first `layers` layers is written, or its writes are in the stream."""
        if self.between is not None:
            self.between()
        if self._report is None or layers not in self._ends:
            return
        if not self._on_stream:
            self._report(layers)
            return
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append((layers, event))

    def wait(self) -> None:
        """Report each group when the device has written it."""
        if self._report is not None:
            for layers, event in self._events:
                event.synchronize()
                self._report(layers)
