"""Every backend against the contract, and what each of them does when the other process dies, stops, comes back or leaves.

They run between real processes. NIXL runs twice: as on one host, where UCX writes into the other process, and over TCP as between
hosts. A backend whose library cannot be loaded is left out, except for NIXL on Linux, which is a dependency.
"""

import importlib
import importlib.util
import itertools
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest

from common.addresses import LOOPBACK
from common.config import TransportName
from common.errors import TransferError
from common.ids import Ticket
from common.messages import PoolDescriptor
from kv_transfer.backends import make_transport
from kv_transfer.transport import AgentLost, ConnectFailed, RunsDone, RunsFailed, TransportEvent
from tests.kv_transfer.agents import (
    Backend,
    Kind,
    MemoryBackend,
    ProcessAgent,
    ProcessBackend,
    done,
    mooncake_kind,
    nixl_kind,
    outcomes,
)
from tests.kv_transfer.contract import MIB, POISON, SOURCE_SEED, Pair, TransportContract, pair_of, rows
from tests.kv_transfer.local_agent import LocalAgent, random_bytes

HAS_NIXL = importlib.util.find_spec("nixl") is not None
PROCESS_BYTES = 40 * MIB + 12346
EVERYTHING = rows((0, 0, PROCESS_BYTES))
"""Three slices or more, of any backend."""
LOST_S = 60.0
"""Ends the wait for the death of a receiver to be noticed."""


def needs(name: str) -> None:
    """Skip what cannot run here."""
    if name.startswith("nixl") and not HAS_NIXL:
        pytest.skip("nixl is not installed (it is for Linux only)")
    if name == "mooncake":
        pytest.importorskip(
            "mooncake.engine", reason="Mooncake is not installed, or a library of the system is missing", exc_type=ImportError
        )


# --- the contract ------------------------------------------------------------------------------------------------------------

KINDS = {
    "nixl": nixl_kind(tcp_only=False),
    "nixl over tcp": nixl_kind(tcp_only=True),
    "cma": Kind("cma"),
    "torch": Kind("torch"),
    "mooncake": mooncake_kind(),
}
"""With a shorter silence than that of a real instance: the tests that stop a receiver must wait for it."""


@pytest.fixture(scope="module", params=["memory", *KINDS])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    needs(request.param)
    made: Backend
    if request.param == "memory":
        made = MemoryBackend()
    else:
        made = ProcessBackend(tmp_path_factory.mktemp("agents"), KINDS[request.param])
    yield made
    made.finish()


@pytest.fixture(scope="module")
def pair(backend: Backend) -> Pair:
    return pair_of(backend)


class TestEveryTransport(TransportContract):
    """The contract, run against each backend."""


@pytest.mark.parametrize("name", ["nixl", "cma"])
def test_a_transport_is_made_by_its_name_and_closes_with_its_links(name: TransportName) -> None:
    needs(name)
    source, target = (LocalAgent(make_transport(name, LOOPBACK), MIB) for _ in range(2))
    source.connect(target.pool)
    source.end()
    target.end()


# --- what becomes of a link when a process does something else ---------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Stage:
    """A source that pushes in all the tests of one kind, and those that it pushes to."""

    backend: ProcessBackend
    kind: Kind
    source: ProcessAgent
    bystander: ProcessAgent
    tickets: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    guests: list[ProcessAgent] = field(default_factory=list)

    def linked_guests(self) -> tuple[ProcessAgent, ProcessAgent]:
        """Two new agents, of which the first is linked to the second, and the source to none."""
        sender, target = self._start(2)
        sender.connect(target.pool)
        return sender, target

    def target(self) -> ProcessAgent:
        """A new agent to which the source is linked, and has pushed."""
        (target,) = self._start(1)
        self.source.connect(target.pool)
        ticket = next(self.tickets)
        self.source.push(ticket, target.pool.agent, rows((0, 0, 1)))
        assert outcomes(self.source, [ticket]) == {ticket: done(ticket)}
        return target

    def _start(self, number: int) -> list[ProcessAgent]:
        started = self.backend.start(*[PROCESS_BYTES] * number)
        self.guests += started
        return started

    def pushes(self, number: int) -> list[int]:
        """Tickets."""
        return list(itertools.islice(self.tickets, number))

    def push(self, target: ProcessAgent, number: int = 1) -> list[int]:
        """Push everything so many times. Returns the tickets."""
        tickets = self.pushes(number)
        for ticket in tickets:
            self.source.push(ticket, target.pool.agent, EVERYTHING)
        return tickets

    def still_serves(self, agent: ProcessAgent) -> None:
        """The source lives and pushes to the agent."""
        agent.wipe(0)
        self.source.connect(agent.pool)
        (ticket,) = self.push(agent)
        assert outcomes(self.source, [ticket]) == {ticket: done(ticket)}
        assert (agent.memory() == random_bytes(SOURCE_SEED, PROCESS_BYTES)).all()


