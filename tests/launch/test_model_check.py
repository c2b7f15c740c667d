"""What can be told of a model and its flags at once is told at once: in one line, with the same exit status by every command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch.child import BAD_FLAG

ALL = ("local", "prefill", "router")
COMPUTING = ("local", "decode")


def refused(command: str, *flags: str) -> str:
    """What a command that ends with BAD_FLAG says, but for what it does meanwhile."""
    ports = ["--port=0", "--control-port=0"] if command in ("local", "router") else []
    done = subprocess.run(
        [sys.executable, "-m", "launch.main", command, *ports, *flags], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == BAD_FLAG, done.stderr
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line != "router: loading the tokenizer"]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("command", ALL)
def test_a_model_that_is_not_there_is_one_line_and_one_status(command: str) -> None:
    said = refused(command, "--model=/no/such/folder")
    assert "--model '/no/such/folder': there is no such folder" in said


@pytest.mark.parametrize("command", COMPUTING)
def test_ranks_that_cannot_divide_the_model_are_refused_before_any_is_started(command: str) -> None:
    said = refused(command, "--tp=3", "--device=cpu")
    assert "--tp 3 cannot divide this Qwen3ForCausalLM: it has 4 attention heads; what works is 1, 2, 4" in said


@pytest.mark.parametrize("command", COMPUTING)
def test_fp8_on_a_cpu_is_refused_with_what_a_cpu_can_do(command: str) -> None:
    said = refused(command, "--quantization=fp8", "--device=cpu")
    assert "--quantization fp8 needs a GPU" in said and said.endswith("give --quantization int8")


def test_a_model_of_transformers_on_several_ranks_is_refused_without_importing_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    assert "--tp 2 is not supported for GPT2LMHeadModel" in refused("local", f"--model={tmp_path}", "--tp=2")


def test_the_check_is_cheap_to_import() -> None:
    program = "import sys, launch.instance_command; assert not {'torch', 'transformers', 'zmq', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
