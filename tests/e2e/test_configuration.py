"""A real fleet whose flags come from a file, variables and the command line: its processes have what holds, each role its own."""

import os
import re
import signal
from pathlib import Path

from tests.rig.forks import module_process
from tests.rig.pages import FleetPages, Json, until

FILE = """
executor = "timed"
step-cost = "0.002,0,0"
kv-memory = "16MiB"
max-running = 32
max-waiting = 3

[local]
port = 1
control-port = 0
decode = 9

[router]
max-requests = 77
drain-timeout-s = 3.5

[decode]
max-running = 8
"""
VARIABLES = {"TANDEM_PORT": "0", "TANDEM_MAX_WAITING": "55", "TANDEM_DECODE": "7", "TANDEM_MAX_ATTEMPTS": "5"}


def test_a_fleet_is_what_file_variables_and_command_line_say_together(tmp_path: Path) -> None:
    file, out = tmp_path / "fleet.toml", tmp_path / "out"
    file.write_text(FILE)
    environment = {**os.environ, **VARIABLES, "TANDEM_CONFIG": str(file)}
    with out.open("w") as output:
        files = (os.open(os.devnull, os.O_RDONLY), output.fileno(), output.fileno())
        fleet = module_process(["launch.main", "local", "--decode=1"], environment, files)
    try:
        until(lambda: fleet.poll() is not None or "\ncurl " in out.read_text(), "the fleet is ready")
        assert fleet.poll() is None, out.read_text()
        pages = FleetPages(re.findall(r"^curl (http://[^/]+)", out.read_text(), re.MULTILINE)[0])
        members = pages.members()
        assert {name: member["max_running"] for name, member in members.items()} == {"prefill-0": 32, "decode-0": 8}
        assert pages.complete("falcon", 5)["choices"][0]["finish_reason"] == "length"
        flags = {name: flags_of(pid_of(member)) for name, member in members.items()}
        assert all("--max-waiting=55" in each and "--drain-timeout-s=3.5" not in each for each in flags.values())
        killed = pid_of(members["decode-0"])
        os.kill(killed, signal.SIGKILL)
        until(lambda: pid_of(pages.members().get("decode-0", members["decode-0"])) != killed, "it is back")
        again = pages.members()["decode-0"]
        assert again["max_running"] == 8 and flags_of(pid_of(again)) == flags["decode-0"]
        (router,) = [flags_of(pid) for pid in children_of(fleet.pid) if "router" in flags_of(pid)]
        assert {"--port=0", "--max-requests=77", "--drain-timeout-s=3.5", "--max-attempts=5"} <= set(router)
        assert not any(flag.startswith("--config") for each in (router, *flags.values()) for flag in each)
    finally:
        fleet.send_signal(signal.SIGINT)
        until(lambda: fleet.poll() is not None, "the fleet has ended")
    assert fleet.poll() == 0, out.read_text()


def pid_of(member: Json) -> int:
    pid: int = member["ranks"][0]["pid"]
    return pid


def flags_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def children_of(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