@pytest.fixture(scope="module", params=list(KINDS))
def shared_stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    needs(request.param)
    kind = KINDS[request.param]
    backend = ProcessBackend(tmp_path_factory.mktemp("agents"), kind)
    source, bystander = backend.start(PROCESS_BYTES, PROCESS_BYTES)
    source.fill(SOURCE_SEED)
    yield Stage(backend, kind, source, bystander)
    backend.finish()


@pytest.fixture
def stage(shared_stage: Stage) -> Iterator[Stage]:
    """What a test has started ends with it: agents that poll on would take the processors from the next test."""
    yield shared_stage
    for guest in shared_stage.guests:
        guest.go_on()
        guest.end()
    shared_stage.guests.clear()


def only(*names: str) -> pytest.MarkDecorator:
    """For these kinds."""
    return pytest.mark.parametrize("shared_stage", names, indirect=True)


receiver_must_run = only("nixl over tcp", "torch", "mooncake")


def test_a_receiver_that_is_killed_in_mid_push_fails_it_and_its_successor_is_served(stage: Stage) -> None:
    target = stage.target()
    tickets = stage.pushes(16)
    stage.source.push_many(tickets, target.pool.agent, EVERYTHING)
    stage.source.posted()
    target.kill()
    began = time.monotonic()
    for _ in tickets[1:]:
        stage.source.posted()
    ended = outcomes(stage.source, tickets)
    assert time.monotonic() - began < LOST_S
    assert isinstance(ended[tickets[-1]], RunsFailed), "it was posted to a dead process"
    assert all(isinstance(end, RunsDone) or end.quiescent for end in ended.values())
    stage.still_serves(stage.target())


def test_a_receiver_that_died_unseen_fails_the_next_push_and_is_lost_once(stage: Stage) -> None:
    target = stage.target()
    target.kill()
    tickets = stage.push(target, 3)
    until = time.monotonic() + LOST_S
    events: list[TransportEvent] = []
    while {event.ticket for event in events if isinstance(event, RunsFailed)} != set(tickets):
        assert time.monotonic() < until
        events += stage.source.events(until - time.monotonic())
    assert [event.agent for event in events if isinstance(event, AgentLost)] == [target.pool.agent]
    stage.still_serves(stage.bystander)


@receiver_must_run
def test_what_is_under_way_to_a_receiver_that_stops_and_dies_never_counts_as_done(stage: Stage) -> None:
    target = stage.target()
    target.stop()
    tickets = stage.push(target, 2)
    target.kill()
    assert all(isinstance(end, RunsFailed) for end in outcomes(stage.source, tickets, timeout_s=LOST_S).values())
    stage.still_serves(stage.bystander)


@receiver_must_run
def test_a_stopped_receiver_is_lost_after_its_silence_and_can_be_linked_again_when_it_goes_on(stage: Stage) -> None:
    target = stage.target()
    for _ in range(2):  # with two rails UCX crashed at the second link at the latest
        target.stop()
        began = time.monotonic()
        tickets = stage.push(target, 2)
        ended = outcomes(stage.source, tickets)
        assert all(isinstance(end, RunsFailed) for end in ended.values())
        assert time.monotonic() - began > 0.8 * stage.kind.silence_s
        target.go_on()
        stage.still_serves(target)


@only("torch", "mooncake")
def test_it_is_not_proven_that_a_push_to_a_stopped_receiver_has_ended(stage: Stage) -> None:
    target = stage.target()
    target.stop()
    (ticket,) = stage.push(target)
    ended = outcomes(stage.source, [ticket])[ticket]
    assert isinstance(ended, RunsFailed) and not ended.quiescent, "it may land when the receiver goes on"
    target.go_on()


@only("nixl", "cma")
def test_where_the_receiver_has_no_part_a_stopped_one_still_receives(stage: Stage) -> None:
    target = stage.target()
    target.stop()
    (ticket,) = stage.push(target)
    assert outcomes(stage.source, [ticket]) == {ticket: done(ticket)}
    target.go_on()
    assert (target.memory() == random_bytes(SOURCE_SEED, PROCESS_BYTES)).all()


def test_a_sender_that_ends_in_mid_push_leaves_nothing_and_its_receiver_serves_others(stage: Stage) -> None:
    sender, target = stage.linked_guests()
    sender.push_many(range(1, 9), target.pool.agent, EVERYTHING)
    for _ in range(8):
        sender.posted()
    sender.end()
    stage.still_serves(target)


