"""The ports of an instance: how its scheduler sees transfers and mail, as pure data.

Owns the vocabulary between scheduler, worker and the rim. Knows no sockets, libraries or clocks; `kv_transfer` implements
`Transfers`, `common.wire` implements `Mail`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from common.engine.plan import Plan, StepResult
from common.ids import Incarnation, InstanceId, Int32Array, Key, Ticket
from common.messages import AnyMessage, Counters, InstanceInfo, LinkInfo, LinkTraffic, Load

M = TypeVar("M")


# --- transfers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """The whole set of peers: links to new ones are made in the background, links to missing ones are closed."""

    peers: tuple[InstanceInfo, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Push:
    """Write our pages into a peer's: source_pages[i] → target_pages[i]. [pages] int32 each. layers: only these; None: all.

    The peer is named with its incarnation: a push meant for a dead incarnation fails instead of landing in its successor.
    """

    ticket: Ticket
    peer: InstanceId
    incarnation: Incarnation
    source_pages: Int32Array
    target_pages: Int32Array
    layers: range | None = None


@dataclass(frozen=True, slots=True)
class Allow:
    """Pushes to the peer may be written until then, on our clock. Without it nothing is written; it never moves back."""

    peer: InstanceId
    incarnation: Incarnation
    until_s: float


@dataclass(frozen=True, slots=True)
class Settle:
    """Take in what peers wrote to us that is still in our receive buffers, then say Settled."""

    key: Key


@dataclass(frozen=True, slots=True)
class Expect:
    """How many writes of peers are awaited: while there are any, progress is driven often. distant: some may come from another
    host, and over TCP they come no faster than it is driven."""

    writes: int
    distant: bool = False


TransferCommand: TypeAlias = Connect | Push | Allow | Settle | Expect


@dataclass(frozen=True, slots=True)
class PushDone:
    """Every byte of the push is visible at the target."""

    ticket: Ticket
    pushed_bytes: int
    seconds: float
    runs: int = 1


@dataclass(frozen=True, slots=True)
class PushFailed:
    """The push did not complete. `quiescent` says that no byte of it is or will be under way. begun: something may have been
    written."""

    ticket: Ticket
    reason: str
    quiescent: bool
    begun: bool = True


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """A link came up, or was lost with everything in flight on it."""

    link: LinkInfo


@dataclass(frozen=True, slots=True)
class Settled:
    """What had arrived for the key's reservation before Settle is in its pages."""

    key: Key


TransferEvent: TypeAlias = PushDone | PushFailed | LinkChanged | Settled


class Transfers(Protocol):
    """Pushes pages on a thread of its own; never blocks the caller. Every push ends in exactly one PushDone or PushFailed."""

    def submit(self, command: TransferCommand) -> None: ...

    def poll(self) -> list[TransferEvent]: ...

    @property
    def progress_s(self) -> float:
        """Since when nothing has moved: when its loop last turned, or before that when a push in flight last made progress."""

    def close(self) -> None:
        """End every push (done or failed), close the links and free the transport. Bounded in time; idempotent."""


# --- mail ------------------------------------------------------------------------------------------------------------


class Mail(Protocol[M]):
    """One inbox, and a way to send to any known address. Sending never blocks: a full or dead peer loses the message,
    which is counted and comes to light at a deadline."""

    def send(self, to: InstanceId, message: AnyMessage) -> None: ...

    def receive(self) -> list[tuple[InstanceId, M]]:
        """Everything that has arrived, each with its sender; frames that are no message of this inbox are dropped and counted."""

    def route(self, to: InstanceId, address: str | None) -> None:
        """Learn (or with None forget) the address of a correspondent."""

    @property
    def frames_refused(self) -> Mapping[str, int]:
        """Frames that arrived and were dropped, by reason."""

    @property
    def messages_lost(self) -> Mapping[str, int]:
        """Messages that could not be sent, by reason."""


# --- what a scheduler asks for -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    to: InstanceId
    message: AnyMessage


Action: TypeAlias = Send | Push | Allow | Settle


@dataclass(frozen=True, slots=True)
class Decision:
    """plan: the next forward, or None when there is nothing to compute. actions: to be done before it is launched."""

    plan: Plan | None
    actions: list[Action]


M_contra = TypeVar("M_contra", contravariant=True)


class Scheduler(Protocol[M_contra]):
    """A role's brain: takes messages and events, returns actions and plans. Opens no socket, touches no device, reads no
    clock but the time that it is given."""

    def receive(self, sender: InstanceId, message: M_contra, now: float) -> list[Action]: ...

    def layers_done(self, plan: Plan, layers: int, now: float) -> list[Action]:
        """Of the step that is being computed, the KV of the first `layers` layers is in the pages."""

    def step_done(self, result: StepResult, now: float) -> list[Action]: ...

    def transfer_event(self, event: TransferEvent, now: float) -> list[Action]: ...

    def tick(self, now: float) -> list[Action]:
        """Act on every deadline that has passed."""

    def drain(self, now: float) -> list[Action]:
        """Take in no more, end what waits so that it is resumed elsewhere, and after a while what still runs. Idempotent."""

    @property
    def drained(self) -> bool:
        """Draining, and nothing is left (or what is left will never end)."""

    def abandon(self, now: float) -> list[Action]:
        """The router that sent the requests is gone: end them all, telling no client."""

    def decide(self, now: float) -> Decision:
        """Admit what fits and plan the next forward. The caller launches the plan."""

    def next_deadline(self) -> float | None: ...

    def load(self) -> Load: ...

    def counters(self) -> Counters: ...

    def traffic(self, peer: InstanceId) -> LinkTraffic:
        """What was pushed to this peer."""

    @property
    def open_reservations(self) -> int: ...
