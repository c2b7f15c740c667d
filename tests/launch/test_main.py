"""The console script: its commands, its help, and that help is quick because nothing heavy is imported for it."""

import json
import subprocess
import sys

import pytest

from launch.main import build_parser

HEAVY = ("torch", "transformers", "fastapi", "numpy", "zmq", "uvicorn", "nixl", "safetensors", "tokenizers")
LOOK = (
    "import json, sys\n"
    "from launch.main import build_parser\n"
    "build_parser().format_help()\n"
    "print(json.dumps(sorted(sys.modules)))\n"
)


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


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        build_parser().parse_args([])
    assert stopped.value.code == 2
    assert "COMMAND" in capsys.readouterr().err
