"""python -m tests.soak.transfers: senders push scattered pages to receivers that join, leave and die. Exit status 0 only for a
good verdict.

Owns the flags, the members and their periods, and what must become of a push: it is done when its receiver is there, and it fails
when it is not. The first sender and the first receiver stay from the beginning to the end. Does not know what is a good figure.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal, get_args

import msgspec

from common.messages.transfers import PushDone
from common.options import add_flags, option, read_config
from tests.kv_transfer.agent_process import Plan
from tests.kv_transfer.agents import nixl_kind
from tests.kv_transfer.members import LEASE_S, Ended, Member
from tests.rig.report import Check, percentile, print_checks, say
from tests.soak.report import HEADER, LISTED, Footprint, Pace, Period, busy_s, cpu_s, line, verdict

SILENCE_S = 10
"""As in a real instance."""
LARGE = 4
"""A push that somebody's end is to meet has so many times the pages."""
AWAY_S = 15.0
"""Longest time until a place is taken again."""
DEAD_AFTER_S = 1.0
"""So long after a receiver has died, everybody knows. As in a real fleet that is before its lost link is tried again: of each
connection that is refused, UCX 1.23 keeps the socket."""
CHECKED = 1 / 16
"""The share of pushes that is compared byte for byte."""
Presence = Literal["here", "dead", "gone"]
Strike = Literal["kill receiver", "kill sender", "receiver leaves", "sender leaves", "reconnect"]


@dataclass(frozen=True, slots=True)
class Shape:
    """How large everything is. The target pages of the senders do not overlap."""

    senders: int = 2
    receivers: int = 2
    total_pages: int = 1024
    page_bytes: int = 64 * 1024
    push_pages: int = 64

    def __post_init__(self) -> None:
        if min(self.senders, self.receivers) < 1 or LARGE * self.push_pages > self.total_pages // self.senders:
            raise ValueError(f"{self} cannot be: a sender's share of the pages must hold {LARGE} pushes")


@dataclass(slots=True, eq=False)
class Place:
    """A name in the fleet and who has it. dead: nobody has told the others; gone: it has left in order."""

    name: str
    number: int
    member: Member
    lives: int = 1
    presence: Presence = "here"
    away_since: float = 0.0
    back_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Push:
    """A push that has begun. was: of its receiver, then."""

    sender: Place
    receiver: Place
    source: Member
    target: Member
    was: Presence
    ticket: int
    source_pages: list[int]
    target_pages: list[int]


@dataclass(slots=True, eq=False)
class Tally:
    """What has happened. speeds: bytes per second of each push of the first sender."""

    counts: Counter[str] = field(default_factory=Counter)
    speeds: list[float] = field(default_factory=list)


