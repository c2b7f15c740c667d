"""Every kind of message, with hostile values, into the inboxes of a fleet that serves: nothing raises, what is no message is
counted, and the fleet serves afterwards.

The kinds and their values come from the types of the inboxes (`tests/life/hostile.py`), so a new message is thrown as well.
"""

import math
import zlib
from contextlib import suppress
from itertools import count
from random import Random
from typing import Any, get_args

import msgspec
import pytest

from common import messages as m
from common.config import RouterConfig
from common.errors import TandemError
from common.ids import AttemptId, InstanceId, RequestId, text_name
from common.mail import FrameRefused, decode_body
from common.messages.ranks import ToFollower, ToLeader
from tests.life.client import Client
from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet
from tests.life.hostile import Hostile, Known
from tests.life.ranks import rank_address

INBOXES: dict[str, Any] = {
    "router": m.RouterInbox,
    "prefill": m.PrefillInbox,
    "decode": m.DecodeInbox,
    "detokenizer": m.DetokenizerInbox,
    "leader": ToLeader,
    "follower": ToFollower,
}
KINDS = [(inbox, kind) for inbox, union in INBOXES.items() for kind in get_args(union)]
RANKS = ("leader", "follower")
END_INSTANCES = {m.Drain, m.Refused}
"""That is what they are for: whoever supervises starts the instance again."""
BETWEEN_PROCESSES = [(inbox, kind) for inbox, kind in KINDS if kind not in END_INSTANCES and inbox not in RANKS]
PROMPT, ANSWER = [100 + n for n in range(19)], 8
CONFIG = RouterConfig(request_timeout_s=60.0, prefill_policy="cache_aware", decode_policy="cache_aware")
MESSAGES = 60
HEALED_S = 120.0
"""Simulated seconds: requests may take 60, and a writer of which nothing valid is heard is fenced after 20."""


class Target:
    """A fleet that serves, and one of its inboxes."""

    def __init__(self, inbox: str) -> None:
        ranks = {"prefill": 2, "decode": 2} if inbox in RANKS else None
        self.fleet = ToyFleet(2, 2, CONFIG, ranks=ranks)  # type: ignore[arg-type]
        self.inbox, self.union = inbox, INBOXES[inbox]
        self.may_end = False
        self.clients: list[Client] = []
        self._names = (f"r{number}" for number in count())

    def ask(self) -> Client:
        client = self.fleet.submit(next(self._names), PROMPT, ANSWER)
        self.clients.append(client)
        return client

    def owner(self) -> Any:
        """The process whose inbox it is."""
        router = self.fleet.router_process
        instance = self.fleet.instances["prefill-0" if self.inbox == "prefill" else "decode-0"]
        owners = {"router": router, "detokenizer": router.detokenizers[0], "follower": instance.processes[-1]}
        return owners.get(self.inbox, instance)

    def throw(self, sender: InstanceId, body: bytes) -> None:
        """It arrives, and is counted if it is no message of this inbox."""
        owner = self.owner()
        match self.inbox:
            case "leader":
                mail, address = owner.rank_mail, rank_address(owner.name, 0)
            case "prefill" | "decode":
                mail, address = owner.mail, owner.name.address
            case _:
                mail, address = owner.mail, owner.address
        before = sum(mail.frames_refused.values())
        self.fleet.network.throw(sender, address, body)
        self.fleet.run_for(0.02)
        try:
            decode_body(msgspec.msgpack.Decoder(self.union), sender, body)
        except FrameRefused:
            assert sum(mail.frames_refused.values()) > before

    def known(self) -> Known:
        """What hostile mail is about."""
        router = self.fleet.router_process.name
        infos = [each.info for each in self.fleet.instances.values()]
        seeds = [router, *(info.incarnation for info in infos)]
        return Known(
            names=[*(info.id for info in infos), router, router, text_name(router, 0), "nobody", ""],
            lives=[*(info.incarnation for info in infos), "", "another"],
            keys=[AttemptId(RequestId(f"r{number}"), 0, router) for number in range(len(self.clients) + 2)],
            addresses=[self.fleet.router_process.address, *(info.inbox for info in infos)],
            numbers=[(zlib.crc32(seed.encode()) << 24) + number for seed in seeds for number in (1, 2, 3)],
            structs=infos,
        )

    def senders(self) -> list[InstanceId]:
        """Strangers, and everybody who may say something. Whoever speaks in the name of a rank may end its instance."""
        if self.inbox in RANKS:
            return [InstanceId(name) for name in ("nobody", "decode-0", "decode-0.rank-1.another")]
        return [self.fleet.router_process.name, *map(InstanceId, self.fleet.instances), InstanceId("nobody")]

    def supervise(self) -> None:
        """Start again what has ended."""
        ended, self.fleet.ends[:] = list(self.fleet.ends), []
        assert self.may_end or not ended, ended
        for name, _ in ended:
            self.fleet.start(name, "prefill" if name.startswith("prefill") else "decode")

    def serves(self) -> bool:
        """Some answers are right, one after the other."""
        return all(self.answers() for _ in range(4)) and not self.fleet.router.unready()

    def answers(self) -> bool:
        self.supervise()
        try:
            client = self.ask()
        except TandemError:
            return False
        self.fleet.turn_until(lambda: client.ended, seconds=HEALED_S)
        return client.token_ids == undisturbed(PROMPT, ANSWER)


