"""`launch ray` without Ray: what is asked of a cluster, how an instance on several hosts lives and ends, and the far half."""

import builtins
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from common.errors import ConfigError
from common.processes.child import Exited, Progress, Ready, Reported
from launch import ray_fleet
from launch.child import RoleEvent
from launch.fleet_options import Bundle, RayConfig, bundles_of, check_gpus
from launch.main import main
from launch.ray_fleet import Ended, HostEvent, HostLost, RankHost, RayInstance
from tests.launch.stub import stub_command
from tests.launch.waiting import PATIENCE_S

READY = Ready(addresses={"inbox": "tcp://10.0.0.1:1"})


@pytest.mark.parametrize(
    ("ranks", "nodes", "bundles"),
    [
        (1, 1, [Bundle(0, 0, cpus=3, gpus=1)]),
        (8, 1, [Bundle(0, 7, cpus=24, gpus=8)]),
        (4, 2, [Bundle(0, 1, cpus=6, gpus=2), Bundle(2, 3, cpus=6, gpus=2)]),
    ],
)
def test_an_instance_asks_each_of_its_nodes_for_an_equal_part_of_its_ranks(ranks: int, nodes: int, bundles: list[Bundle]) -> None:
    config = RayConfig(nodes_per_instance=nodes, cpus_per_rank=3)
    assert bundles_of(config, ranks, on_gpus=True) == bundles
    assert all("GPU" not in bundle.resources for bundle in bundles_of(config, ranks, on_gpus=False))


def test_ranks_that_do_not_divide_are_refused_by_the_names_of_the_flags() -> None:
    with pytest.raises(ConfigError, match=r"--tp 4 ranks .* --nodes-per-instance 3"):
        bundles_of(RayConfig(nodes_per_instance=3), 4, on_gpus=False)


def test_a_cluster_without_gpus_is_refused_at_once_unless_they_are_not_needed_or_will_come() -> None:
    ours, cpus = Bundle(0, 1, cpus=2, gpus=2), {"Alive": True, "Resources": {"CPU": 4.0, "memory": 1e9}}
    gone, gpus = ({"Alive": alive, "Resources": {"CPU": 4.0, "GPU": 2.0}} for alive in (False, True))
    with pytest.raises(
        ConfigError, match=r"no node of the Ray cluster has a GPU \(alive nodes: 2\): give --device cpu .*--device cuda"
    ):
        check_gpus(ours, "auto", [cpus, gone, cpus])
    check_gpus(ours, "auto", [cpus, gpus])
    check_gpus(ours, "cuda", [cpus])
    check_gpus(Bundle(0, 1, cpus=2, gpus=0), "cpu", [cpus])


