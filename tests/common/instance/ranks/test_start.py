"""The start of an instance with several ranks: who is let in, what they agree on, and what ends it."""

from functools import partial

import pytest
from msgspec.structs import replace

from common.errors import ConfigError, PeerRefused
from common.ids import Incarnation, InstanceId
from common.instance.ranks.follower import HELLO_S, SOMEBODY, FollowerLoop
from common.instance.ranks.leader import ABSENT_S, MOST_REFUSED, Followers
from common.instance.ranks.line import SILENCE_S, START_SILENCE_S, RankLost
from common.messages import EngineChoices, PoolDescriptor
from common.messages.base import WIRE_VERSION
from common.messages.ranks import Ping, RankHello, RankRefused, RankWelcome, ToFollower, ToLeader, rank_name
from tests.builders import engine, instance
from tests.common.instance.ranks.rig import ADDRESS, LEADER, rank_hello, take, travelled
from tests.common.instance.rig import FakeExecutor, FakeTransfers
from tests.common.mailboxes import FakeMail

SETUP = {"--page-size": "16", "the version of torch": "2.9"}
MODEL, POOL = engine().model, instance("decode-0", "decode").pools[0]


def hello(rank: int, life: str = "a") -> RankHello:
    return replace(rank_hello(rank, 3, life), setup=SETUP)


class Side:
    """A follower that joins."""

    def __init__(self, said: RankHello, life: str = "a") -> None:
        self.name = rank_name("decode-0", said.rank, Incarnation(life))
        self.mail: FakeMail[ToFollower] = FakeMail()
        self.loop = FollowerLoop(self.mail, ADDRESS, said)


class Start:
    """A leader that gathers, and whoever wants to join. Mail that was sent arrives with the next turn."""

    def __init__(self, *sides: Side) -> None:
        self.now = 0.0
        self.mail: FakeMail[ToLeader] = FakeMail()
        self.followers = Followers(self.mail, 3, SETUP)
        self.sides = list(sides)

    def turn(self) -> None:
        for side in self.sides:
            self.mail.arriving += [(side.name, travelled(message, ToLeader)) for _, message in take(side.mail)]
        self.followers.turn(self.clock)
        for to, message in take(self.mail):
            for side in self.sides:
                if side.name == to:
                    side.mail.arriving.append((LEADER, travelled(message, ToFollower)))
        for side in self.sides:
            side.loop.turn(self.clock)
        self.now += HELLO_S

    def clock(self) -> float:
        return self.now

    def welcomed(self) -> "Start":
        self.followers.open("h:9")
        for _ in range(3):
            self.turn()
        assert all(side.loop.welcome is not None and side.loop.welcome.meeting == "h:9" for side in self.sides)
        return self


def test_ranks_are_welcome_when_all_are_there_agree_on_the_least_and_serve_when_all_are_ready() -> None:
    first, second = Side(hello(1)), Side(hello(2))
    start = Start(first)
    start.followers.open("h:9")
    start.turn()
    start.turn()
    assert start.followers.missing == [2] and first.loop.welcome is None
    start.sides.append(second)
    start.welcomed()
    speakers: tuple[Followers | FollowerLoop, ...] = (start.followers, first.loop, second.loop)
    for offers in ((50, 40, 60), (7, 8, 9)):
        for speaker, pages in zip(speakers, offers, strict=True):
            speaker.offer(pages)
            assert speaker.agreed is None
            start.turn()
        start.turn()
        assert [each.agreed for each in speakers] == [min(offers)] * 3
    start.followers.ready(MODEL, POOL)
    for side, device in ((second, "cuda:1"), (first, "cuda:0")):
        assert not start.followers.complete
        side.loop.ready(MODEL, pool(side, device), EngineChoices(attention=f"that of {device}"))
        start.turn()
        assert side.loop.complete
        start.turn()
    assert start.followers.complete
    assert [pool.agent for pool in start.followers.pools] == [first.name, second.name]
    assert [(info.rank, info.device, info.engine.attention) for info in start.followers.infos] == [
        (1, "cuda:0", "that of cuda:0"),
        (2, "cuda:1", "that of cuda:1"),
    ]


def pool(side: Side, device: str) -> PoolDescriptor:
    return replace(POOL, agent=side.name, device=device)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (replace(hello(2), setup=SETUP | {"--page-size": "32"}), "--page-size is 32 there, and 16 on rank 0"),
        (replace(hello(2), setup={"--page-size": "16"}), "the version of torch is nothing there, and 2.9 on rank 0"),
        (replace(hello(2), ranks=4), "started with --tp 4, and rank 0 with --tp 3"),
        (replace(hello(2), rank=3), "there is no rank 3"),
        (replace(hello(2), wire_version=WIRE_VERSION + 1), "wire version"),
        (hello(1), r"rank 1 \(pid 101 on gpu-7\) is there already"),
    ],
)
def test_a_rank_that_does_not_fit_is_refused_with_the_reason_and_the_others_wait_for_the_right_one(
    wrong: RankHello, reason: str
) -> None:
    good, bad = Side(hello(1)), Side(wrong, "other")
    start = Start(good, bad)
    with pytest.raises(PeerRefused, match=reason):
        for _ in range(3):
            start.turn()
    start.sides = [good, Side(hello(2))]
    start.welcomed()


def test_a_rank_that_leaves_before_all_are_there_may_come_again_and_afterwards_it_ends_the_start() -> None:
    first, second = Side(hello(1)), Side(hello(2))
    start = Start(first)
    start.turn()
    start.turn()
    start.mail.gone = [first.name]
    start.turn()
    assert start.followers.missing == [1, 2]
    start.sides = [Side(hello(1), "again"), second]
    start.welcomed()
    start.mail.gone = [second.name]
    with pytest.raises(RankLost, match=r"rank 2 \(pid 102 on gpu-7\) is gone"):
        start.turn()
    start.followers.end("rank 2 is gone")
    with pytest.raises(RankLost, match="rank 0 at tcp://h:1 has ended the start: rank 2 is gone"):
        start.mail.arriving.clear()
        deliver_end(start)


