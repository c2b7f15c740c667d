"""The router's core under thousands of events in any order: each request ends once, and nothing of it is left over.

Everything around the core is played at random: instances, a detokenizer, clients. Messages are lost, or come late or twice. Owns
the truth: each request's answer, and who was sent something about each attempt, to check that none is left over.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from random import Random

import pytest

from common.config import RouterConfig
from common.errors import BadRequest, InstanceFailed, Overloaded, Preempted, TandemError, Unavailable, WeightsChanged
from common.ids import ROUTER, AttemptId, InstanceId, Life, RequestId, pack_ids, unpack_ids
from common.instance.ports import Send
from common.messages import (
    Cancel,
    DetokenizerHeartbeat,
    Ending,
    ExpectAnswer,
    Failed,
    Finished,
    ForgetAnswer,
    Generate,
    Goodbye,
    InstanceInfo,
    Load,
    Placed,
    Probe,
    Probed,
    Register,
    Repeat,
    RouterInbox,
    Standing,
    TextBatch,
    TextDelta,
)
from common.sampling_params import SamplingParams
from router import request_book
from router.core import RouterCore
from router.members import Member
from router.requests import ChoiceDelta, ClientRequest, RequestSpec
from router.timelines import ResumeReason
from tests.builders import instance
from tests.router.bench import PROMPT
from tests.router.fakes import Unobserved, flush, says

ERRORS: tuple[TandemError, ...] = (
    Preempted("an older request needs the memory"),
    WeightsChanged("it computes with others"),
    Unavailable("the push failed"),
    Overloaded("full"),
    InstanceFailed("the step failed"),
    BadRequest("no"),
)


class Client(ClientRequest):
    """A client, and everything that it was given."""

    def __init__(self, name: RequestId, answer_tokens: int, limit_chars: int) -> None:
        super().__init__(limit_chars=limit_chars)
        self.name = name
        self.answer_tokens = answer_tokens
        self.given: list[ChoiceDelta] = []
        self.tokens = 0

    def put(self, delta: ChoiceDelta) -> None:
        assert not self.endings, "nothing follows an ending"
        self.given.append(delta)
        expected = answer(self.name, self.tokens, len(delta.token_ids))
        assert (delta.token_ids, delta.text) == (tuple(map(ord, expected)), expected), "every token once, and in order"
        self.tokens += len(delta.token_ids)
        super().put(delta)

    @property
    def endings(self) -> list[Ending]:
        return [delta.ending for delta in self.given if delta.ending is not None]


@dataclass(slots=True, eq=False)
class Try:
    """An attempt as the instances and the detokenizer see it. decode: which candidate has granted its reservation, if it needs
    one. next_token: the one that they emit next. told: the ending that they emitted. ended: how it ended on its own, if the
    router has heard it."""

    key: AttemptId
    members: tuple[InstanceId, ...]
    decode: Life | None
    first: int
    end: int
    next_token: int
    known: bool
    told: Ending | None = None
    ended: Ending | None = None

    def standing(self, of: InstanceId) -> Standing:
        """The prefill instance knows it until its first token, the decode instance from then on."""
        server = self.members[-1] if self.next_token > self.first else self.members[0]
        decode = self.decode if of == self.members[0] else None
        return Standing(self.key, self.next_token if self.known and of == server else None, decode)


def answer(name: RequestId, first: int, tokens: int) -> str:
    """Some tokens of a request's answer, a character each."""
    return "".join(chr(97 + (7 * number + int(name)) % 26) for number in range(first, first + tokens))