class Fleet:
    """away_s: longest time for which a place is left empty. folder: for what the members have to complain about."""

    def __init__(self, shape: Shape, folder: Path, random: Random, away_s: float = AWAY_S) -> None:
        self._shape, self._folder, self._random, self._away_s = shape, folder, random, away_s
        self._seeds = 0
        self._struck: Counter[Strike] = Counter()
        self._tally = Tally()
        self.problems: list[str] = []
        """What must not happen."""
        self.senders, self.receivers = [
            [Place(f"{role}-{number}", number, self._start(f"{role}-{number}", 1)) for number in range(places)]
            for role, places in (("sender", shape.senders), ("receiver", shape.receivers))
        ]

    def join(self) -> None:
        """Wait until all are there and linked, and have done once what opens something for good."""
        for place in (*self.senders, *self.receivers):
            place.member.started()
        self._link()
        self.over_every_link()
        for sender in self.senders:
            self._reconnect(sender, [])
        self.over_every_link()

    def new_tally(self) -> Tally:
        """Count from here on."""
        self._tally = Tally()
        return self._tally

    @property
    def pids(self) -> list[int]:
        return [place.member.pid for place in (*self.senders, *self.receivers) if place.presence == "here"]

    def round(self) -> None:
        """Every sender that is here makes one push, all at once."""
        self._finish(self._begin(self._shape.push_pages))

    def over_every_link(self) -> None:
        """One push from each sender to each receiver: then every link is as it is in use."""
        for receiver in self.receivers:
            self._finish([self._push(sender, receiver, self._shape.push_pages) for sender in self.senders])

    def strike(self) -> None:
        """Something happens to somebody who does not have to stay, while pushes are under way: what has happened least often."""
        strikes: list[Strike] = ["reconnect"]
        senders, receivers = self._present(self.senders[1:]), self._present(self.receivers[1:])
        if senders:
            strikes += ["kill sender", "sender leaves"]
        if receivers:
            strikes += ["kill receiver", "receiver leaves"]
        strike = min(strikes, key=lambda kind: (self._struck[kind], self._random.random()))
        self._struck[strike] += 1
        self._tally.counts[strike] += 1
        pushes = self._begin(LARGE * self._shape.push_pages)
        match strike:
            case "reconnect":
                self._reconnect(self._random.choice(self._present(self.senders)), pushes)
            case "kill sender" | "kill receiver":
                victim = self._random.choice(senders if strike == "kill sender" else receivers)
                victim.member.kill()
                self._away(victim, "dead")
                self._finish(pushes)
            case "sender leaves" | "receiver leaves":
                self._finish(pushes)
                leaving = self._random.choice(senders if strike == "sender leaves" else receivers)
                self._away(leaving, "gone")
                self._tell_senders()
                leaving.member.end()

    def mend(self, everything: bool = False) -> None:
        """Take the places again whose time has come, or all; and tell of the dead."""
        now = time.monotonic()
        known = [place for place in self.receivers if place.presence == "dead" and now >= place.away_since + DEAD_AFTER_S]
        for place in known:
            place.presence = "gone"
        if known:
            self._tell_senders()
        taken = [
            place
            for place in (*self.senders, *self.receivers)
            if place.presence != "here" and (everything or now >= place.back_at)
        ]
        for place in taken:
            place.lives += 1
            place.member = self._start(place.name, place.lives)
            place.presence = "here"
            self._tally.counts["joins"] += 1
        for place in taken:
            place.member.started()
        if taken:
            self._link()

    def close(self) -> None:
        """Everybody leaves in order. Raises AssertionError when somebody does not."""
        for place in (*self.senders, *self.receivers):
            if place.presence == "here":
                place.member.end()

    def kill(self) -> None:
        """End every process, whatever state it is in."""
        for place in (*self.senders, *self.receivers):
            place.member.kill()

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _start(self, name: str, life: int) -> Member:
        self._seeds += 1  # no two members have the same bytes
        plan = Plan(
            is_threaded=True,
            transport="nixl",
            total_pages=self._shape.total_pages,
            page_bytes=self._shape.page_bytes,
            silence_s=SILENCE_S,
            seed=self._seeds,
        )
        return Member(name, life, plan, nixl_kind(tcp_only=False), self._folder)

    def _tell_senders(self) -> None:
        """Who is a peer: a receiver that is dead still is, as long as nobody knows."""
        peers = [place.member for place in self.receivers if place.presence != "gone"]
        for sender in self._present(self.senders):
            sender.member.connect(peers)

    def _link(self) -> None:
        """Connect all to all, and wait until they are."""
        self._tell_senders()
        for sender in self._present(self.senders):
            for receiver in self._present(self.receivers):
                sender.member.await_link(receiver.member, "ready")

    def _begin(self, pages: int) -> list[Push]:
        peers = [place for place in self.receivers if place.presence != "gone"]
        return [self._push(sender, self._random.choice(peers), pages) for sender in self._present(self.senders)]

    def _push(self, sender: Place, receiver: Place, pages: int) -> Push:
        share = self._shape.total_pages // self._shape.senders
        source_pages = self._random.sample(range(self._shape.total_pages), pages)
        target_pages = self._random.sample(range(sender.number * share, (sender.number + 1) * share), pages)
        ticket = sender.member.push(receiver.member, source_pages, target_pages, LEASE_S)
        return Push(sender, receiver, sender.member, receiver.member, receiver.presence, ticket, source_pages, target_pages)

    def _finish(self, pushes: list[Push], closing: Place | None = None) -> None:
        """Await the ends of the pushes. closing: the sender whose link is being closed, and so may do either."""
        for push in pushes:
            if push.sender.presence == "here":
                ended = push.source.await_push(push.ticket)
                self._judge(push, ended, may_do_either=push.sender is closing)
        for sender in self._present(self.senders):
            for receiver in self._present(self.receivers):
                if sender.member.link_to(receiver.member) != "ready":
                    self.problems.append(f"{sender.name} has lost {receiver.name}, which is here")

    def _judge(self, push: Push, ended: Ended, may_do_either: bool) -> None:
        is_done = isinstance(ended, PushDone)
        self._tally.counts["done" if is_done else "failed"] += 1
        what = f"a push from {push.sender.name} to {push.receiver.name}"
        if push.was == push.receiver.presence == "here" and not is_done and not may_do_either:
            self.problems.append(f"{what} failed: {ended}")
        if push.was == "dead" and is_done:
            self.problems.append(f"{what} was done, and nobody was there")
        if isinstance(ended, PushDone) and push.receiver.presence == "here":
            if push.sender is self.senders[0]:
                self._tally.speeds.append(ended.pushed_bytes / ended.seconds)
            if self._random.random() < CHECKED:
                self._tally.counts["checked"] += 1
                if push.source.digest(push.source_pages) != push.target.digest(push.target_pages):
                    self.problems.append(f"{what} wrote other bytes than were sent")

    def _reconnect(self, sender: Place, pushes: list[Push]) -> None:
        """A sender, it may be the first, closes its links under its push and makes them again."""
        sender.member.connect([])
        sender.member.settle()  # reads what it said of the old links: the end of a measurement reports them as ready again
        sender.member.connect([])  # forgets it
        peers = self._present(self.receivers)
        sender.member.connect([receiver.member for receiver in peers])
        for receiver in peers:
            sender.member.await_link(receiver.member, "ready")
        self._finish(pushes, closing=sender)

    def _away(self, place: Place, presence: Presence) -> None:
        place.presence, place.away_since = presence, time.monotonic()
        place.back_at = place.away_since + self._random.uniform(0.0, self._away_s)

    @staticmethod
    def _present(places: list[Place]) -> list[Place]:
        return [place for place in places if place.presence == "here"]


