"""The console script: its commands, its help, and that help is quick because nothing heavy is imported for it.

Also `launch simulate` from its command line to its report. What a simulation finds is tested in tests/simulation.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from common.errors import INTERRUPTED
from launch.child import BAD_FLAG
from launch.main import build_parser, main
from launch.simulate import SimulateOutcome, report
from simulation.run import Simulation
from tests.rig.forks import run_module

HEAVY = ("torch", "transformers", "fastapi", "numpy", "zmq", "uvicorn", "nixl", "safetensors", "tokenizers")
LOOK = (
    "import json, sys\n"
    "from launch.main import build_parser\n"
    "build_parser().format_help()\n"
    "print(json.dumps(sorted(sys.modules)))\n"
)
MASKS = """
import glob, re, sys
import launch.instance_command
from launch.main import main

def look(*_, **__):
    for path in glob.glob("/proc/self/task/*/status"):
        print(re.search("SigBlk:(.*)", open(path).read())[1])
    sys.exit()

launch.instance_command.check_model = look
main(["local", "--device=cpu"])
"""


def test_no_thread_of_a_library_takes_the_signals_that_stop_a_fleet() -> None:
    """The main thread waits, and would not hear of them: Ctrl-C would do nothing."""
    done = subprocess.run([sys.executable, "-c", MASKS], capture_output=True, text=True, timeout=60, check=True)
    masks = [int(mask, 16) for mask in done.stdout.split()]
    stops = 1 << signal.SIGINT - 1 | 1 << signal.SIGTERM - 1
    assert masks and all(mask & stops == stops for mask in masks)


def test_the_parser_is_built_without_heavy_imports() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=60, check=True)
    assert not set(json.loads(done.stdout)).intersection(HEAVY)


def test_help_lists_the_commands_that_people_use_and_no_other() -> None:
    text = build_parser().format_help()
    for command in ("local", "ray", "router", "prefill", "decode", "chat", "simulate", "key", "bench"):
        assert f"    {command} " in text
    for hidden in ("detokenizer", "==SUPPRESS=="):
        assert hidden not in text


def test_the_module_and_its_help_can_be_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launch.main", "local", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "--prefill N" in done.stdout and "--kv-memory" in done.stdout and "--startup-timeout-s" in done.stdout
    assert "--drain-timeout-s" in done.stdout and "--verify-pages [{off,on}]" in done.stdout
    assert "started again" in done.stdout and "SIGTERM" in done.stdout, "how a fleet lives on is said where it is started"


@pytest.mark.parametrize("flag", ["--router", "--name", "--inbox-port", "--rank", "--leader"])
def test_what_launch_local_decides_itself_is_no_flag_of_it(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["local", flag, "x"])
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["local", "--prefil", "2"], "launch local: --prefil is not a flag of this command; did you mean --prefill?"),
        (["bench", "serve", "--request-rat=3"], "launch bench serve: --request-rat is not a flag of this command; did you mean"),
        (["locl"], "did you mean local?"),
        (["bench", "serv"], "did you mean serve?"),
        (["local", "--dispatch", "colocate"], "one of auto, colocated, conditional; it is 'colocate'; did you mean colocated?"),
        (["local", "--prefill", "x"], "argument --prefill: invalid int value: 'x'"),
        (["local", "now"], "launch local: unexpected argument now; did you mean --model now?"),
        (["top", "now"], "launch top: unexpected argument now (see"),
        (["local", "--tensor-parallel-size", "2"], "is not a flag of this command; its name here is --tp ("),
        (["router", "--tp-size=2"], "is not a flag of this command; its name here is --tp, a flag of launch local ("),
        (["decode", "--gpu-memory-utilization=0.9"], "use --kv-memory, such as --kv-memory 80%, which counts the KV pages alone"),
        (["serve", "demo"], "launch: there is no command serve; did you mean launch local --model MODEL?"),
        (["bench"], "the following arguments are required: WHAT"),
        ([], "the following arguments are required: COMMAND"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_refused_in_one_line_with_the_nearest_right_one(
    line: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(line)
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said in error and error.count("\n") == 1 and "usage" not in error and "detokenizer" not in error


TWO = "speculative-config = '{\"method\": \"ngram\"}'\n[decode]\nspeculative-algorithm = 'NGRAM'"
BOTH = "--speculative-config must be left out with --speculative-algorithm"
NO_FOLDER = "launch local: --speculative-config: the draft model: --model '/nowhere': there is no such folder"


@pytest.mark.parametrize(
    ("line", "file", "said"),
    [
        (["decode"], TWO, f"launch decode: {BOTH}"),
        (["local"], TWO, f"launch local: [decode] {BOTH}"),
        (["prefill", "--speculative-algorithm=NGRAM"], "speculative-config = '{}'", f"{BOTH}; it is '{{}}' (--spec"),
        (["both", "--speculative-num-draft-tokens=-1"], 'speculative-algorithm = "NGRAM"', "must be from 0 to 32; it is -1"),
        (["local"], "[decode]\nspeculative-config = '{\"model\": \"/nowhere\"}'", NO_FOLDER),
        (["local", "--executor=timed"], "speculative-config = '{\"model\": \"demo\"}'", "so no draft model or head either"),
    ],
)  # fmt: skip
def test_how_tokens_are_drafted_is_refused_before_anything_is_started(
    line: list[str], file: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "fleet.toml").write_text(file)
    done = run_module("launch.main", *line, f"--config={tmp_path / 'fleet.toml'}")
    assert done.returncode == 2
    assert said in done.stderr and "ready" not in done.stderr and not done.stdout


def test_the_command_that_only_a_router_gives_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["detokenizer", "--of", "router-0"])
    assert capsys.readouterr().err.startswith("launch detokenizer: the following arguments are required: --shard")


def test_the_version_and_what_an_exit_status_means_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert re.fullmatch(r"launch \(tandem-serve\) \S.*\n", capsys.readouterr().out)
    assert "2 for a flag, file or model that cannot work" in " ".join(build_parser().format_help().split())


def test_a_new_key_is_explained_for_both_of_its_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", str(tmp_path / "key")]) == 0
    said = capsys.readouterr().out
    assert "every host" in said and "--cluster-key FILE" in said
    assert "a second file" in said and "--control-key FILE" in said


def test_a_message_that_names_launch_says_where_it_is_when_the_shell_would_not_find_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = tmp_path / "launch"
    ours.touch(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    refused, no_launch = ["router", "--host", "10.0.0.1", "--model", "demo"], ["router", "--port", "99999"]
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(refused) == 2
    assert f"`launch` is not on PATH: it is {ours}; or run `source {tmp_path}/activate`" in capsys.readouterr().err
    assert main(no_launch) == 2 and "PATH" not in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(refused) == 2 and "not on PATH" not in capsys.readouterr().err


SMALL = ["simulate", "--requests=8", "--rate=20", "--mean-input=300", "--mean-output=5", "--heartbeat-s=0.25"]


def test_the_report_is_printed_and_its_figures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert main([*SMALL, f"--json={file}"]) == 0
    outcome = msgspec.json.decode(file.read_bytes(), type=SimulateOutcome)
    assert outcome.found.endings == {"finished: length": 8}
    assert outcome.command == " ".join(["launch simulate", *sorted_as_given(file)])
    assert capsys.readouterr().out == report(outcome, markdown=False) + "\n"
    for heading in ("Requests:", "Time, ms:", "Instances:", "Control plane:", "CPU of this machine"):
        assert heading in report(outcome, markdown=False)
    assert f"```sh\n{outcome.command}\n```" in report(outcome, markdown=True)


def sorted_as_given(file: Path) -> list[str]:
    """In the order of the fields."""
    return ["--rate=20.0", "--requests=8", "--mean-input=300", "--mean-output=5", f"--json={file}", "--heartbeat-s=0.25"]


def test_ctrl_c_ends_a_simulation_with_the_report_of_what_it_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Simulation.run

    def cut(simulation: Simulation, progress: Callable[[str], object]) -> None:
        simulation.fleet.clock.at(simulation.began_s + 0.3, simulation.stop)
        whole(simulation, progress)
        raise KeyboardInterrupt

    monkeypatch.setattr(Simulation, "run", cut)
    assert main([*SMALL, "--requests=1000"]) == INTERRUPTED
    said = capsys.readouterr()
    assert "stopped: the report is of the first 0 simulated seconds" in said.err and "requests" in said.out


def test_ctrl_c_ends_a_command_with_a_line_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("launch.chat.run", stopped)
    assert main(["chat"]) == INTERRUPTED
    assert capsys.readouterr().err == "\nlaunch chat: stopped\n"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--decode=0"], "--decode must be at least 1"),
        (["--rate=0"], "--rate must be above 0"),
        (["--step-cost=0,0,0"], "a step must take some time"),
        (["--kv-token-bytes=3"], "--kv-token-bytes must be even"),
        (["--trace=/nowhere.jsonl"], "--trace: /nowhere.jsonl cannot be read"),
        *(
            (["--trace=/nowhere.jsonl", flag], f"{flag.split('=')[0]} has no effect with --trace")
            for flag in ("--rate=9", "--requests=5", "--mean-input=9", "--mean-output=9", "--lengths=constant", "--arrivals=even")
        ),
        (["--speed=7"], "--speed has no effect without --trace"),
        (["--trace=/nowhere.jsonl", "--turns=2"], "--turns has no effect with --trace"),
        (["--think-s=1"], "--think-s has no effect without --turns"),
        (["--long-input=9"], "--long-input has no effect without --long-share"),
        (["--long-share=1.5"], "--long-share must be between 0 and 1"),
        (["--restart-s=1"], "--restart-s has no effect without --kill-every-s"),
    ],
)
def test_what_cannot_be_simulated_is_named(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags]) == BAD_FLAG
    assert complaint in capsys.readouterr().err