def test_without_ray_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = builtins.__import__

    def without_ray(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == "ray":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    assert main(["ray"]) == 2
    assert "pip install -c constraints.txt -e '.[ray]'" in capsys.readouterr().err


class FakeHost:
    """Implements `launch.ray_fleet.RankNode`: a process that ends when it is told to."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.started: list[str] = []
        self.running, self.killed = threading.Event(), threading.Event()
        self.begun, self.lets_start = threading.Event(), threading.Event()
        self.lets_start.set()
        self._says: queue.SimpleQueue[HostEvent | HostLost] = queue.SimpleQueue()

    def free_port(self) -> int:
        return 4321

    def start(self, role: str, flags: Sequence[str]) -> None:
        self.begun.set()
        assert self.lets_start.wait(PATIENCE_S)
        self.started = [role, *flags]
        self.running.set()

    def next_events(self) -> list[HostEvent]:
        says = self._says.get(timeout=PATIENCE_S)
        if isinstance(says, HostLost):
            raise says
        return [says]

    def say(self, event: HostEvent | HostLost) -> None:
        self._says.put(event)

    def terminate(self) -> None:
        self.say(Ended(status=0, account="drained"))

    def kill(self) -> None:
        self.killed.set()
        self.say(Ended(status=-9, account="killed"))


class FakePlace:
    """Implements `launch.ray_fleet.ReservedNodes`. full: until the instance is given up."""

    def __init__(self, *hosts: FakeHost, full: bool = False) -> None:
        self.bundles: Sequence[Bundle] = bundles_of(RayConfig(nodes_per_instance=len(hosts)), 2 * len(hosts), on_gpus=False)
        self._hosts, self._full = hosts, full

    def hosts(self, given_up: Callable[[], bool], waits: Callable[[str], object]) -> Sequence[FakeHost]:
        if not self._full:
            return self._hosts
        waits("no room")
        while not given_up():
            threading.Event().wait(0.01)
        return ()


class Life:
    """An instance on these hosts, and the events that it told."""

    def __init__(self, *hosts: FakeHost, full: bool = False) -> None:
        self._events: queue.SimpleQueue[RoleEvent] = queue.SimpleQueue()
        self.instance = RayInstance("decode-0", "decode", ["--tp=4"], FakePlace(*hosts, full=full), self._events.put)
        if not full:
            assert all(host.running.wait(PATIENCE_S) for host in hosts if host.lets_start.is_set())

    def next(self) -> RoleEvent:
        return self._events.get(timeout=PATIENCE_S)

    def end(self) -> Exited:
        event = self.next()
        assert isinstance(event, Exited) and self.instance.wait(PATIENCE_S)
        return event


@pytest.fixture
def hosts() -> Iterator[list[FakeHost]]:
    """Whatever runs there ends with the test."""
    found = [FakeHost("10.0.0.1"), FakeHost("10.0.0.2")]
    yield found
    for host in found:
        host.kill()


def test_the_ranks_of_an_instance_meet_at_its_first_node(hosts: list[FakeHost]) -> None:
    Life(*hosts)
    assert hosts[0].started == ["decode", "--tp=4", "--host=10.0.0.1", "--rank=0-1", "--leader=tcp://10.0.0.1:4321"]
    assert hosts[1].started == ["decode", "--tp=4", "--host=10.0.0.2", "--rank=2-3", "--leader=tcp://10.0.0.1:4321"]


def test_one_host_starts_all_ranks_and_needs_no_port(hosts: list[FakeHost]) -> None:
    Life(hosts[0])
    assert hosts[0].started == ["decode", "--tp=4", "--host=10.0.0.1"]


def test_every_host_is_heard_but_rank_0_says_when_the_instance_is_ready(hosts: list[FakeHost]) -> None:
    life = Life(*hosts)
    hosts[1].say(READY)
    hosts[1].say(Progress(text="loading"))
    assert life.next() == Reported("decode-0", Progress(text="loading"))
    hosts[0].say(READY)
    assert life.next() == Reported("decode-0", READY)


@pytest.mark.parametrize("first", [0, 1])
def test_when_one_host_fails_the_others_end_and_its_reason_is_told(
    first: int, hosts: list[FakeHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.ray_fleet.OTHERS_S", 0.0)
    life = Life(*hosts)
    hosts[first].say(HostLost("node gone"))
    assert life.end() == Exited("decode-0", 1, "node gone")
    assert hosts[1 - first].killed.is_set()


def test_an_instance_drains_when_all_its_hosts_do(hosts: list[FakeHost]) -> None:
    life = Life(*hosts)
    life.instance.terminate()
    assert life.end() == Exited("decode-0", 0, "drained")


def test_an_instance_that_is_killed_while_its_ranks_are_started_leaves_none_behind(hosts: list[FakeHost]) -> None:
    hosts[0].lets_start.clear()
    life = Life(hosts[0])
    assert hosts[0].begun.wait(PATIENCE_S)
    life.instance.kill()
    hosts[0].killed.clear()
    hosts[0].lets_start.set()
    assert life.end().status == 1 and hosts[0].killed.is_set(), "it was killed again after it had started"


def test_a_host_that_cannot_run_as_it_was_started_gives_its_status(hosts: list[FakeHost]) -> None:
    life = Life(*hosts)
    hosts[0].say(Ended(status=0, account="went along"))
    hosts[1].say(Ended(status=2, account="--water: cannot be boiled"))
    assert life.end() == Exited("decode-0", 2, "--water: cannot be boiled")


def test_an_instance_that_waits_for_room_says_so_and_can_be_stopped(hosts: list[FakeHost]) -> None:
    life = Life(hosts[0], full=True)
    assert life.next() == Reported("decode-0", Progress(text="no room"))
    life.instance.kill()
    assert life.end().status == 0 and not hosts[0].started


def test_a_host_starts_a_process_and_answers_with_its_reports_and_its_end(log: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_fleet, "launch_command", stub_command)
    host = RankHost("decode-0")
    assert 0 < host.free_port() < 65536
    host.start("decode", ["--name=decode-0"])
    decoder: msgspec.json.Decoder[HostEvent] = msgspec.json.Decoder(HostEvent)
    events: list[HostEvent] = []
    while not any(isinstance(event, Ready) for event in events):
        events += map(decoder.decode, host.next_events())
    host.terminate()
    while not isinstance(events[-1], Ended):
        events += map(decoder.decode, host.next_events())
    assert events[-1].status == 0 and "ray" not in sys.modules