PERIOD_S = 60.0
LEAST_PERIODS = 20
"""So that a tenth of a run is two of them at least."""
TURN_S = 0.25
"""Also while nothing may be spent, the places are looked after so often."""
STRIKE_EVERY = 4
"""With --rounds: a strike takes the place of each fourth round."""


@dataclass(frozen=True, kw_only=True)
class Soak:
    """How long a soak is, who takes part, and how hard it is."""

    minutes: float = option(60.0, "length of the run")
    rounds: int = option(
        0, "the short form: this many rounds of pushes, judged by correctness alone, without a clock; 0: by minutes"
    )
    duty: float = option(0.12, "share of one core that everything together may use")
    strike_s: float = option(20.0, "average time between strikes")
    senders: int = option(2, "number of senders; the first of them stays")
    receivers: int = option(2, "number of receivers; the first of them stays")
    seed: int = option(1, "of what happens")
    json: str = option("", "write the samples to this file, period by period")

    @property
    def shape(self) -> Shape:
        return Shape(self.senders, self.receivers)

    @property
    def periods(self) -> int:
        return max(LEAST_PERIODS, round(self.minutes * 60 / PERIOD_S))

    @property
    def period_s(self) -> float:
        return self.minutes * 60 / self.periods


class Record(msgspec.Struct, kw_only=True):
    """Everything that a run brought, as it is written to a file."""

    flags: list[str]
    periods: list[Period]
    checks: list[Check]