class World:
    """loss: probability that a message is lost."""

    def __init__(self, seed: int, config: RouterConfig, loss: float) -> None:
        self.random = Random(seed)
        self.config = config
        self.loss = loss
        self.now = 0.0
        self.observer = Unobserved()
        self.core = RouterCore(ROUTER, ["tcp://detokenizer:1"], config, self.observer)
        self.members: dict[str, InstanceInfo] = {}
        self.clients: dict[RequestId, Client] = {}
        self.tries: dict[AttemptId, Try] = {}
        self.announced: dict[AttemptId, ExpectAnswer] = {}
        self.cancelled: defaultdict[AttemptId, set[InstanceId]] = defaultdict(set)
        self.closed: set[AttemptId] = set()
        self.asked: list[tuple[InstanceId, Probe]] = []
        self.asked_again: list[tuple[AttemptId, int]] = []
        self._lives: Counter[str] = Counter()
        for name in ("p0", "p1", "d0", "d1"):
            self.start(name)
        self.beat()

    # --- messages from the router ----------------------------------------------------------------------------------------------

    def hear(self, message: RouterInbox) -> None:
        self.take(self.core.receive(message, self.now))

    def take(self, sends: list[Send]) -> None:
        """Check what the router sends and act on it, except for what is lost."""
        for send in sends:
            match send.message:
                case ExpectAnswer() as message:
                    self.announced[message.key] = message
                case Generate() as message:
                    self._take_generate(send.to, message)
                case Cancel() as message:
                    self.cancelled[message.key].add(send.to)
                    self.tries[message.key].known = False
                case ForgetAnswer() as message:
                    self.closed.add(message.key)
                case Probe() as message if not self.is_lost():
                    self.asked.append((send.to, message))
                case Repeat() as message if not self.is_lost():
                    self.asked_again += message.tokens
                case _:
                    pass

    def _take_generate(self, to: InstanceId, message: Generate) -> None:
        key, first, client = message.key, message.first, self.clients[message.key.request_id]
        assert self.latest(client) == key.attempt - 1, "attempts are numbered without a gap"
        so_far, announced = answer(client.name, 0, first), self.announced[key]
        assert first == client.tokens, "the next attempt goes on where the client is"
        assert unpack_ids(message.prompt).tolist() == [*unpack_ids(PROMPT).tolist(), *map(ord, so_far)]
        assert (announced.first, announced.text, announced.context[-4 * first :] if first else b"") == (
            first,
            so_far,
            pack_ids([*map(ord, so_far)]),
        )
        assert first + message.sampling.max_new_tokens == client.answer_tokens
        decodes = [self.members[name] for name in message.decodes if name in self.members]
        decode = self.random.choice(decodes) if decodes else None
        members = (to,) if decode is None else (to, decode.id)
        life = None if decode is None else Life(decode.id, decode.incarnation)
        self.tries[key] = Try(key, members, life, first, client.answer_tokens, first, known=not self.is_lost())

    def is_lost(self) -> bool:
        return self.random.random() < self.loss

    def latest(self, client: Client) -> int:
        """Number of the client's latest attempt; -1 before its first."""
        return max((key.attempt for key in self.tries if key.request_id == client.name), default=-1)

    # --- messages from the others -----------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """An instance starts, or starts again."""
        self._lives[name] += 1
        info = instance(name, "prefill" if name.startswith("p") else "decode", incarnation=str(self._lives[name]))
        self.members[name] = info
        for one in self.tries.values():
            one.known = one.known and info.id not in one.members
        self.hear(Register(instance=info))

    def leave(self, name: str) -> None:
        info = self.members.pop(name)
        self.hear(Goodbye(id=info.id, incarnation=info.incarnation))

    def beat(self, silent: float = 0.0, odd: float = 0.0) -> None:
        """Every member reports, except for some. Some report that they drain, are stuck or have no links."""
        for info in list(self.members.values()):
            if self.random.random() < silent:
                continue
            peers = [other for other in self.members.values() if other.role != info.role]
            whim = self.random.random() / odd if odd else 1.0
            load = Load(oldest_step_s=31.0) if whim < 0.3 else Load()
            flush(self.core.fleet, self.now)
            for message in says(self.core.fleet, info, *peers if whim >= 0.6 else (), load=load, draining=0.3 <= whim < 0.6):
                self.hear(message)

    def submit(self, answer_tokens: int, limit_chars: int = 100_000) -> Client:
        """Raises Unavailable."""
        client = Client(RequestId(str(len(self.clients))), answer_tokens, limit_chars)
        self.clients[client.name] = client
        spec = RequestSpec(client.name, 0, PROMPT, SamplingParams(max_new_tokens=answer_tokens))
        try:
            client.received_s = self.now
            self.take(self.core.requests.submit(client, [spec], self.now))
        except TandemError:
            del self.clients[client.name]
            raise
        return client

    def emit(self, one: Try, tokens: int, error: TandemError | None = None) -> None:
        """Send the attempt's next tokens, with the failure or the ending that is due."""
        self.place(one)
        first, tokens = one.next_token, min(tokens, one.end - one.next_token)
        one.next_token += tokens
        done = Finished(reason="length") if one.next_token == one.end else None
        ending: Ending | None = done if error is None else Failed.of(error)
        one.known = one.known and ending is None
        one.told = one.told or ending
        for _ in range(0 if self.is_lost() else 2 if self.is_lost() else 1):  # what is lost may as well come twice
            self._send_text(one, first, ending)

    def _send_text(self, one: Try, first: int, ending: Ending | None) -> None:
        client = self.clients[one.key.request_id]
        if not client.endings and one.key.attempt == self.latest(client) and first == client.tokens:
            one.ended = one.ended or ending
        text = answer(client.name, first, one.next_token - first)
        delta = TextDelta(one.key, first, tuple(map(ord, text)), text, ending)
        self.hear(TextBatch(deltas=(delta,)))

    def place(self, one: Try) -> None:
        """The prefill instance says who has granted the reservation, again and again, and some of it arrives."""
        info = self.members.get(one.members[0])
        if one.decode is not None and info is not None and not self.is_lost():
            self.hear(Placed(id=info.id, incarnation=info.incarnation, key=one.key, decode=one.decode))

    def answer_probes(self) -> None:
        """Members answer the probes with what they know now, and send again what they are asked for, unless it is lost."""
        again, self.asked_again = self.asked_again, []
        for key, first in again:
            one = self.tries[key]
            if (one.next_token > first or one.told is not None) and not self.is_lost():
                self._send_text(one, first, one.told)
        asked, self.asked = self.asked, []
        for name, probe in asked:
            info = self.members.get(name)
            if info is not None and not self.is_lost():
                standings = tuple(self.tries[key].standing(name) for key in probe.keys)
                self.hear(Probed(id=info.id, incarnation=info.incarnation, standings=standings, round=probe.round))

    def beat_detokenizer(self) -> None:
        self.hear(DetokenizerHeartbeat(open_answers=0, early_answers=0, dropped=0))

    def move_detokenizer(self) -> None:
        self.take(self.core.detokenizer_moved(0, "tcp://detokenizer:2", self.now))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.core.tick(self.now))

    # --- checks -------------------------------------------------------------------------------------------------

    def check_books(self) -> None:
        """The members carry exactly the tokens of what is open, and expect what is still to come."""
        expected: Counter[Member] = Counter()
        growth: Counter[Member] = Counter()
        for record in self.core.requests.records():
            if (attempt := record.attempt) is not None:
                later = attempt.decode or (attempt.candidates or (attempt.first,))[0]
                for member in {attempt.first, later} if attempt.tokens == 0 else {later}:
                    expected[member] += record.prompt_tokens
                growth[later] += record.remaining_tokens
        for member in self.core.fleet.members():
            assert (member.assigned_tokens, member.growth_tokens) == (expected[member], growth[member])

    def check_over(self) -> None:
        """Every request has ended, once for its client, and at everybody who was told about it."""
        assert len(self.core.requests) == 0
        assert self.core.requests.next_deadline() is None
        assert [member.assigned_tokens for member in self.core.fleet.members() if member.assigned_tokens] == []
        for client in self.clients.values():
            assert len(client.endings) == 1
            assert client.endings != [Finished(reason="length")] or client.tokens == client.answer_tokens
        for key, one in self.tries.items():
            if isinstance(one.ended, Finished):
                continue
            assert self.cancelled[key] >= set(one.members), "nobody serves what is over"
            assert key in self.closed or one.ended is not None, "the detokenizer forgets it, unless it ended it"
        assert len(self.observer.endings) == len(self.observer.attempts) == len(self.clients)
        assert sum(self.observer.attempts) == len(self.tries)


