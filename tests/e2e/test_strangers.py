"""A real router with a cluster key, as strangers meet it: an instance with another key and one with none, beside a member."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from common.access import LOOPBACK_ONLY, Trust, read_key, write_key
from common.ids import ROUTER, InstanceId
from common.mail import Mailbox
from common.messages import DecodeInbox, Goodbye, Register, Welcome
from common.text.tokenizer_manager import TokenizerManager
from launch.main import main
from tests.builders import instance
from tests.rig.pages import FleetPages
from tests.router.fakes import beat

PATIENCE_S = 30.0


@dataclass(frozen=True)
class Router:
    pages: FleetPages
    control: str
    key_file: Path
    pid: int

    def refused(self, *reasons: str) -> float:
        """Which of the two ends sees first that only one of them has a key decides between `no key` and `handshake`."""
        samples = self.pages.samples("tandem_router_frames_refused_total")
        return sum(count for labels, count in samples if labels["reason"] in reasons)

    def members(self) -> list[str]:
        return [member["id"] for member in self.pages.cluster()["instances"]]


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    key_file, log = tmp_path / "key", tmp_path / "log"
    assert main(["key", str(key_file)]) == 0
    flags = ["--port=0", "--control-port=0", f"--cluster-key={key_file}"]
    with log.open("w") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "launch.main", "router", *flags], stdout=subprocess.PIPE, stderr=output, text=True
        )
    with child:
        try:
            assert child.stdout is not None
            ready = child.stdout.readline()
            assert ready.startswith("router: ready, http "), log.read_text()
            http, control = (address.split()[1] for address in ready.removeprefix("router: ready, ").split(","))
            yield Router(FleetPages(http), control, key_file, child.pid)
        finally:
            child.terminate()
            assert child.wait(PATIENCE_S) == 0
    said = log.read_text()
    assert "wrong key" in said
    assert key_file.read_text().strip() not in said


class Instance:
    """Says that it is a decode instance, again and again."""

    def __init__(self, name: str, router: Router, trust: Trust) -> None:
        plain = instance(name, "decode")
        self.mailbox: Mailbox[DecodeInbox] = Mailbox(InstanceId(name), DecodeInbox, "tcp://127.0.0.1:0", trust=trust)
        model = msgspec.structs.replace(plain.model, vocab_size=TokenizerManager("demo").vocab_size)
        self.info = msgspec.structs.replace(plain, inbox=self.mailbox.address, model=model)
        self.welcomes = 0
        self.mailbox.route(ROUTER, router.control)

    def turn(self) -> None:
        self.mailbox.send(ROUTER, beat(self.info) if self.welcomes else Register(instance=self.info))
        self.mailbox.wait(0.05)
        self.welcomes += sum(isinstance(message, Welcome) for _, message in self.mailbox.receive())


def test_strangers_are_refused_and_counted_and_the_fleet_goes_on(router: Router, tmp_path: Path) -> None:
    write_key(str(tmp_path / "other"))
    member = Instance("member", router, Trust(read_key(str(router.key_file))))
    thief = Instance("thief", router, Trust(read_key(str(tmp_path / "other"))))
    plain = Instance("plain", router, LOOPBACK_ONLY)
    with closing(member.mailbox), closing(thief.mailbox), closing(plain.mailbox):
        deadline = time.monotonic() + PATIENCE_S
        while not (member.welcomes > 3 and router.refused("wrong key") and router.refused("no key", "handshake")):
            assert time.monotonic() < deadline, router.pages.get("/metrics").text
            for each in (thief, plain, member):
                each.turn()
        assert router.members() == ["member"]
        assert thief.welcomes == plain.welcomes == 0
        member.mailbox.send(ROUTER, Goodbye(id=member.info.id, incarnation=member.info.incarnation))
    secret = router.key_file.read_text().strip()
    assert secret not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