def test_every_message_is_thrown() -> None:
    assert {kind for _, kind in KINDS} == set(get_args(m.AnyMessage))


@pytest.mark.parametrize(("inbox", "kind"), KINDS, ids=lambda each: each if isinstance(each, str) else each.__name__)
def test_hostile_mail_raises_nothing_is_counted_and_heals(inbox: str, kind: type[msgspec.Struct]) -> None:
    target = Target(inbox)
    target.may_end = kind in END_INSTANCES
    random = Random(f"{inbox} {kind.__name__}")
    hostile = Hostile(random, target.known())
    for number in range(MESSAGES):
        attack(target, hostile, random, number, kind, 0.3)
    heal(target)


def attack(
    target: Target, hostile: Hostile, random: Random, number: int, kind: type[msgspec.Struct], broken_share: float
) -> None:
    """One hostile message, and now and then a request before it."""
    if number % 30 == 0:
        hostile.known = target.known()
        with suppress(TandemError):  # as false figures have it, there may be nobody
            target.ask()
    target.throw(random.choice(target.senders()), hostile.body(kind, broken=random.random() < broken_share))
    target.supervise()


@pytest.mark.parametrize("seed", range(4))
def test_hostile_mail_of_all_kinds_together_raises_nothing_and_heals(seed: int) -> None:
    random = Random(seed)
    target = Target("router")
    hostile = Hostile(random, target.known())
    for number in range(5 * MESSAGES):
        target.inbox, kind = random.choice(BETWEEN_PROCESSES)
        target.union = INBOXES[target.inbox]
        attack(target, hostile, random, number, kind, 0.1)
    heal(target)


def test_a_pace_that_is_no_number_never_enters_the_mean_of_its_role() -> None:
    target = Target("router")
    target.ask()
    target.fleet.run_for(5.0)
    paces = {member.info.id: repr(member.pace) for member in target.fleet.router.fleet.members()}
    for name, instance in target.fleet.instances.items():
        for absurd in (math.nan, math.inf, -1.0):
            load = m.Load(step_s=absurd, chunk_token_s=absurd, decode_row_s=absurd)
            beat = m.Heartbeat(id=InstanceId(name), incarnation=instance.info.incarnation, load=load, counters=m.Counters())
            target.throw(InstanceId(name), msgspec.msgpack.encode(beat))
    assert target.owner().mail.frames_refused == {"body": 12}
    assert {member.info.id: repr(member.pace) for member in target.fleet.router.fleet.members()} == paces


def heal(target: Target) -> None:
    """All is served again, every request that was open has one ending, and every page is home."""
    began_s = target.fleet.clock.now
    while not target.serves():
        assert target.fleet.clock.now < began_s + HEALED_S, target.fleet.router.unready()
        target.fleet.run_for(1.0)
    target.fleet.turn_until(lambda: all(client.ended for client in target.clients), seconds=HEALED_S)
    assert all(len(client.endings) == 1 for client in target.clients)
    target.fleet.turn_until(target.fleet.is_home, seconds=HEALED_S)
