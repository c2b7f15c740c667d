"""One decode instance with a rank on each of two hosts: its tokens, what a cut between the hosts does, and how it comes back.

The hosts are network namespaces, which only root may make; elsewhere these tests are skipped. KV goes over NIXL and TCP only. The
near host has the router, the prefill instance and rank 0, the far one has rank 1 and nothing else. Greedy, float32, and
transformers in one process is the reference. Every command is started again when it ends, as a supervisor does.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from common.access import write_key
from common.errors import TransferError
from common.processes.child import Exited, Ready, Reported
from demo.evaluate import MODEL
from launch.child import RoleEvent, RoleProcess, launch_command
from tests.e2e.test_ranks import departure
from tests.e2e.test_supervision import PROMPTS, begun
from tests.e2e.test_token_exact import Reference, answers, demo_prompts
from tests.kv_transfer.agents import nixl_kind
from tests.kv_transfer.hosts import Cable, processes_in
from tests.kv_transfer.test_transports import needs
from tests.rig.client import Request, Streams
from tests.rig.namespaces import Spot, inside, two_namespaces
from tests.rig.pages import FleetPages, until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

FLAGS = ("--dtype=float32", "--kv-memory=64MiB", "--threads=1", "--transport=nixl")
LEADER_PORT = 7000
END_S = 60.0
"""Ends the wait for a process. An instance that has lost a rank takes 3 s to notice, and 8 s at most to close."""


class Supervised:
    """A command that is started again whenever it ends by itself. accounts: why its former lives ended."""

    def __init__(self, role: str, flags: Sequence[str], host: Spot) -> None:
        self.accounts: list[str] = []
        self._role, self._command = role, [*host.prefix, *launch_command(role, flags)]
        self._lock, self._stopping = threading.Lock(), False
        self.addresses: dict[str, str] = {}
        self.child = self._start()

    def stop(self) -> None:
        """In order; `ended` waits for it."""
        with self._lock:
            self._stopping = True
            self.child.terminate()

    def ended(self) -> int | None:
        return self.child.status if self.child.wait(END_S) else None

    def kill(self) -> None:
        with self._lock:
            self._stopping = True
            self.child.kill()

    def _start(self) -> RoleProcess:
        return RoleProcess(self._role, self._command, self._heard, nixl_kind(tcp_only=True).environment)

    def _heard(self, event: RoleEvent) -> None:
        """On a thread of the child."""
        if isinstance(event, Reported) and isinstance(event.report, Ready):
            self.addresses.update(event.report.addresses)
        if isinstance(event, Exited):
            with self._lock:
                self.accounts.append(event.account)
                if not self._stopping:
                    self.child = self._start()


class TwoHostFleet(FleetPages):
    """leader, follower: the ranks of the first of the decode instances."""

    def __init__(self, url: str, leader: Supervised, follower: Supervised, decode: Sequence[str]) -> None:
        super().__init__(url)
        self.leader, self.follower, self.decode = leader, follower, decode
        self.names = ["prefill-0", *decode]


@contextlib.contextmanager
def fleet_on(cable: Cable, key: Path | None, decode: Sequence[str]) -> Iterator[TwoHostFleet]:
    """decode: names; the first is the instance on both hosts, others are on the near one. This thread is on the near host
    meanwhile."""
    trust = f"--cluster-key={key}" if key else "--insecure=on"
    started: list[Supervised] = []

    def start(role: str, host: Spot, *flags: str) -> Supervised:
        started.append(Supervised(role, [f"--host={host.host}", *flags], host))
        return started[-1]

    near, far = cable.near, cable.far
    with inside(near.name):
        try:
            control = [trust] if key is None else [trust, "--insecure=on"]  # for HTTP, which has no keys here
            router = start("router", near, "--port=0", "--control-port=0", *control)
            until(lambda: "http" in router.addresses, "the router serves")
            common = [*FLAGS, trust, f"--router={router.addresses['control']}"]
            ranks = ["--tp=2", f"--leader=tcp://{near.host}:{LEADER_PORT}", f"--name={decode[0]}"]
            start("prefill", near, *common, "--name=prefill-0")
            leader = start("decode", near, *common, *ranks, "--rank=0")
            follower = start("decode", far, *common, *ranks, "--rank=1")
            for name in decode[1:]:
                start("decode", near, *common, f"--name={name}")
            yield TwoHostFleet(router.addresses["http"], leader, follower, decode)
            for several in (started[1:], [router]):
                for each in several:
                    each.stop()
                assert [each.ended() for each in several] == [0] * len(several)
        finally:
            cable.heal()
            for each in started:
                each.kill()
                each.ended()
    assert not processes_in(near) + processes_in(far), "a process is left"


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    needs("nixl")
    try:
        with two_namespaces() as (near, far):
            yield Cable(near, far)
    except TransferError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model() -> Reference:
    return Reference.load(MODEL)


def check_tokens(model: Reference, fleet: TwoHostFleet, seed: int) -> None:
    """The answers are those of one process, and all KV was pushed."""
    prompts = demo_prompts(10, 1000, seed)
    for prompt, answer in zip(prompts, answers(fleet, prompts), strict=True):
        assert answer == model.greedy(prompt, answer), prompt
    fleet.wait_until_home(fleet.names)
    decode = [fleet.members()[name] for name in fleet.decode]
    assert len(decode[0]["ranks"]) == 2
    assert decode[0]["counters"]["bytes_received"] > 0
    assert not any(each["counters"]["prompt_tokens_computed"] for each in decode)


def check_the_end(fleet: TwoHostFleet, life: str) -> None:
    """Rank 1 is named, and rank 0 has ended and was started again."""
    reason = departure(fleet, life)
    assert reason.startswith("rank 1 (pid ") and "has been silent for 3" in reason
    until(lambda: len(fleet.leader.accounts) > 0, "rank 0 has ended")
    assert reason in fleet.leader.accounts.pop(), "it says so itself"


def check_return(model: Reference, fleet: TwoHostFleet, seed: int) -> None:
    fleet.wait_until_whole(*fleet.names)
    assert len(fleet.follower.accounts) == 1
    account = fleet.follower.accounts.pop()  # one that was stopped may read first why the others have ended, and be late to close
    assert "rank 0 at tcp://" in account or "the instance has ended: rank 1 (pid " in account
    check_tokens(model, fleet, seed)


def test_what_runs_goes_on_elsewhere_when_the_hosts_of_an_instance_are_cut_apart_and_it_comes_back(
    model: Reference, cable: Cable, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    write_key(str(key))
    with fleet_on(cable, key, ["decode-0", "decode-1"]) as fleet:
        fleet.wait_until_whole(*fleet.names)
        check_tokens(model, fleet, seed=1)
        expected = begun(fleet).end()
        streams = begun(fleet)
        assert fleet.members()["decode-0"]["assigned_tokens"] > 0
        life = fleet.members()["decode-0"]["incarnation"]
        cable.drop()
        check_the_end(fleet, life)
        assert streams.end() == expected
        assert len(answers(fleet, demo_prompts(4, 200, seed=2))) == 4, "the others serve"
        cable.heal()
        check_return(model, fleet, seed=3)


def test_clients_are_told_when_nobody_is_left_and_the_instance_comes_back(model: Reference, cable: Cable) -> None:
    with fleet_on(cable, None, ["decode-0"]) as fleet:
        fleet.wait_until_whole(*fleet.names)
        check_tokens(model, fleet, seed=4)
        streams = Streams(fleet.url, fleet.model(), [Request.completion(prompt, 500, ignore_eos=True) for prompt in PROMPTS])
        streams.wait_until_begun()
        life = fleet.members()["decode-0"]["incarnation"]
        cable.drop()
        check_the_end(fleet, life)
        for answer in streams.wait_until_over():
            assert answer.errors[0].startswith("error event") and answer.choices[0].finish_reason is None, answer
        late = fleet.post("/v1/completions", {"model": fleet.model(), "prompt": PROMPTS[0], "max_tokens": 4})
        assert late.status == 503 and late.json()["error"]["message"], late
        cable.heal()
        check_return(model, fleet, seed=5)


def test_an_instance_whose_far_rank_is_stopped_ends_and_comes_back_when_the_rank_goes_on(model: Reference, cable: Cable) -> None:
    """Nobody can kill it from here, and Gloo leaves no group whose rank is stopped in the middle of a sum."""
    with fleet_on(cable, None, ["decode-0", "decode-1"]) as fleet:
        fleet.wait_until_whole(*fleet.names)
        streams = begun(fleet)
        assert fleet.members()["decode-0"]["assigned_tokens"] > 0
        life = fleet.members()["decode-0"]["incarnation"]
        os.kill(fleet.follower.child.pid, signal.SIGSTOP)
        check_the_end(fleet, life)
        streams.end()
        os.kill(fleet.follower.child.pid, signal.SIGCONT)
        check_return(model, fleet, seed=6)