class Course:
    """The fleet, and when what is done with it."""

    def __init__(self, soak: Soak, fleet: Fleet, random: Random) -> None:
        self._soak, self._fleet, self._random = soak, fleet, random
        self._began = self._strike_at = time.monotonic()
        self._pace = Pace(soak.duty, fleet.pids)

    def period(self, number: int) -> Period:
        """The next period, from 1."""
        fleet, tally = self._fleet, self._fleet.new_tally()
        began, began_cpu_s, began_busy_s = time.monotonic(), cpu_s(fleet.pids), busy_s()
        while (left_s := self._began + number * self._soak.period_s - time.monotonic()) > 0:
            fleet.mend()
            wait_s = self._pace.wait_s(fleet.pids)
            if wait_s:
                time.sleep(min(wait_s, left_s, TURN_S))
            else:
                self._act()
        fleet.mend(everything=True)
        fleet.over_every_link()
        ended = time.monotonic()
        return Period(
            minute=(ended - self._began) / 60,
            sender=Footprint.of(fleet.senders[0].member.pid),
            receiver=Footprint.of(fleet.receivers[0].member.pid),
            slow=percentile(tally.speeds, 0.1),
            median=percentile(tally.speeds, 0.5),
            fast=percentile(tally.speeds, 0.9),
            counts=dict(tally.counts),
            duty=(cpu_s(fleet.pids) - began_cpu_s) / (ended - began),
            busy=(busy_s() - began_busy_s) / (ended - began),
        )

    def _act(self) -> None:
        now = time.monotonic()
        if now < self._strike_at:
            self._fleet.round()
        else:
            self._fleet.strike()
            self._strike_at = now + self._random.uniform(0.5, 1.5) * self._soak.strike_s


def run(soak: Soak, folder: Path, report: Callable[[Period], None]) -> list[str]:
    """Returns the problems. Raises AssertionError when a member that should live is gone, or does not answer."""
    random = Random(soak.seed)
    fleet = Fleet(soak.shape, folder, random, min(AWAY_S, soak.period_s))
    try:
        fleet.join()
        course = Course(soak, fleet, random)
        for number in range(1, soak.periods + 1):
            report(course.period(number))
        fleet.close()
    finally:
        fleet.kill()
    return fleet.problems


def run_rounds(soak: Soak, folder: Path) -> tuple[list[str], Counter[str]]:
    """The short form: a fixed number of rounds, as fast as they go. Returns the problems, and how often each thing happened.

    After a strike, one round runs while nobody knows of it; then the place is taken again.
    """
    fleet = Fleet(soak.shape, folder, Random(soak.seed))
    tally = fleet.new_tally()
    try:
        fleet.join()
        for number in range(soak.rounds):
            if number % STRIKE_EVERY:
                fleet.round()
                fleet.mend(everything=True)
            else:
                fleet.strike()
        fleet.over_every_link()
        fleet.close()
    finally:
        fleet.kill()
    return fleet.problems, tally.counts


def missing(periods: Sequence[Period]) -> list[str]:
    """What should have happened and did not: a run must be longer."""
    return [strike for strike in get_args(Strike) if not any(period.counts.get(strike) for period in periods)]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.transfers", description="Transfers between processes that join, leave and die all along."
    )
    add_flags(parser, Soak)
    soak = read_config(Soak, parser.parse_args())
    record = Record(flags=sys.argv[1:], periods=[], checks=[])

    def write() -> None:
        if soak.json:
            Path(soak.json).write_bytes(msgspec.json.format(msgspec.json.encode(record)))

    def report(period: Period) -> None:
        say(line(period))
        record.periods.append(period)
        write()  # at once: an hour is long

    if soak.rounds:
        return print_checks(_short(soak))
    say(HEADER)
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as folder:
        problems = run(soak, Path(folder), report)
    record.checks += verdict(record.periods, problems)
    write()
    if strikes := missing(record.periods):
        record.checks.append(Check(holds=False, text=f"of some strikes there was none: {', '.join(strikes)}"))
    return print_checks(record.checks)


def _short(soak: Soak) -> Iterator[Check]:
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as folder:
        problems, counts = run_rounds(soak, Path(folder))
    yield Check(holds=not problems, text="; ".join(problems[:LISTED]) or "every push ended as it should")
    yield Check(
        holds=all(counts[strike] for strike in get_args(Strike)), text=f"in {soak.rounds} rounds: {dict(sorted(counts.items()))}"
    )


if __name__ == "__main__":
    sys.exit(main())
