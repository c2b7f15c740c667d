"""What ranks report of one push, link or settlement becomes one report. The ranks' own transfers are lists here."""

from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from common.ids import Incarnation, InstanceId, Ticket
from common.messages import InstanceInfo, LinkInfo, LinkState
from common.messages.transfers import (
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
from kv_transfer.target_ranks import RankedTransfers, TargetRanks
from tests.builders import LAYOUT, instance, key

D = InstanceId("d")
LIFE = Incarnation("1")
PAGES = np.array([0], dtype=np.int32)


class Listed:
    """Transfers of one rank: what they were told, and what they are to report next."""

    def __init__(self) -> None:
        self.commands: list[TransferCommand] = []
        self.events: list[TransferEvent] = []
        self.progress_s = 7.0
        self.closed = False

    def submit(self, command: TransferCommand) -> None:
        self.commands.append(command)

    def poll(self) -> list[TransferEvent]:
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        self.closed = True

    def taken(self) -> list[TransferCommand]:
        commands, self.commands = self.commands, []
        return commands


def peer(ranks: int, incarnation: str = "1", heads: int = 4) -> InstanceInfo:
    """With so many KV heads in all."""
    info = instance("d", "decode", incarnation)
    pool, share = info.pools[0], max(1, heads // ranks)
    layout = replace(LAYOUT, kv_heads=share)
    pools = tuple(
        replace(pool, agent=f"a{rank}", layout=layout, first_head=rank * heads // ranks // share * share) for rank in range(ranks)
    )
    return replace(info, model=replace(info.model, kv_heads=heads), pools=pools)


def push(ticket: int, incarnation: Incarnation = LIFE) -> Push:
    return Push(Ticket(ticket), D, incarnation, PAGES, PAGES, key())


def link(name: str, state: LinkState, detail: str = "", incarnation: str = "1", bytes_per_s: float | None = None) -> LinkChanged:
    life = Incarnation(incarnation)
    return LinkChanged(LinkInfo(peer=InstanceId(name), incarnation=life, state=state, detail=detail, bytes_per_s=bytes_per_s))


class Writer:
    """The target ranks of one rank of a writer."""

    def __init__(self, rank: int = 0, ranks: int = 1, heads: int = 4) -> None:
        self.inner = Listed()
        self.transfers = TargetRanks(self.inner, rank, ranks, heads)

    def told(self, command: TransferCommand) -> list[TransferCommand]:
        """What a command becomes."""
        self.transfers.submit(command)
        return self.inner.taken()

    def reports(self, *events: TransferEvent) -> list[TransferEvent]:
        self.inner.events += events
        return self.transfers.poll()

    def connected(self, info: InstanceInfo) -> "Writer":
        self.told(Connect((info,)))
        self.inner.taken()
        return self

    def pushed(self, ticket: int) -> list[Ticket]:
        return [command.ticket for command in self.told(push(ticket)) if isinstance(command, Push)]


def names(commands: Sequence[TransferCommand]) -> list[tuple[list[str], list[str]]]:
    return [([info.id for info in each.peers], list(each.left)) for each in commands if isinstance(each, Connect)]


def test_with_one_rank_on_both_sides_commands_and_events_pass_as_they_are() -> None:
    writer, one = Writer(), peer(1)
    for command in (Connect((one,)), push(1), Allow(D, LIFE, 9.0), Settle(key()), Expect(2), Connect((), (D,))):
        (passed,) = writer.told(command)
        assert passed is command or (isinstance(command, Connect) and passed == command)
    events = (link("d", "ready"), PushDone(Ticket(1), 5, 0.5), PushFailed(Ticket(2), "no", True), Settled(key()))
    assert writer.reports(*events) == list(events)


def test_each_rank_that_is_written_to_is_a_peer_with_one_pool() -> None:
    writer, info = Writer(), peer(2)
    (connect,) = writer.told(Connect((info,)))
    assert isinstance(connect, Connect)
    assert [(each.id, each.incarnation, each.pools) for each in connect.peers] == [
        ("d/0", LIFE, info.pools[:1]),
        ("d/1", LIFE, info.pools[1:]),
    ]
    assert writer.told(Allow(D, LIFE, 9.0)) == [Allow(InstanceId("d/0"), LIFE, 9.0), Allow(InstanceId("d/1"), LIFE, 9.0)]


def test_ranks_that_hold_the_same_head_share_the_targets() -> None:
    writers = [Writer(rank, ranks=4, heads=2).connected(peer(2, heads=2)) for rank in range(4)]
    assert [writer.pushed(1) != [] for writer in writers] == [True, False, False, True]
    assert writers[1].reports() == [link("d", "ready", "other ranks write"), PushDone(Ticket(1), 0, 0.0, 0)]
    writers[1].transfers.submit(push(2, Incarnation("0")))
    (failed,) = writers[1].reports()
    assert isinstance(failed, PushFailed) and not failed.begun, "that life has left"


def test_a_push_is_done_when_all_its_parts_are() -> None:
    writer = Writer().connected(peer(2))
    one, two = writer.pushed(1)
    assert writer.reports(PushDone(two, 30, 0.25, runs=3)) == []
    assert writer.reports(PushDone(one, 10, 0.5, runs=2)) == [PushDone(Ticket(1), 40, 0.5, runs=5)]


@pytest.mark.parametrize("quiescent", [True, False])
def test_a_push_of_which_a_part_failed_has_failed_when_all_have_ended(quiescent: bool) -> None:
    writer = Writer().connected(peer(2))
    one, two = writer.pushed(1)
    assert writer.reports(PushFailed(one, "it broke", quiescent, begun=False)) == []
    begun = PushFailed(Ticket(1), "to rank 0: it broke", quiescent, begun=True)
    assert writer.reports(PushDone(two, 10, 0.5)) == [begun]
    one, two = writer.pushed(2)
    refused = [PushFailed(each, "no lease", quiescent=True, begun=False) for each in (one, two)]
    assert writer.reports(*refused) == [PushFailed(Ticket(2), "to rank 0: no lease", quiescent=True, begun=False)]


def test_a_link_is_ready_when_all_its_parts_are_and_lost_when_one_is() -> None:
    writer = Writer().connected(peer(2))
    assert writer.reports(link("d/1", "ready", "fast", bytes_per_s=3.0)) == []
    assert writer.reports(link("d/0", "ready", "fast", bytes_per_s=5.0)) == [link("d", "ready", "fast", bytes_per_s=3.0)]
    assert writer.reports(link("d/1", "lost", "it hung up")) == [link("d", "lost", "to rank 1: it hung up")]
    assert writer.reports(link("d/0", "lost", "it too")) == [link("d", "lost", "to rank 1: it hung up")][1:]
    assert writer.reports(link("d/1", "ready", "fast")) == [link("d", "lost", "to rank 0: it too")]
    assert writer.reports(link("d/0", "ready", "fast")) == [link("d", "ready", "fast")]


def test_a_peer_may_return_with_another_number_of_ranks() -> None:
    writer = Writer()
    lives = [peer(1), peer(2, "2"), peer(4, "3"), peer(1, "4")]
    assert [names(writer.told(Connect((life,)))) for life in lives] == [
        [(["d"], [])],
        [(["d/0", "d/1"], ["d"])],
        [(["d/0", "d/1", "d/2", "d/3"], [])],
        [(["d"], ["d/0", "d/1", "d/2", "d/3"])],
    ]
    assert writer.reports(link("d/0", "ready", incarnation="3")) == [], "that life has left"
    assert names(writer.told(Connect((), (D,)))) == [([], ["d"])]


def test_a_peer_that_is_named_again_keeps_its_links() -> None:
    writer = Writer().connected(peer(2))
    assert names(writer.told(Connect((peer(2),)))) == [([], [])]
    writer.reports(link("d/0", "ready"))
    assert writer.reports(link("d/1", "ready")) == [link("d", "ready")]


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        (peer(1, heads=8), "its model has 8 KV heads, and ours has 4"),
        (peer(3), "4 KV heads cannot be divided among 3 ranks"),
        (replace(peer(2), pools=peer(2).pools[::-1]), "a rank of its holds the KV heads 2–3, not 0–1"),
        (replace(peer(2), pools=(peer(2).pools[0],) * 2), "a rank of its holds the KV heads 0–1, not 2–3"),
    ],
    ids=["another model", "no such division", "wrong order", "a rank twice"],
)
def test_a_peer_whose_ranks_do_not_hold_the_heads_that_they_must_gets_no_link(info: InstanceInfo, reason: str) -> None:
    writer = Writer()
    assert names(writer.told(Connect((info,)))) == [([], ["d"])]
    assert writer.reports() == [link("d", "lost", reason)]


class Ranks:
    """Two ranks of a writer, under one scheduler."""

    def __init__(self) -> None:
        self.ranks = Listed(), Listed()
        self.transfers = RankedTransfers(self.ranks)

    def reports(self, rank: int, *events: TransferEvent) -> list[TransferEvent]:
        self.ranks[rank].events += events
        return self.transfers.poll()


def test_every_rank_gets_every_command_and_events_come_when_all_have_reported_them() -> None:
    two = Ranks()
    commands: list[TransferCommand] = [Connect((peer(1),)), push(1), Settle(key())]
    for command in commands:
        two.transfers.submit(command)
    assert [rank.commands for rank in two.ranks] == [commands, commands]
    assert two.reports(0, link("d", "ready", "x", bytes_per_s=2.0), PushDone(Ticket(1), 4, 0.5), Settled(key())) == []
    assert two.reports(1, link("d", "ready", "x", bytes_per_s=3.0), PushDone(Ticket(1), 6, 0.25), Settled(key())) == [
        link("d", "ready", "x", bytes_per_s=5.0),
        PushDone(Ticket(1), 10, 0.5, runs=2),
        Settled(key()),
    ]
    two.transfers.submit(push(2))
    assert two.reports(1, PushFailed(Ticket(2), "to rank 3: no", quiescent=False)) == []
    assert two.reports(0, PushDone(Ticket(2), 4, 0.5)) == [PushFailed(Ticket(2), "rank 1: to rank 3: no", quiescent=False)]
    two.transfers.close()
    assert all(rank.closed for rank in two.ranks)


def test_two_settlements_of_one_key_are_two() -> None:
    two = Ranks()
    for _ in range(2):
        two.transfers.submit(Settle(key()))
    assert two.reports(0, Settled(key()), Settled(key())) == []
    assert two.reports(1, Settled(key())) == [Settled(key())]
    assert two.reports(1, Settled(key())) == [Settled(key())]


def test_what_ranks_say_of_a_life_that_has_left_is_not_passed_on() -> None:
    two = Ranks()
    two.transfers.submit(Connect((peer(1),)))
    two.transfers.submit(Connect((peer(1, "2"),)))
    assert two.reports(0, link("d", "lost", "gone")) == []
    two.transfers.submit(Connect((), (D,)))
    assert two.reports(0, link("d", "lost", "gone", "2")) == []


def test_the_slowest_rank_tells_how_old_the_progress_is() -> None:
    two = Ranks()
    two.ranks[1].progress_s = 3.0
    assert two.transfers.progress_s == 3.0
