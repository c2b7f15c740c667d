"""The sending end of the handoff for tests, and what it says and hears: each call returns the actions, and behind them the
news. Knows no test."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeAlias

from common.ids import AttemptId, Generation, Incarnation, InstanceId, pack_ids
from common.messages import Grant, Reserve
from kv_transfer.handoff_source import HandoffSource
from kv_transfer.handoff_target import WRITE_LEASE_S
from tests.builders import key, sampling

P = ParamSpec("P")
Method: TypeAlias = Callable[Concatenate[HandoffSource, P], list[Any]]


def with_news(
    method: Callable[Concatenate[HandoffSource, P], list[Any]],
) -> Callable[Concatenate[HandoffSource, P], list[Any]]:
    """The method's actions, and behind them the news."""

    def call(source: HandoffSource, /, *args: P.args, **named: P.kwargs) -> list[Any]:
        return [*method(source, *args, **named), *source.take_news()]

    return call


ME, D, BEGAN_S = Incarnation("writer"), InstanceId("d"), 100.0


def reserve(name: str = "r", tokens: int = 10, sent_s: float = BEGAN_S) -> Reserve:
    return Reserve(key=key(name), incarnation=ME, prompt=pack_ids(range(tokens)), sampling=sampling(), sent_s=sent_s)


def grant(
    name: str = "r", pages: tuple[int, ...] = (20, 21, 22), generation: int = 5, sent_s: float = BEGAN_S, have_tokens: int = 0
) -> Grant:
    return Grant(
        key=key(name),
        generation=Generation(generation),
        pages=pack_ids(pages),
        sent_s=sent_s,
        write_lease_s=WRITE_LEASE_S,
        have_tokens=have_tokens,
    )


class Source(HandoffSource):
    """A HandoffSource whose caller takes the news after each event."""

    open = with_news(HandoffSource.open)
    move = with_news(HandoffSource.move)
    cannot_reach = with_news(HandoffSource.cannot_reach)
    computed = with_news(HandoffSource.computed)
    give_up = with_news(HandoffSource.give_up)
    receive = with_news(HandoffSource.receive)
    transfer_ended = with_news(HandoffSource.transfer_ended)
    peers_gone = with_news(HandoffSource.peers_gone)
    tick = with_news(HandoffSource.tick)

    def layers_computed(self, key: AttemptId, layers: int) -> list[Any]:
        return self.computed(key, 0, layers)

    def sampled(self, key: AttemptId, first_token: int) -> list[Any]:
        return self.computed(key, 0, first_token=first_token)
