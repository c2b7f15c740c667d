"""The sending end of the handoff for tests: each call returns the actions, and behind them what has closed. Knows no test."""

from collections.abc import Iterable
from typing import Any

from common.ids import Incarnation, InstanceId, Int32Array, Key, Life
from common.instance.ports import PushDone, PushFailed
from common.messages import Decline, Grant, Renewed, Reserve
from kv_transfer.handoff_source import HandoffSource


class Source(HandoffSource):
    """A HandoffSource whose caller takes the closings after each event."""

    def open(self, reserve: Reserve, peer: Life, source_pages: Int32Array) -> list[Any]:
        return [*super().open(reserve, peer, source_pages), *self.take_closings()]

    def computed(self, key: Key, tokens: int, layers: int = 0, first_token: int | None = None) -> list[Any]:
        return [*super().computed(key, tokens, layers, first_token), *self.take_closings()]

    def layers_computed(self, key: Key, layers: int) -> list[Any]:
        return self.computed(key, 0, layers)

    def sampled(self, key: Key, first_token: int) -> list[Any]:
        return self.computed(key, 0, first_token=first_token)

    def give_up(self, key: Key) -> list[Any]:
        return [*super().give_up(key), *self.take_closings()]

    def receive(self, sender: InstanceId, message: Grant | Decline | Renewed, now: float) -> list[Any]:
        return [*super().receive(sender, message, now), *self.take_closings()]

    def transfer_ended(self, event: PushDone | PushFailed) -> list[Any]:
        return [*super().transfer_ended(event), *self.take_closings()]

    def peers_gone(self, alive: Iterable[tuple[InstanceId, Incarnation]]) -> list[Any]:
        return [*super().peers_gone(alive), *self.take_closings()]

    def tick(self, now: float) -> list[Any]:
        return [*super().tick(now), *self.take_closings()]
