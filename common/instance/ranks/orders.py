"""Transfer commands and events as they travel between the leader and its followers.

Owns the translation, in both directions, and with it that of a lease's end to another host's clock. Knows no sockets.
"""

from typing import assert_never

from common.ids import pack_ids, unpack_ids
from common.instance.ports import (
    Allow,
    Connect,
    Expect,
    LinkChanged,
    Push,
    PushDone,
    PushFailed,
    Settle,
    Settled,
    TransferCommand,
    TransferEvent,
)
from common.messages.ranks import (
    AllowOrder,
    ConnectOrder,
    ExpectOrder,
    LinkNews,
    News,
    Order,
    PushDoneNews,
    PushFailedNews,
    PushOrder,
    SettledNews,
    SettleOrder,
)


def pack_command(command: TransferCommand, clock_offset_s: float) -> Order:
    """clock_offset_s: what to add to a time of our clock to have one of the follower's that is no later."""
    match command:
        case Connect():
            return ConnectOrder(command.peers, command.left)
        case Push():
            layers = None if command.layers is None else (command.layers.start, command.layers.stop)
            source, target = pack_ids(command.source_pages), pack_ids(command.target_pages)
            return PushOrder(command.ticket, command.peer, command.incarnation, source, target, command.key, layers)
        case Allow():
            return AllowOrder(command.peer, command.incarnation, command.until_s + clock_offset_s)
        case Settle():
            return SettleOrder(command.key)
        case Expect():
            return ExpectOrder(command.writes, command.distant)
        case _:
            assert_never(command)


def unpack_order(order: Order) -> TransferCommand:
    match order:
        case ConnectOrder():
            return Connect(order.peers, order.left)
        case PushOrder():
            layers = None if order.layers is None else range(*order.layers)
            source, target = unpack_ids(order.source_pages), unpack_ids(order.target_pages)
            return Push(order.ticket, order.peer, order.incarnation, source, target, order.key, layers)
        case AllowOrder():
            return Allow(order.peer, order.incarnation, order.until_s)
        case SettleOrder():
            return Settle(order.key)
        case ExpectOrder():
            return Expect(order.writes, order.distant)
        case _:
            assert_never(order)


def pack_event(event: TransferEvent) -> News:
    match event:
        case PushDone():
            return PushDoneNews(event.ticket, event.pushed_bytes, event.seconds, event.runs)
        case PushFailed():
            return PushFailedNews(event.ticket, event.reason, event.quiescent, event.begun)
        case LinkChanged():
            return LinkNews(event.link)
        case Settled():
            return SettledNews(event.key)
        case _:
            assert_never(event)


def unpack_news(news: News) -> TransferEvent:
    match news:
        case PushDoneNews():
            return PushDone(news.ticket, news.pushed_bytes, news.seconds, news.runs)
        case PushFailedNews():
            return PushFailed(news.ticket, news.reason, news.quiescent, news.begun)
        case LinkNews():
            return LinkChanged(news.link)
        case SettledNews():
            return Settled(news.key)
        case _:
            assert_never(news)