def test_a_sender_that_is_killed_in_mid_push_writes_nothing_more_and_its_receiver_serves_others(stage: Stage) -> None:
    sender, target = stage.linked_guests()
    sender.push_many(range(1, 9), target.pool.agent, EVERYTHING)
    sender.posted()
    sender.kill()
    time.sleep(0.3)  # what is in the target's sockets
    target.wipe(POISON)
    time.sleep(0.5)
    assert (target.memory() == POISON).all()
    stage.still_serves(target)


@only("nixl", "nixl over tcp", "cma", "torch")
def test_agents_that_part_in_order_have_nothing_to_complain_about(stage: Stage) -> None:
    sender, target = stage.linked_guests()
    sender.push(1, target.pool.agent, EVERYTHING)
    assert outcomes(sender, [1]) == {1: done(1)}
    sender.close(target.pool.agent)
    for agent in (sender, target):
        agent.end()
        assert agent.complaints() == ""


@only("cma", "torch", "mooncake")
def test_an_agent_that_is_closed_is_written_to_no_more(stage: Stage) -> None:
    target = stage.target()
    target.close()
    target.wipe(POISON)
    (ticket,) = stage.push(target)
    assert isinstance(outcomes(stage.source, [ticket])[ticket], RunsFailed)
    assert (target.memory() == POISON).all()


@pytest.mark.parametrize("wire", ["", "garbage", "half"])
def test_a_wire_descriptor_that_is_none_is_refused(stage: Stage, wire: str) -> None:
    pool = stage.bystander.pool
    impostor = msgspec.structs.replace(
        pool, agent="impostor", wire=pool.wire[: len(pool.wire) // 2] if wire == "half" else wire.encode()
    )
    with pytest.raises(TransferError, match="could not connect to impostor"):
        stage.source.connect(impostor)
    stage.still_serves(stage.bystander)


# --- peers that do not answer ------------------------------------------------------------------------------------------------


class FullPort:
    """A port at which nobody answers: its queue is full, so the kernel drops what comes."""

    def __init__(self) -> None:
        self._listener = socket.create_server((LOOPBACK, 0), backlog=0)
        self.address = self._listener.getsockname()
        self._queued = [socket.socket() for _ in range(4)]
        for each in self._queued:
            each.setblocking(False)
            each.connect_ex(self.address)

    def pool(self, like: PoolDescriptor, agent: str) -> PoolDescriptor:
        """The pool of an agent that is said to listen there."""
        wire = {**msgspec.msgpack.decode(like.wire), "port": self.address[1]}
        return msgspec.structs.replace(like, agent=agent, wire=msgspec.msgpack.encode(wire))

    def close(self) -> None:
        for each in (self._listener, *self._queued):
            each.close()


def pushes_while_nobody_answers(stage: Stage, silent: set[str]) -> None:
    """Push to the bystander. Ends before any of the silent has been given up: connecting to them held up nothing."""
    (ticket,) = stage.push(stage.bystander)
    events: list[TransportEvent] = []
    until = time.monotonic() + LOST_S
    while RunsDone(Ticket(ticket)) not in events:
        assert time.monotonic() < until
        events += stage.source.events(until - time.monotonic())
    assert not [event for event in events if isinstance(event, ConnectFailed) and event.agent in silent]


def test_connecting_to_a_stopped_peer_holds_up_no_push_and_can_be_given_up_and_begun_again(stage: Stage) -> None:
    stage.still_serves(stage.bystander)
    _, stopped = stage.linked_guests()
    stopped.stop()
    stage.source.begin_connect(stopped.pool)
    pushes_while_nobody_answers(stage, {stopped.pool.agent})
    stage.source.close(stopped.pool.agent)
    stopped.go_on()
    stage.still_serves(stopped)


@only("torch", "mooncake")
def test_connecting_to_ports_that_drop_everything_holds_up_no_push(stage: Stage) -> None:
    stage.still_serves(stage.bystander)
    port = FullPort()
    pools = [port.pool(stage.bystander.pool, f"silent-{number}") for number in range(6)]
    for pool in pools:
        stage.source.begin_connect(pool)
    pushes_while_nobody_answers(stage, {pool.agent for pool in pools})
    failed: set[str] = set()
    until = time.monotonic() + LOST_S
    while len(failed) < len(pools):
        assert time.monotonic() < until, "an attempt ends in bounded time"
        failed |= {event.agent for event in stage.source.events(1.0) if isinstance(event, ConnectFailed)}
    port.close()
    stage.still_serves(stage.bystander)
