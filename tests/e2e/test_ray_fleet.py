"""`launch ray` on a Ray cluster of two nodes on this machine: a node dies with everything on it, clients see nothing of it.

What ran there comes back on the node that is added. Needs Ray, as no other test does, so it runs only with --soak:

    python -m venv RAY; RAY/bin/pip install -e '.[dev,ray]' psutil; RAY/bin/python -m pytest --soak tests/e2e/test_ray_fleet.py
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fleet_pages import FleetPages

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


class Clients:
    """Streams of openai's client, all open at once. A timed executor's tokens depend on seed and position, so answers repeat.

    texts: what each has read so far.
    """

    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        self.texts = [""] * len(PROMPTS)
        self._begun = threading.Semaphore(0)
        self._pool = ThreadPoolExecutor(len(PROMPTS))
        self._ends = [self._pool.submit(self._read, number) for number in range(len(PROMPTS))]

    def wait_until_begun(self) -> None:
        for _ in PROMPTS:
            assert self._begun.acquire(timeout=PATIENCE_S)
        assert not any(end.done() for end in self._ends), "the streams are long enough for a fault to hit them"

    def finish(self) -> list[str]:
        """The answers. Raises what a client raised."""
        for end in self._ends:
            end.result(PATIENCE_S)
        self._pool.shutdown()
        return self.texts

    def _read(self, number: int) -> None:
        stream = self._client.completions.create(
            model="demo", prompt=PROMPTS[number], max_tokens=ANSWER_TOKENS, seed=number, stream=True
        )
        reason: str | None = None
        for chunk in stream:
            (choice,) = chunk.choices
            if not self.texts[number]:
                self._begun.release()
            self.texts[number] += choice.text
            reason = choice.finish_reason
        assert reason == "length", f"the answer ended with {reason}"


def members(pages: FleetPages) -> set[str]:
    return {instance["id"] for instance in pages.cluster()["instances"] if instance["state"] == "live"}


def until(holds: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.1)


def test_a_node_dies_and_what_ran_there_comes_back_while_clients_see_no_error(cluster: Cluster, start: Start) -> None:
    fleet = start("--prefill", "2", "--decode", "2")
    pages = fleet.pages()
    everybody = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert members(pages) == everybody
    undisturbed = Clients(pages.url).finish()
    assert all(len(text.split()) == ANSWER_TOKENS for text in undisturbed)

    clients = Clients(pages.url)
    clients.wait_until_begun()
    cluster.kill_second()
    assert clients.finish() == undisturbed, "no token is missing, repeated or another one"
    until(lambda: len(members(pages)) == 2, "the instances of the dead node are missed")
    left = members(pages)
    assert {name.split("-")[0] for name in left} == {"prefill", "decode"}, "Ray spread both roles over the nodes"
    assert sum(count for _, count in pages.samples("tandem_resumes_total")), "some answers went on elsewhere"
    assert Clients(pages.url).finish() == undisturbed, "what is left serves"

    cluster.add_second()
    until(lambda: members(pages) == everybody, "the instances are back")
    until(pages.is_ready, "the fleet is ready")
    assert Clients(pages.url).finish() == undisturbed
    assert fleet.stop() == 0


def test_an_instance_with_ranks_on_two_nodes_ends_with_either_and_comes_back_as_a_whole(cluster: Cluster, start: Start) -> None:
    fleet = start("--prefill", "1", "--decode", "1", "--nodes-per-instance", "2")
    pages = fleet.pages()
    undisturbed = Clients(pages.url).finish()
    incarnations = {instance["incarnation"] for instance in pages.cluster()["instances"]}
    cluster.kill_second()
    until(lambda: not members(pages), "both have lost a rank, and leave")
    cluster.add_second()
    until(lambda: members(pages) == {"prefill-0", "decode-0"}, "both are back")
    until(pages.is_ready, "the fleet is ready")
    assert not incarnations & {instance["incarnation"] for instance in pages.cluster()["instances"]}
    assert Clients(pages.url).finish() == undisturbed
    assert fleet.stop() == 0