SEEDS = range(40)
EVENTS = 250
ROUGH = RouterConfig(heartbeat_s=0.5, dead_after_s=1.6, request_timeout_s=20.0, resume_wait_s=1.5, max_attempts=8)


def something_happens(world: World) -> None:
    """One event of any kind, also such as can only come late."""
    chance = world.random
    tries = list(world.tries.values())
    recent = [one for one in tries if not world.clients[one.key.request_id].endings] or tries
    one = chance.choice(recent if chance.random() < 0.9 else tries) if tries else None
    kind = chance.choices(
        ("submit", "tokens", "failure", "cancel", "read", "restart", "leave", "probes", "detokenizer"),
        (6, 40, 8, 1, 3, 1, 1, 12, 1),
    )[0]
    match kind:
        case "submit":
            try:
                world.submit(chance.randint(1, 12), chance.choice((100, 100_000)))
            except TandemError:
                return
        case "tokens" if one is not None:
            world.emit(one, chance.randint(1, 3))
        case "failure" if one is not None:
            world.emit(one, chance.randint(0, 1), chance.choice(ERRORS))
        case "cancel" if world.clients:
            world.take(world.core.requests.cancel([chance.choice(list(world.clients))], world.now))
        case "read" if world.clients:
            chance.choice(list(world.clients.values())).take()
        case "restart":
            world.start(chance.choice(("p0", "p1", "d0", "d1")))
        case "leave" if world.members:
            world.leave(chance.choice(list(world.members)))
        case "probes":
            world.answer_probes()
            if chance.random() < 0.7:
                world.beat_detokenizer()
        case "detokenizer":
            (world.move_detokenizer if chance.random() < 0.3 else world.beat_detokenizer)()
        case _:
            return


