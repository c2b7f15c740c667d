"""A follower's side of the start: it says hello until it is welcome, offers pages, and is ready.

Owns what the leader has answered. Opens no socket, as `gathering` on the other side.
"""

from collections.abc import Callable

from common.errors import PeerRefused
from common.ids import InstanceId
from common.instance.ports import Mail
from common.instance.ranks.line import START_SILENCE_S, Line, RankLost
from common.messages import EngineChoices, ModelIdentity, PoolDescriptor
from common.messages.ranks import (
    Agreed,
    End,
    Offer,
    Ping,
    Pong,
    RankFailed,
    RankHello,
    RankReady,
    RankRefused,
    RankWelcome,
    ToFollower,
)

HELLO_S = 1.0
SOMEBODY = InstanceId("rank-0")
"""The leader, whose name is not known before it answers."""


class Joining:
    """leader: its address."""

    def __init__(self, mail: Mail[ToFollower], leader: str, hello: RankHello) -> None:
        self._mail = mail
        self._leader = leader
        self._hello = hello
        self._hello_s = 0.0
        self._line: Line | None = None
        self._offers: list[int] = []
        self._offered = 0
        self._agreed: list[int] = []
        self._ready: tuple[ModelIdentity, PoolDescriptor, EngineChoices] | None = None
        self._complete = False
        self.welcome: RankWelcome | None = None
        mail.route(SOMEBODY, leader, watch=True)

    # --- what the thread that loads says ---------------------------------------------------------------------------------------

    def offer(self, pages: int) -> int:
        """This rank can hold so many pages. Returns the number of the round."""
        self._offers.append(pages)
        return len(self._offers) - 1

    def ready(self, model: ModelIdentity, pool: PoolDescriptor, engine: EngineChoices = EngineChoices()) -> None:  # noqa: B008
        """This rank can take plans and writes. They may come from then on: no `turn` takes them in."""
        self._ready = model, pool, engine

    # --- what it learns --------------------------------------------------------------------------------------------------------

    def agreed(self, number: int) -> int | None:
        """The pages that all ranks use, of that round; None: the leader has not said."""
        return self._agreed[number] if number < len(self._agreed) else None

    @property
    def waits_for(self) -> str:
        """Why it is not welcome yet, for people; empty when it is. For any thread."""
        if self.welcome is not None:
            return ""
        if self._mail.reaches(SOMEBODY):
            return f"rank 0 at {self._leader} waits for other ranks, which it names"
        return f"nobody answered at {self._leader}: does rank 0 listen there, with the same --cluster-key?"

    @property
    def complete(self) -> bool:
        """The leader has been told that this rank is ready."""
        return self._complete

    @property
    def line(self) -> Line:
        """To the leader. Only after the welcome."""
        assert self._line is not None
        return self._line

    # --- the protocol ----------------------------------------------------------------------------------------------------------

    def turn(self, clock: Callable[[], float]) -> None:
        """Raises PeerRefused when this cannot be a rank of the instance, and RankLost."""
        if self._complete:
            return
        gone = self._mail.refused()  # read in each turn, and before the mail: a leader that was gone before is not this one
        if self._line is not None and self._line.to in gone:
            raise RankLost(f"{self._line.who} is gone")
        now = clock()
        for sender, message in self._mail.receive():
            match message:
                case RankWelcome():
                    if self._line is None:
                        self._line = Line(sender, f"rank 0 at {self._leader}", now)
                        self._mail.route(sender, self._leader, watch=True)
                        self.welcome = message
                case RankRefused(reason=reason):
                    if self._line is None:
                        raise PeerRefused(f"rank 0 at {self._leader} refuses rank {self._hello.rank}: {reason}")
                case _:
                    if self._line is not None and sender == self._line.to:
                        self._line.take(message, now)
                        self._take(message, now)
        if self._line is None:
            if now >= self._hello_s:
                self._hello_s = now + HELLO_S
                self._mail.send(SOMEBODY, self._hello)
            return
        self._line.check(now, START_SILENCE_S)
        while self._offered < len(self._offers):
            self._mail.send(self._line.to, Offer(number=self._line.next(), pages=self._offers[self._offered]))
            self._offered += 1
        if self._ready is not None:
            model, pool, engine = self._ready
            self._mail.send(self._line.to, RankReady(number=self._line.next(), model=model, pool=pool, engine=engine))
            self._complete = True

    def next_deadline(self, now: float) -> float:
        return self._hello_s if self._line is None else now + HELLO_S

    def end(self, reason: str) -> None:
        """Tell the leader that this rank cannot go on."""
        if self._line is not None:
            self._mail.send(self._line.to, RankFailed(number=self._line.next(), reason=reason))

    def _take(self, message: ToFollower, now: float) -> None:
        assert self._line is not None
        match message:
            case Ping(sent_s=sent_s):
                self._mail.send(self._line.to, Pong(number=self._line.next(), sent_s=sent_s, heard_s=now))
            case Agreed(pages=pages):
                self._agreed.append(pages)
            case End(reason=reason):
                raise RankLost(f"{self._line.who} has ended the start: {reason}")
            case _:
                raise RankLost(f"{self._line.who} sent {type(message).__name__} while the instance starts")
