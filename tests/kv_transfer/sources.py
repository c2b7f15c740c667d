"""The sending end of the handoff for tests, and what it says and hears: each call returns the actions, and behind them the
news. Knows no test."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeAlias

from common.ids import AttemptId, Generation, Incarnation, InstanceId, pack_ids
from common.messages import Grant, Reserve
from kv_transfer.handoff_reader import WRITE_LEASE_S
from kv_transfer.handoff_writer import HandoffWriter
from tests.builders import key, sampling

P = ParamSpec("P")
Method: TypeAlias = Callable[Concatenate[HandoffWriter, P], list[Any]]


def with_news(method: Callable[Concatenate[HandoffWriter, P], list[Any]]) -> Callable[Concatenate[HandoffWriter, P], list[Any]]:
    """The method's actions, and behind them the news."""

    def call(source: HandoffWriter, /, *args: P.args, **named: P.kwargs) -> list[Any]:
        return [*method(source, *args, **named), *source.take_events()]

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


class Source(HandoffWriter):
    """A HandoffWriter whose caller takes the events after each event."""

    reserve = with_news(HandoffWriter.reserve)
    cannot_reach = with_news(HandoffWriter.cannot_reach)
    computed = with_news(HandoffWriter.computed)
    give_up = with_news(HandoffWriter.give_up)
    receive = with_news(HandoffWriter.receive)
    transfer_ended = with_news(HandoffWriter.transfer_ended)
    peers_gone = with_news(HandoffWriter.peers_gone)
    tick = with_news(HandoffWriter.tick)

    def layers_computed(self, key: AttemptId, layers: int) -> list[Any]:
        return self.computed(key, 0, layers)

    def sampled(self, key: AttemptId, first_token: int) -> list[Any]:
        return self.computed(key, 0, first_token=first_token)
