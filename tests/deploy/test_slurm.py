"""The Slurm script, run with stubs of Slurm's commands and of `launch`: what it starts where, and how it ends."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.commands import calls_of, note_call, read_command, write_program
from tests.launch.waiting import PATIENCE_S, wait_for

SCRIPT = Path(__file__).parents[2] / "deploy/slurm/tandem.sbatch"
ADDRESSES = {"node-1": "10.0.0.1", "node-2": "10.0.0.2"}


class Job:
    """The script as a process, with what it writes to stderr in a file."""

    def __init__(self, errors: Path, environment: dict[str, str]) -> None:
        self._errors = errors
        with errors.open("w") as file:
            self._process = subprocess.Popen(["bash", str(SCRIPT)], env=environment, stderr=file)

    def terminate(self) -> None:
        self._process.terminate()

    def status(self) -> int:
        """When it has ended."""
        return self._process.wait(PATIENCE_S)

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def end(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)


Start = Callable[..., Job]


@pytest.fixture
def start(programs: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Start:
    """Start the script in a job of two nodes with settings."""
    write_program(programs / "scontrol", "printf '%s\\n' node-1 node-2")
    write_program(
        programs / "srun",
        'for w; do case $w in --nodelist=*) export NODE=${w#*=};; --*) ;; *) break;; esac; shift; done; exec "$@"',
    )
    write_program(programs / "hostname", 'echo "10.0.0.${NODE#node-} 192.168.0.${NODE#node-}"')

    def run(**settings: str) -> Job:
        own = {"SLURM_JOB_NODELIST": "node-[1-2]", "MODEL": "demo", "KEYS": str(tmp_path / "keys")}
        job = Job(tmp_path / "errors", os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"} | own | settings)
        request.addfinalizer(job.end)
        return job

    return run


def fleet_of(programs: Path) -> dict[str, tuple[str, list[str]]]:
    """Each part that was started, with its node and GPUs and with its words."""
    found = {}
    for where, *words in calls_of(programs):
        if words[0] != "key":
            names = [word.removeprefix("--name=") for word in words if word.startswith("--name=")]
            found[names[0] if names else words[0]] = (where, words)
    return found


def test_a_job_starts_the_router_and_the_instances_on_the_gpus_of_its_nodes_in_order(start: Start, programs: Path) -> None:
    write_program(programs / "launch", 'set -- "$NODE:$CUDA_VISIBLE_DEVICES" "$@"\n' + note_call(programs))
    script = start(
        GPUS="2",
        PREFILL="1",
        DECODE="3",
        DECODE_FLAGS="--max-running 128 --page-size 32",
        CUDA_VISIBLE_DEVICES="",
        PREFILL_TP="1",
        DECODE_TP="1",
    )
    assert script.status() == 0
    fleet = fleet_of(programs)
    places = {name: where for name, (where, _) in fleet.items() if name != "router"}
    assert places == {"prefill-0": "node-1:0", "decode-0": "node-1:1", "decode-1": "node-2:0", "decode-2": "node-2:1"}
    commands = {name: read_command(words) for name, (_, words) in fleet.items()}
    router = commands["router"].router
    for name, (where, _) in fleet.items():
        assert commands[name].flags.host == ADDRESSES[where.split(":")[0]] and commands[name].flags.cluster_key
        assert name == "router" or commands[name].instance.routers == (f"tcp://10.0.0.1:{router.control_port}",)
    assert commands["decode-2"].flags.max_running == 128 and commands["decode-2"].flags.page_size == 32


def test_ranks_share_a_node_when_they_fit_and_take_whole_nodes_otherwise(start: Start, programs: Path) -> None:
    write_program(programs / "launch", 'set -- "$NODE:$CUDA_VISIBLE_DEVICES" "$@"\n' + note_call(programs))
    assert start(GPUS="4", PREFILL_TP="2", DECODE="0").status() == 0
    (where, words) = fleet_of(programs)["prefill-0"]
    assert where == "node-1:0,1" and read_command(words).instance.ranks == range(2)
    (programs / "calls").unlink()
    assert start(GPUS="4", PREFILL="0", DECODE_TP="8").status() == 0
    parts = {where: read_command(words).instance for where, *words in calls_of(programs) if words[0] == "decode"}
    assert {where: part.ranks for where, part in parts.items()} == {"node-1:0,1,2,3": range(4), "node-2:0,1,2,3": range(4, 8)}
    assert {part.leader for part in parts.values()} == {"tcp://10.0.0.1:8100"}


def test_outside_of_a_job_it_names_sbatch_and_makes_no_keys(start: Start, programs: Path, tmp_path: Path) -> None:
    write_program(programs / "launch", note_call(programs))
    script = start(SLURM_JOB_NODELIST="")
    assert script.status() == 2 and re.fullmatch(
        r"this runs in a Slurm job: start it with MODEL=\.\.\. sbatch .*\n", script.errors
    )
    assert not (tmp_path / "keys").exists() and not (programs / "calls").exists()


def test_a_job_without_enough_gpus_says_which_instance_has_no_place(start: Start) -> None:
    script = start(GPUS="8", PREFILL="1", DECODE="2")
    assert script.status() == 2 and "decode-1" in script.errors


def test_ranks_that_do_not_fill_whole_nodes_are_refused_before_anything_starts(start: Start, programs: Path) -> None:
    write_program(programs / "launch", note_call(programs))
    script = start(GPUS="4", PREFILL="0", PREFILL_TP="3", DECODE_TP="6")
    assert script.status() == 2 and "decode: 6 ranks do not fill whole nodes of 4 GPUs" in script.errors
    assert not (programs / "calls").exists()


def test_a_job_whose_router_cannot_run_ends_with_its_instances(start: Start, programs: Path) -> None:
    stops = "trap 'kill $!; exit 0' TERM; sleep 600 & wait"
    write_program(programs / "launch", f"case $1 in router) exit 2;; prefill|decode) {stops};; esac")
    script = start()
    assert script.status() == 2 and "router cannot run as it was started" in script.errors


def test_keys_that_are_there_are_kept_and_api_keys_are_made_for_their_owner_alone(
    start: Start, programs: Path, tmp_path: Path
) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys/cluster.key").touch()
    assert start().status() == 0
    assert [words for words in calls_of(programs) if words[0] == "key"] == [["key", str(tmp_path / "keys/control.key")]]
    api_keys = tmp_path / "keys/api.keys"
    assert re.fullmatch(r"default [0-9a-f]{48}\n", api_keys.read_text()) and api_keys.stat().st_mode & 0o77 == 0


def test_what_fails_is_started_again_but_not_what_cannot_run(start: Start, programs: Path) -> None:
    ends = f'case "$1 $(grep -c "^$1" {programs}/calls)" in "prefill 1") exit 1;; decode*) exit 2;; esac'
    write_program(programs / "launch", note_call(programs) + f"\n{ends}")
    script = start()
    assert script.status() == 0
    assert sorted(words[0] for words in calls_of(programs) if words[0] != "key") == ["decode", "prefill", "prefill", "router"]
    assert "prefill-0 on node-1 ended with status 1" in script.errors and "decode-0 on node-2 cannot run" in script.errors


def test_term_drains_the_router_before_the_instances(start: Start, programs: Path) -> None:
    stop = f"""trap 'printf "stop\\t$1\\n" >> {programs}/calls; kill $!; exit 0' TERM"""
    write_program(programs / "launch", "\n".join(["sleep 600 &", stop, note_call(programs), "[ $1 != key ] || kill $!", "wait"]))
    script = start()
    wait_for(lambda: (programs / "calls").exists() and len(calls_of(programs)) == 5, "two keys and three processes")
    script.terminate()
    assert script.status() == 0
    stops = [words[1] for words in calls_of(programs) if words[0] == "stop"]
    assert stops[0] == "router" and sorted(stops[1:]) == ["decode", "prefill"]
