"""A router core with linked instances, an outbox and a clock turned by hand: for tests that are lists of messages."""

from collections import Counter
from collections.abc import Iterable
from typing import Self

from common.config import RouterConfig
from common.ids import DETOKENIZER, ROUTER, AttemptId, Life, RequestId, pack_ids
from common.instance.ports import Send
from common.messages import (
    Cancel,
    DetokenizerHeartbeat,
    Ending,
    ExpectAnswer,
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
    Standing,
    TextBatch,
    TextDelta,
)
from common.sampling_params import SamplingParams
from router.core import RouterCore
from router.fleet import Members
from router.members import Member
from router.placement import Placer
from router.requests import ClientRequest, RequestSpec
from tests.builders import instance, key
from tests.router.fakes import Unobserved, flush, hear, says

P0, D0, P1, D1 = instance("p0", "prefill"), instance("d0", "decode"), instance("p1", "prefill"), instance("d1", "decode")
PROMPT = pack_ids(range(100, 120))
DEFAULT = key()


def new_fleet(*members: InstanceInfo, linked: bool = True, dead_after_s: float = 3.0) -> Members:
    fleet = Members(ROUTER, ["tcp://detokenizer:1"], RouterConfig(heartbeat_s=0.5, dead_after_s=dead_after_s))
    for member in members:
        fleet.register(Register(instance=member), 0.0)
    for member in members if linked else ():
        hear(fleet, member, *(other for other in members if other.role != member.role), now=0.0)
    return fleet


def placer_of(fleet: Members, config: RouterConfig) -> Placer:
    return Placer(ROUTER, (DETOKENIZER,), fleet, config)


class Bench:
    """The members are linked, each with all of the other role. places: whether the best candidate of each attempt grants its
    reservation at once, and the router hears of it."""

    def __init__(
        self,
        *members: InstanceInfo,
        config: RouterConfig | None = None,
        limit_chars: int = 10_000,
        places: bool = True,
        detokenizers: int = 1,
    ) -> None:
        self.places = places
        self.probe_round = 0
        """The latest in which members were asked."""
        self.observer = Unobserved()
        self.core = RouterCore(ROUTER, ["tcp://detokenizer:1"] * detokenizers, config or RouterConfig(), self.observer)
        self.client = ClientRequest(limit_chars=limit_chars)
        self.members = list(members)
        for member in members:
            self.core.receive(Register(instance=member), 0.0)
        self.beat(0.0)

    def beat(self, now: float, *without: InstanceInfo) -> list[Send]:
        """All members but these send a heartbeat."""
        flush(self.core.fleet, now)
        return [send for member in self.members if member not in without for send in self.report(member, now)]

    def report(self, member: InstanceInfo, now: float, load: Load | None = None, draining: bool = False) -> list[Send]:
        """One member sends a heartbeat."""
        others = (other for other in self.members if other.role != member.role)
        said = says(self.core.fleet, member, *others, load=load, draining=draining)
        return self.place([send for message in said for send in self.core.receive(message, now)], now)

    def tick(self, now: float) -> list[Send]:
        return self._probing(self.core.tick(now))

    def hear_detokenizer(self, now: float) -> list[Send]:
        """The detokenizer sends a heartbeat."""
        return self._probing(self.core.receive(DetokenizerHeartbeat(open_answers=0, early_answers=0, dropped=0), now))

    def _probing(self, sends: list[Send]) -> list[Send]:
        for send in sends:
            if isinstance(send.message, Probe):
                self.probe_round = send.message.round
        self._check_books()
        return sends

    def join(self, member: InstanceInfo, now: float) -> list[Send]:
        """A new member joins, and is linked at once."""
        self.members.append(member)
        return [*self.place(self.core.receive(Register(instance=member), now), now), *self.beat(now)]

    def leave(self, member: InstanceInfo, now: float) -> list[Send]:
        return self.place(self.core.receive(Goodbye(id=member.id, incarnation=member.incarnation), now), now)

    def submit(self, *specs: RequestSpec, at: float = 0.0) -> list[Send]:
        self.client.owner, self.client.received_s = specs[0].owner, at
        return self.place(self.core.requests.submit(self.client, specs, at), at)

    def place(self, sends: list[Send], now: float) -> list[Send]:
        """What the router sends, after the attempts that begin with it have found their decode instances."""
        for to, message in generates(sends) if self.places else ():
            by_name: dict[str, Life] = {member.info.id: member.life for member in self.core.fleet.members()}
            for decode in message.decodes[:1]:
                assert self.placed(by_name[to], by_name[decode], now, message.key) == []
        self._check_books()
        return sends

    def _check_books(self) -> None:
        """The members carry exactly the tokens of what is open, and expect what is still to come. Choices share their prompt, so
        only a request of one choice is looked at, while it is alone."""
        assigned, growth = Counter[Member](), Counter[Member]()
        if len(self.core.requests) > 1 or self.client.unended > 1:
            return
        for record in self.core.requests.records():
            if (attempt := record.attempt) is not None:
                later = attempt.decode or (attempt.candidates or (attempt.first,))[0]
                for member in {attempt.first, later} if attempt.tokens == 0 else {later}:
                    assigned[member] += record.prompt_tokens
                growth[later] += record.remaining_tokens
        for member in self.core.fleet.members():
            assert (member.assigned_tokens, member.growth_tokens) == (assigned[member], growth[member])

    def placed(self, by: Life, decode: Life, now: float, of: AttemptId = DEFAULT) -> list[Send]:
        """A prefill instance says that this decode instance has granted the attempt's reservation."""
        return self.core.receive(Placed(id=by.id, incarnation=by.incarnation, key=of, decode=decode), now)

    def serving(self, *specs: RequestSpec) -> Self:
        """A request was submitted: these choices, or a plain one."""
        self.submit(*specs or (spec(),))
        return self

    def text(
        self, first: int, text: str, ending: Ending | None = None, now: float = 1.0, name: str = "r", attempt: int = 0
    ) -> list[Send]:
        """The detokenizer sends these characters, one token each."""
        delta = TextDelta(key(name, attempt), first, tuple(ord(char) for char in text), text, ending)
        return self.place(self.core.receive(TextBatch(deltas=(delta,)), now), now)

    def probed(
        self,
        of: InstanceInfo,
        next_token: int | None,
        now: float,
        name: str = "r",
        attempt: int = 0,
        *,
        probe_round: int | None = None,
        waits: bool = False,
        decode: Life | None = None,
    ) -> list[Send]:
        """The instance's answer to a probe about an attempt has come; of the latest round, if none is named. waits: tokens of
        it wait at the detokenizer. decode: who has granted its reservation."""
        standings = (Standing(key(name, attempt), next_token, decode, waits=waits),)
        probe_round = probe_round or self.probe_round
        answer = Probed(id=of.id, incarnation=of.incarnation, standings=standings, round=probe_round)
        return self.place(self.core.receive(answer, now), now)

    def read(self) -> str:
        return "".join(delta.text for delta in self.client.take())

    def endings(self) -> list[Ending]:
        return [delta.ending for delta in self.client.take() if delta.ending is not None]

    def assigned(self) -> dict[str, int]:
        return {member.info.id: member.assigned_tokens for member in self.core.fleet.members()}


