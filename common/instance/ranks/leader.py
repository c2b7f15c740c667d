"""The leader's followers: the lines to them, and what came over these.

Owns the reports of the followers until the executor or the transfers take them. Decides nothing but that the instance ends: when
a follower is gone, silent, has failed, or a message of its was lost, `turn` raises RankLost. Opens no socket; its clock is its
caller's.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from msgspec.structs import replace

from common.executor import StepPlan
from common.ids import InstanceId
from common.instance.ports import Mail
from common.instance.ranks.line import PING_S, SILENCE_S, RankLine, RankLost, Refusals, pack_plan
from common.messages import Failed
from common.messages.ranks import (
    AskDrain,
    DropGrammars,
    End,
    Events,
    GrammarPrepared,
    LayersReached,
    Offer,
    Order,
    Ping,
    Pong,
    PrepareGrammar,
    RankFailed,
    RankHello,
    RankReady,
    StepReturned,
    ToLeader,
    TransferOrder,
)
from common.messages.transfers import Allow, PackedPush, Push, TransferCommand, TransferEvent
from common.sampling_params import Grammar

PROOF_S = 1.0
"""How long a failed step waits for the proof that a rank is gone. When one dies, the steps of all others fail at once, and only
its end tells which it was: the host refuses connections after a third of a second."""


@dataclass(slots=True, eq=False)
class FollowerLine:
    """The line to one follower, and its reports that were not taken yet."""

    rank: int
    line: RankLine
    returned: dict[int, int] = field(default_factory=dict)
    """Step → CRC of the tokens that it has sampled."""
    layers: dict[int, int] = field(default_factory=dict)
    """Running step → how many of its layers are written."""
    prepared: dict[int, Failed | None] = field(default_factory=dict)
    """Grammar → why it cannot be used, or None."""
    events: deque[TransferEvent] = field(default_factory=deque)
    held: list[TransferCommand] = field(default_factory=list)
    """Commands that wait until it is known how the clocks differ."""
    transfers_progress_s: float = 0.0


class Followers:
    """lines: to ranks 1, 2, … in order, whose names `mail` can reach. refusals: of the start. Call `turn` before each turn of the
    instance's worker."""

    def __init__(self, mail: Mail[ToLeader], lines: Sequence[RankLine], now: float, refusals: Refusals | None = None) -> None:
        self._mail = mail
        self._all = [FollowerLine(rank, line, transfers_progress_s=now) for rank, line in enumerate(lines, 1)]
        self._by_name = {follower.line.to: follower for follower in self._all}
        self._refusals = refusals or Refusals(mail)
        self._grammars: set[int] = set()
        """Those that followers keep."""
        self._ping_s = now
        self._ended = False
        self._now = now
        self._failure: tuple[str, float] | None = None
        """The first failure of a step, and until when it waits for the proof that another rank has caused it."""
        self.stale = 0
        """Messages from former lives of ranks."""
        self.drain_asked = False
        """A follower's process was told to stop."""

    def __iter__(self) -> Iterator[FollowerLine]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def turn(self, clock: Callable[[], float]) -> None:
        """Take in mail, and ping. Raises RankLost."""
        began = clock()
        mail = self._mail.receive()
        now = self._now = clock()  # not before the mail has arrived: `RankLine.compare_clocks`
        for sender, message in mail:
            follower = self._by_name.get(sender)
            if follower is None or isinstance(message, RankHello):
                self.stale += 1
                if follower is None and isinstance(message, RankHello):
                    self._hello(sender, message)
                continue
            follower.line.take(message, now)
            self._refusals.heard(follower.rank, follower.line.who, now)
            self._take(follower, message, now)
        self.check_gone(self._mail.refused())
        for follower in self._all:
            follower.line.check(began)  # mail may wait that came later
        if self._failure is not None and now >= self._failure[1]:
            raise RankLost(self._failure[0])
        if now >= self._ping_s:
            self._ping_s = now + PING_S
            for follower in self._all:
                follower.line.send(Ping(sent_s=now, serving=True))

    def next_deadline(self) -> float:
        """When the next turn is due even if nothing happens before."""
        proven_s = self._ping_s if self._failure is None else self._failure[1]
        return min(self._ping_s, proven_s, *(follower.line.heard_s + SILENCE_S for follower in self._all))

    def failed(self, reason: str) -> None:
        """A step has failed on some rank: the instance ends, for this reason unless another rank proves to be gone."""
        self._failure = self._failure or (reason, self._now + PROOF_S)

    def check_gone(self, names: Iterable[InstanceId]) -> None:
        """Raises RankLost when one of these, whose processes are gone, is a follower."""
        for name in names:
            if name in self._by_name:
                raise RankLost(f"{self._by_name[name].line.who} is gone")

    def launch(self, plan: StepPlan, grammar_id: Callable[[Grammar], int]) -> None:
        """grammar_id: of a grammar that was prepared."""
        launch = pack_plan(plan, grammar_id)
        for follower in self._all:
            follower.line.send(launch)

    def prepare(self, grammar_id: int, grammar: Grammar, owner: str = "") -> None:
        self._grammars.add(grammar_id)
        grammar = Grammar(grammar.kind, grammar.text)  # a message that waits keeps no request's alive
        for follower in self._all:
            follower.line.send(PrepareGrammar(grammar_id=grammar_id, grammar=grammar, owner=owner))

    def drop_grammars(self, grammar_ids: Sequence[int]) -> None:
        self._grammars -= set(grammar_ids)
        for follower in self._all:
            for grammar_id in grammar_ids:
                follower.prepared.pop(grammar_id, None)
            follower.line.send(DropGrammars(grammar_ids=tuple(grammar_ids)))

    def command(self, follower: FollowerLine, command: TransferCommand) -> None:
        """For its transfers. Commands wait, in order, until the first ping is answered."""
        offset_s = follower.line.clock_offset_s
        if offset_s is None:
            follower.held.append(command)
            return
        match command:
            case Push():
                order: Order = PackedPush.pack(command)
            case Allow():
                order = replace(command, until_s=command.until_s + offset_s)
            case _:
                order = command
        follower.line.send(TransferOrder(order=order))

    def end(self, reason: str, *, orderly: bool) -> None:
        """Tell all of them to exit. orderly: the instance has drained. Idempotent."""
        if not self._ended:
            self._ended = True
            for follower in self._all:
                follower.line.send(End(reason=reason, orderly=orderly))

    def _hello(self, sender: InstanceId, hello: RankHello) -> None:
        """All ranks are there. One that is lost may have a successor, whom the next life of the leader lets in."""
        if 1 <= hello.rank <= len(self._all):
            self._refusals.wait(sender, hello, self._now)
        else:
            self._refusals.refuse(sender, hello, f"there is no rank {hello.rank} besides rank 0 with --tp {1 + len(self._all)}")

    def _take(self, follower: FollowerLine, message: ToLeader, now: float) -> None:
        match message:
            case StepReturned(step=step, digest=digest):
                follower.returned[step] = digest
            case LayersReached(step=step, layers=layers):
                follower.layers[step] = layers
            case Events(news=news):
                follower.events.extend(news)
            case GrammarPrepared(grammar_id=grammar_id, refused=refused):
                if grammar_id in self._grammars:
                    follower.prepared[grammar_id] = refused
            case Pong():
                follower.line.compare_clocks(message.heard_s, now)
                follower.transfers_progress_s = now - message.transfer_age_s
                held, follower.held = follower.held, []
                for command in held:
                    self.command(follower, command)
            case AskDrain():
                self.drain_asked = True
            case RankFailed(reason=reason):
                self.failed(f"{follower.line.who} failed: {reason}")
            case Offer() | RankReady() | RankHello():
                raise RankLost(f"{follower.line.who} sent {type(message).__name__} while the instance serves")
            case _:
                assert_never(message)


class RemoteTransfers:
    """The transfers of one follower. Implements `common.instance.ports.Transfers` by messages."""

    def __init__(self, followers: Followers, follower: FollowerLine) -> None:
        self._followers = followers
        self._follower = follower

    def submit(self, command: TransferCommand) -> None:
        self._followers.command(self._follower, command)

    def poll(self) -> list[TransferEvent]:
        events = list(self._follower.events)
        self._follower.events.clear()
        return events

    @property
    def progress_s(self) -> float:
        return self._follower.transfers_progress_s

    def close(self) -> None:
        """The follower closes its transfers when it is told to end."""


def remote_transfers(followers: Followers) -> list[RemoteTransfers]:
    """Those of each follower, in the order of ranks."""
    return [RemoteTransfers(followers, follower) for follower in followers]
