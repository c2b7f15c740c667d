"""The ports of an instance: its scheduler, its transfers and its mail, and the pure data that passes between them.

Owns the vocabulary between scheduler, worker and the rim. Knows no sockets, libraries or clocks. `kv_transfer` implements
`Transfers`, `common.mail` implements `Mail`, and each role implements `Scheduler`.

    Mail ──message──► Scheduler ──Action──► Mail, Transfers
    Transfers ─Event─►    └──────Plan────► Executor ──StepResult──► Scheduler
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Protocol, TypeAlias, TypeVar

from common.executor import StepPlan, StepResult
from common.ids import AttemptId, Digest, InstanceId
from common.messages import AnyMessage, Counters, Failed, InstanceInfo, Load, Timeline
from common.messages.transfers import TransferCommand, TransferEvent
from common.pages.pool import PagePool
from common.sampling_params import Grammar
from common.step_cost import StepCost

M = TypeVar("M")


# --- transfers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make the grammar of this request ready for the executor, at its owner's turn, then report Prepared."""

    key: AttemptId
    grammar: Grammar
    owner: str = ""


@dataclass(frozen=True, slots=True)
class AdapterUnused:
    """No request, and no step in flight, has this adapter, which is not served."""

    adapter: Digest


class Transfers(Protocol):
    """Pushes pages on its own thread and never blocks the caller. Every push ends in exactly one PushDone or PushFailed."""

    def submit(self, command: TransferCommand) -> None: ...

    def poll(self) -> list[TransferEvent]: ...

    @property
    def progress_s(self) -> float:
        """When something last moved: when the loop last turned, or, if earlier, when a push in flight last made progress."""

    def close(self) -> None:
        """End every push (done or failed), close the links and free the transport. Takes bounded time; idempotent."""


# --- mail ------------------------------------------------------------------------------------------------------------


class Mail(Protocol[M]):
    """One inbox, and a way to send to any known address. Sending never blocks: a message to a full or dead peer is lost and
    counted, and a deadline brings the loss to light."""

    def send(self, to: InstanceId, message: AnyMessage) -> None: ...

    def receive(self, most: int = ...) -> list[tuple[InstanceId, M]]:
        """The messages that have arrived, at most `most`, each with its sender; none when everything has been read. Frames that
        are not a message of this inbox are dropped and counted."""

    def route(self, to: InstanceId, address: str | None, *, watch: bool = False) -> None:
        """Learn the address of a correspondent, or forget it (None). watch: `refused` tells when nobody is there any more,
        and `reaches` whether the connection is up."""

    def reaches(self, to: InstanceId) -> bool:
        """Whether the connection to a correspondent that is watched is up. What is sent to another waits for it."""

    def refused(self) -> list[InstanceId]:
        """Correspondents whose connection broke, and at whose address nobody listens any more; each break is told once."""

    @property
    def frames_refused(self) -> Mapping[str, int]:
        """Frames that arrived and were dropped, by reason."""

    @property
    def messages_lost(self) -> Mapping[str, int]:
        """Messages that could not be sent, by reason."""


# --- schedulers ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayersDone:
    """The running step has written the KV of its first `layers` layers into the pages."""

    plan: StepPlan
    layers: int


@dataclass(frozen=True, slots=True)
class RouterJoined:
    """This life of a router has welcomed us, and may send requests from now on."""

    router: InstanceId
    detokenizers: int
    """How many it has."""


@dataclass(frozen=True, slots=True)
class RouterLost:
    """This life of a router is gone: nobody waits for the answers to its requests any more."""

    router: InstanceId


@dataclass(frozen=True, slots=True)
class PeersChanged:
    """The instances of the other role to work with are others now."""

    joined: tuple[InstanceInfo, ...] = ()
    """Those that are new, or new incarnations."""
    left: tuple[InstanceId, ...] = ()
    """Those that are there no longer, in no incarnation."""


@dataclass(frozen=True, slots=True)
class PeerDied:
    """The process of rank 0 of this peer is proven to be gone: its host refuses connections, or another life listens at its
    address."""

    peer: InstanceInfo


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows with the grammar of this request can be launched."""

    key: AttemptId
    refused: Failed | None = None
    """Why they never can; None when they can."""


@dataclass(frozen=True, slots=True)
class WeightsReplaced:
    """Other weights compute from now on. No step is in flight, and nothing that was computed is of use."""

    weights: Digest


@dataclass(frozen=True, slots=True)
class AdaptersChanged:
    """Requests can have these adapters, and no others."""

    served: frozenset[Digest]
    unused: frozenset[Digest]
    """What is still held: say when no request has it any more."""


@dataclass(frozen=True, slots=True)
class StepsMeasured:
    """What steps cost of late."""

    cost: StepCost


@dataclass(frozen=True, slots=True)
class LeaveRole:
    """Another role is to begin here: take no more requests, and end those that still run after so many seconds."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class StayInRole:
    """The other role does not begin: take requests again."""


Event: TypeAlias = (
    Prepared
    | TransferEvent
    | LayersDone
    | PeersChanged
    | PeerDied
    | RouterJoined
    | RouterLost
    | WeightsReplaced
    | AdaptersChanged
    | StepsMeasured
    | LeaveRole
    | StayInRole
)
"""What happens to an instance besides mail. A transfer event answers a command, so a scheduler sees only those of its own side:
the one that pushes sees pushes, links and layers; the one that is written to sees Settled."""


@dataclass(frozen=True, slots=True)
class Send:
    to: InstanceId
    message: AnyMessage


Action: TypeAlias = Send | Prepare | AdapterUnused | TransferCommand


@dataclass(frozen=True, slots=True)
class Decision:
    """What a scheduler wants next."""

    plan: StepPlan | None
    actions: list[Action]
    """What to do before it is launched."""
    follows_layers: bool = False
    """Report LayersDone while the plan is computed."""


@dataclass(frozen=True, slots=True)
class Report:
    """How a role is."""

    load: Load
    counters: Counters
    drained: bool
    """It was told to drain, and nothing is left, or what is left will never end."""
    draining: bool = False
    """It was told to drain."""
    links_version: int = 0
    """The version of its last LinkReport; 0 where there is none."""
    cache_version: int = 0
    """The version of its last CacheChanges."""


@dataclass(frozen=True, slots=True)
class FormerRole:
    """What a role leaves to the next one of its instance."""

    pool: PagePool
    """With the prefix cache."""
    steps: int
    """How many were planned: their numbers go on."""


M_contra = TypeVar("M_contra", contravariant=True)


class Scheduler(Protocol[M_contra]):
    """A role's brain: takes messages and events, returns actions and plans. Opens no socket, touches no device, reads no
    clock but the time that it is given."""

    takes: UnionType
    """Its messages. Others come late, to a former role."""
    pool: PagePool
    """The pages of the instance."""

    @property
    def last_step(self) -> int:
        """The number of the last plan; 0: there was none."""

    def receive(self, sender: InstanceId, message: M_contra, now: float) -> list[Action]: ...

    def handle(self, event: Event, now: float) -> list[Action]: ...

    def step_done(self, result: StepResult, now: float) -> list[Action]: ...

    def tick(self, now: float) -> list[Action]:
        """Act on every deadline that has passed."""

    def decide(self, now: float) -> Decision:
        """Admit what fits and plan the next forward. The caller launches the plan."""

    def next_deadline(self) -> float | None: ...

    def report(self) -> Report: ...

    def key_in(self, row: int) -> AttemptId:
        """The request in a row of a step that is in flight."""

    def take_timelines(self) -> Sequence[Timeline]:
        """The timelines of the requests that have left since the last call, with times of this instance's clock."""