def spec(name: str = "r", index: int = 0, max_new_tokens: int = 8, stop: tuple[str, ...] = ()) -> RequestSpec:
    return RequestSpec(RequestId(name), index, PROMPT, SamplingParams(max_new_tokens=max_new_tokens), stop)


def cancels(*to: InstanceInfo, name: str = "r", attempt: int = 0, complete: bool = False) -> list[Send]:
    return [Send(one.id, Cancel(key=key(name, attempt), complete=complete)) for one in to]


def close(name: str = "r", attempt: int = 0) -> Send:
    return Send(DETOKENIZER, ForgetAnswer(key=key(name, attempt)))


def about_requests(sends: Iterable[Send]) -> list[Send]:
    """The messages that are not about membership."""
    return [send for send in sends if isinstance(send.message, ExpectAnswer | Generate | Cancel | ForgetAnswer | Probe | Repeat)]


def generates(sends: Iterable[Send]) -> list[tuple[str, Generate]]:
    return [(send.to, send.message) for send in sends if isinstance(send.message, Generate)]


def announced(sends: Iterable[Send]) -> list[ExpectAnswer]:
    return [send.message for send in sends if isinstance(send.message, ExpectAnswer)]


def retold(sends: Iterable[Send]) -> dict[str, tuple[tuple[AttemptId, int], ...]]:
    """From which numbers on members are asked to send tokens again. Each answer is opened again there first."""
    asked = {str(send.to): send.message.tokens for send in sends if isinstance(send.message, Repeat)}
    reopened = {(message.key, message.first) for message in announced(sends)}
    assert reopened == {pair for pairs in asked.values() for pair in pairs}
    return asked


def route(sends: Iterable[Send]) -> tuple[str, str | None]:
    """The members that serve the one attempt that starts: the first, and the decode instance."""
    ((to, message),) = generates(sends)
    return to, message.decodes[0] if message.decodes else None


def probes(sends: Iterable[Send]) -> dict[str, tuple[AttemptId, ...]]:
    """Who is asked about which attempts; each is asked once."""
    asked = [(send.to, send.message.keys) for send in sends if isinstance(send.message, Probe)]
    assert len(dict(asked)) == len(asked), "one message for each member"
    return dict(asked)