def test_a_rank_that_says_hello_no_more_is_missing_and_its_successor_takes_its_place() -> None:
    first, again, second = Side(hello(1)), Side(hello(1), "again"), Side(hello(2))
    start = Start(first)
    start.turn()
    start.turn()
    start.sides = [again]  # the first is gone, which no connection shows
    while start.followers.missing == [2]:
        start.turn()
        assert start.now < 3 * ABSENT_S
    assert start.followers.missing == [1, 2] and start.mail.routes[first.name] is None
    start.sides.append(second)
    start.welcomed()
    assert isinstance(again.loop.welcome, RankWelcome)


def test_every_rank_that_does_not_fit_is_answered_and_few_routes_are_kept() -> None:
    start = Start()
    for life in map(str, range(2 * MOST_REFUSED)):
        name = rank_name("decode-0", 1, Incarnation(life))
        start.mail.arriving.append((name, replace(hello(1), ranks=4)))
        start.followers.turn(start.clock)
        assert [(to, type(message)) for to, message in take(start.mail)] == [(name, RankRefused)]
    assert sum(address is not None for address in start.mail.routes.values()) == MOST_REFUSED
    why = "rank 1 (pid 101 on gpu-7) was refused: it was started with --tp 4, and rank 0 with --tp 3"
    assert start.followers.refused == [why]
    start.sides = [Side(hello(1))]
    start.turn()
    start.turn()
    assert start.followers.refused == []


def test_a_rank_that_is_ready_before_the_leader_allows_for_its_loading_until_all_are() -> None:
    start = Start(Side(hello(1)), Side(hello(2))).welcomed()
    early = start.sides[0]
    early.loop.ready(MODEL, POOL)
    start.turn()
    loop = early.loop
    loop.serve(FakeExecutor(), FakeTransfers())
    loop.turn(start.clock)
    heard_s, now = start.now, start.now + START_SILENCE_S - 1.0
    loop.turn(partial(float, now))
    assert loop.next_deadline() == pytest.approx(heard_s + START_SILENCE_S, abs=HELLO_S)
    early.mail.arriving.append((LEADER, Ping(number=loop._line._taken + 1, sent_s=0.0, serving=True)))
    loop.turn(partial(float, now))
    with pytest.raises(RankLost, match="rank 0 at tcp://h:1 has been silent for 3"):
        loop.turn(partial(float, now + SILENCE_S + 0.1))


def test_a_leader_that_waits_for_a_rank_that_loads_has_nothing_to_do_in_between() -> None:
    start = Start(Side(hello(1)), Side(hello(2))).welcomed()
    start.now += SILENCE_S + 1.0
    start.followers.turn(start.clock)
    assert start.followers.next_deadline() > start.now


def test_a_follower_does_not_take_the_end_of_a_former_leader_for_that_of_the_one_that_welcomes_it() -> None:
    first, second = Side(hello(1)), Side(hello(2))
    start = Start(first)
    first.mail.gone = [SOMEBODY, LEADER]  # one address: whoever is welcome there next has both names
    start.turn()
    start.turn()
    first.mail.gone = [SOMEBODY, LEADER]
    start.sides.append(second)
    start.welcomed()
    first.mail.gone = [SOMEBODY, LEADER]
    with pytest.raises(RankLost, match="rank 0 at tcp://h:1 is gone"):
        first.loop.turn(start.clock)


def deliver_end(start: Start) -> None:
    for to, message in take(start.mail):
        for side in start.sides:
            if side.name == to:
                side.mail.arriving.append((LEADER, travelled(message, ToFollower)))
    start.sides[0].loop.turn(start.clock)


def test_both_sides_end_the_start_when_the_other_falls_silent() -> None:
    start = Start(Side(hello(1)), Side(hello(2))).welcomed()
    silent = start.sides.pop(0)
    silent.mail.arriving.clear()
    with pytest.raises(RankLost, match=r"rank 0 .* has been silent"):
        silent.loop.turn(lambda: start.now + START_SILENCE_S)
    with pytest.raises(RankLost, match=r"rank 1 .* has been silent"):
        for _ in range(40):
            start.turn()


def test_a_rank_that_is_unlike_the_leader_when_it_is_loaded_is_named_with_the_difference() -> None:
    start = Start(Side(hello(1)), Side(hello(2))).welcomed()
    start.followers.ready(MODEL, POOL)
    start.sides[1].loop.ready(replace(MODEL, dtype="bfloat16"), POOL)
    with pytest.raises(ConfigError, match=r"rank 2 differs from rank 0 in the model: .*bfloat16"):
        for _ in range(3):
            start.turn()


def test_nobody_is_there_at_first_and_the_follower_says_hello_until_somebody_answers() -> None:
    side = Side(hello(1))
    assert side.mail.routes == {SOMEBODY: ADDRESS}
    for now in (0.0, HELLO_S / 2, HELLO_S, 2 * HELLO_S):
        side.loop.turn(partial(float, now))
    assert [type(message) for _, message in take(side.mail)] == [RankHello] * 3
    assert InstanceId(LEADER) not in side.mail.routes
    assert side.loop.waits_for == "rank 0 at tcp://h:1 waits for other ranks, which it names"
    side.mail.reaches = lambda to: False  # type: ignore[method-assign]
    assert side.loop.waits_for == "nobody answered at tcp://h:1: does rank 0 listen there, with the same --cluster-key?"
