"""The sending end of the handoff for tests: each call returns the actions, and behind them what has closed. Knows no test."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeAlias

from common.ids import Key
from kv_transfer.handoff_source import HandoffSource

P = ParamSpec("P")
Method: TypeAlias = Callable[Concatenate[HandoffSource, P], list[Any]]


def with_closings(
    method: Callable[Concatenate[HandoffSource, P], list[Any]],
) -> Callable[Concatenate[HandoffSource, P], list[Any]]:
    """The method's actions, and behind them what has closed."""

    def call(source: HandoffSource, /, *args: P.args, **named: P.kwargs) -> list[Any]:
        return [*method(source, *args, **named), *source.take_closings()]

    return call


class Source(HandoffSource):
    """A HandoffSource whose caller takes the closings after each event."""

    open = with_closings(HandoffSource.open)
    computed = with_closings(HandoffSource.computed)
    give_up = with_closings(HandoffSource.give_up)
    receive = with_closings(HandoffSource.receive)
    transfer_ended = with_closings(HandoffSource.transfer_ended)
    peers_gone = with_closings(HandoffSource.peers_gone)
    tick = with_closings(HandoffSource.tick)

    def layers_computed(self, key: Key, layers: int) -> list[Any]:
        return self.computed(key, 0, layers)

    def sampled(self, key: Key, first_token: int) -> list[Any]:
        return self.computed(key, 0, first_token=first_token)