@cache
def rough_run(seed: int) -> Unobserved:
    """What the router's observer saw of it."""
    world = World(seed, ROUGH, loss=0.1)
    for _ in range(EVENTS):
        something_happens(world)
        world.check_books()
        world.beat(silent=0.2, odd=0.03)
        world.pass_time(world.random.choice((0.0, 0.01, 0.1, 0.5)))
        world.check_books()
    while len(world.core.requests):
        world.pass_time(1.0)
    world.check_over()
    return world.observer


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_in_whatever_order_each_request_ends_once_and_nothing_is_left(seed: int) -> None:
    rough_run(seed)


def test_the_schedules_reach_every_kind_of_resume_and_of_ending() -> None:
    resumes: Counter[ResumeReason] = Counter()
    endings: Counter[str] = Counter()
    for seed in range(20):
        observer = rough_run(seed)
        resumes.update(observer.resumes)
        endings.update(one.kind if isinstance(one, Failed) else one.reason for one in observer.endings)
    assert set(resumes) == set(ResumeReason)
    wanted = {"length", "cancelled", "invalid_request_error", "unavailable_error", "timeout_error", "slow_client"}
    assert wanted <= set(endings)


@pytest.mark.parametrize("seed", range(20))
def test_while_instances_live_every_answer_is_whole_however_many_messages_are_lost(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_book, "FRUITLESS_ATTEMPTS", 1000)
    world = World(seed, RouterConfig(max_attempts=1000), loss=0.15)
    clients = [world.submit(answer_tokens) for answer_tokens in (1, 2, 5, 12, 30)]
    while not all(client.endings for client in clients):
        assert world.now < 300.0, "lost messages come to light within seconds"
        for one in list(world.tries.values()):
            if one.known:
                world.emit(one, 1)
        world.answer_probes()
        world.beat_detokenizer()
        world.beat()
        world.pass_time(0.5)
    assert [client.endings for client in clients] == [[Finished(reason="length")]] * len(clients)
    assert [client.tokens for client in clients] == [1, 2, 5, 12, 30]
    world.check_over()
