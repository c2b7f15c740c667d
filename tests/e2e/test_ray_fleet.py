"""`launch ray` on a Ray cluster of two nodes on this machine: a node dies with everything on it, clients see nothing of it.

What ran there comes back on the node that is added. Needs Ray, as no other test does, so it runs only with --soak:

    python -m venv RAY; RAY/bin/pip install -e '.[dev,ray]' psutil; RAY/bin/python -m pytest --soak tests/e2e/test_ray_fleet.py
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.rig.client import Request, Streams
from tests.rig.pages import FleetPages, until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

PATIENCE_S = 180.0
RANKS = 2
ANSWER_TOKENS = 300
PROMPTS = [f"Count from {number} to 90." for number in range(6)]
ONE_NODE = {"num_cpus": 2 * RANKS, "object_store_memory": 80_000_000}
"""Room for two of the four instances."""
WATCHFUL = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}
"""Ray notices the death of a node in two seconds, not in twenty."""
FLAGS = (
    *("--tp", str(RANKS), "--port", "0", "--control-port", "0"),
    *("--executor", "timed", "--step-cost", "0.02,0,0", "--kv-memory", "16MiB"),
)
Start = Callable[..., "RayFleet"]


class Cluster:
    """Two nodes of Ray, as processes of this machine."""

    def __init__(self) -> None:
        ray_cluster: Any = pytest.importorskip("ray.cluster_utils")
        head = ONE_NODE | {"include_dashboard": False, "_system_config": WATCHFUL}
        self._cluster = ray_cluster.Cluster(initialize_head=True, head_node_args=head)
        self._second = self._cluster.add_node(**ONE_NODE)
        self.address: str = self._cluster.address

    def kill_second(self) -> None:
        """At once, with all that runs on it, as when a host loses its power."""
        psutil: Any = pytest.importorskip("psutil")
        raylet = psutil.Process(self._second.all_processes["raylet"][0].process.pid)
        for process in [raylet, *raylet.children(recursive=True)]:
            process.kill()

    def add_second(self) -> None:
        self._second = self._cluster.add_node(**ONE_NODE)

    def shutdown(self) -> None:
        self._cluster.shutdown()


class RayFleet:
    """`launch ray` in a child process, with its output in a file."""

    def __init__(self, address: str, output: Path, flags: Sequence[str]) -> None:
        self._output = output
        command = [sys.executable, "-P", "-m", "launch.main", "ray", "--ray-address", address, *FLAGS, *flags]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        with output.open("w") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def pages(self) -> FleetPages:
        """When it is complete."""
        until(lambda: "curl " in self.output or self._process.poll() is not None, "the fleet is complete")
        found = re.search(r"curl (http://\S+?)/v1", self.output)
        assert found, self.output
        return FleetPages(found[1])

    def stop(self) -> int:
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(PATIENCE_S)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.shutdown()


@pytest.fixture
def start(cluster: Cluster, tmp_path: Path) -> Iterator[Start]:
    """Start a fleet with these flags."""
    fleets: list[RayFleet] = []

    def run(*flags: str) -> RayFleet:
        fleets.append(RayFleet(cluster.address, tmp_path / "output", flags))
        return fleets[-1]

    yield run
    for fleet in fleets:
        print(fleet.output)  # noqa: T201 - pytest shows it when the test fails
        fleet.end()


def streams(pages: FleetPages) -> Streams:
    """A timed executor's tokens depend on seed and position, so answers repeat."""
    requests = [Request.completion(prompt, ANSWER_TOKENS, seed=number) for number, prompt in enumerate(PROMPTS)]
    return Streams(pages.url, "demo", requests)


def members(pages: FleetPages) -> set[str]:
    return {name for name, member in pages.members().items() if member["state"] == "live"}


def test_a_node_dies_and_what_ran_there_comes_back_while_clients_see_no_error(cluster: Cluster, start: Start) -> None:
    fleet = start("--prefill", "2", "--decode", "2")
    pages = fleet.pages()
    everybody = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert members(pages) == everybody
    undisturbed = streams(pages).end()
    assert [len(tokens) for tokens in undisturbed] == [ANSWER_TOKENS] * len(PROMPTS)

    clients = streams(pages)
    clients.wait_until_begun()
    cluster.kill_second()
    assert clients.end() == undisturbed, "no token is missing, repeated or another one"
    until(lambda: len(members(pages)) == 2, "the instances of the dead node are missed")
    left = members(pages)
    assert {name.split("-")[0] for name in left} == {"prefill", "decode"}, "Ray spread both roles over the nodes"
    assert sum(count for _, count in pages.samples("tandem_resumes_total")), "some answers went on elsewhere"
    assert streams(pages).end() == undisturbed, "what is left serves"

    cluster.add_second()
    until(lambda: members(pages) == everybody, "the instances are back")
    until(pages.is_ready, "the fleet is ready")
    assert streams(pages).end() == undisturbed
    assert fleet.stop() == 0


def test_an_instance_with_ranks_on_two_nodes_ends_with_either_and_comes_back_as_a_whole(cluster: Cluster, start: Start) -> None:
    fleet = start("--prefill", "1", "--decode", "1", "--nodes-per-instance", "2")
    pages = fleet.pages()
    undisturbed = streams(pages).end()
    incarnations = {instance["incarnation"] for instance in pages.cluster()["instances"]}
    cluster.kill_second()
    until(lambda: not members(pages), "both have lost a rank, and leave")
    cluster.add_second()
    until(lambda: members(pages) == {"prefill-0", "decode-0"}, "both are back")
    until(pages.is_ready, "the fleet is ready")
    assert not incarnations & {instance["incarnation"] for instance in pages.cluster()["instances"]}
    assert streams(pages).end() == undisturbed
    assert fleet.stop() == 0
