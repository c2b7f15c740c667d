"""How a real instance ends when it is idle, or because one of its threads failed. The test is its router and detokenizer.

Whatever happens, the router is told, the process is gone soon, and nothing is left of it. `tests/e2e/test_supervision.py` has
instances that serve when they are told to stop, told twice, or killed.

What can be told of a model and its flags at once is told at once: in one line, with the same exit status by every command.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.processes.child import Broken
from launch.child import BAD_FLAG
from launch.instance_process import CLOSE_S
from tests.launch.failing_instance import NAME
from tests.launch.one_router import HANG_S, Router
from tests.rig.forks import run_module


@pytest.fixture
def join() -> Iterator[Callable[[str], Router]]:
    made: list[Router] = []

    def start(which: str) -> Router:
        made.append(Router(NAME, lambda router: [sys.executable, "-m", "tests.launch.failing_instance", which, router]))
        made[-1].until_joined()
        return made[-1]

    yield start
    for router in made:
        router.close()


@pytest.mark.parametrize(("which", "what"), [("engine", "the device"), ("transfer", "the network card")])
def test_a_thread_that_fails_takes_its_instance_down_in_order(join: Callable[[str], Router], which: str, what: str) -> None:
    router = join(which)
    router.generate(20)
    ended = router.end(HANG_S)
    assert ended.status == 1
    assert f"{what} fell off the bus" in ended.account
    assert isinstance(router.child.last_report, Broken), "it could say why"


def test_what_cannot_be_closed_does_not_keep_the_process_alive_and_the_router_is_told_before(
    join: Callable[[str], Router],
) -> None:
    router = join("stuck")
    router.generate(20)
    router.until(lambda: bool(router.goodbyes), "the router is told", HANG_S)
    assert router.child.status is None
    ended = router.end(CLOSE_S + HANG_S)
    assert ended.status == 1
    assert "closing took longer" in ended.account and "the network card fell off the bus" in ended.account


def test_an_idle_instance_that_is_told_to_stop_is_drained_at_once(join: Callable[[str], Router]) -> None:
    router = join("nothing")
    assert router.info is not None and router.info.verifies_pages, "as it was told"
    router.child.terminate()
    assert router.end(HANG_S).status == 0


def refused(command: str, *flags: str) -> str:
    """What a command that ends with BAD_FLAG says, but for what it does meanwhile."""
    ports = ["--port=0", "--control-port=0"] if command in ("local", "router") else []
    done = run_module("launch.main", command, *ports, *flags)
    assert done.returncode == BAD_FLAG, done.stderr
    lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.endswith(": loading the tokenizer")]
    assert len(lines) == 1, lines
    return lines[0]


NO_FOLDER = "--model '/no/such/folder': there is no such folder"
NO_DIVISION = "--tp 3 cannot divide this Qwen3ForCausalLM: it has 4 attention heads; what works is 1, 2, 4"
NO_FP8 = r"--quantization fp8 needs a GPU.*give --quantization int8$"


@pytest.mark.parametrize(
    ("flags", "commands", "said"),
    [
        (["--model=/no/such/folder"], ("local", "prefill", "router"), re.escape(NO_FOLDER)),
        (["--tp=3", "--device=cpu"], ("local", "decode"), re.escape(NO_DIVISION)),
        (["--quantization=fp8", "--device=cpu"], ("local", "decode"), NO_FP8),
        (["--kv-memory=409600GiB", "--device=cpu"], ("local", "decode"), "--kv-memory 409600GiB is more than cpu has, which is"),
        (["--device=cuda:99"], ("local", "decode"), "--device cuda:99: this host has [0-9]+ CUDA devices"),
        (["--attention=flashinfer", "--device=cpu"], ("local", "decode"), "--attention flashinfer needs a GPU"),
    ],
)
def test_what_can_never_work_is_one_line_and_one_status_of_every_command(
    flags: list[str], commands: tuple[str, ...], said: str
) -> None:
    for command in commands:
        assert re.search(said, refused(command, *flags)), command


def test_a_model_of_transformers_on_several_ranks_is_refused_without_importing_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    assert "--tp 2 is not supported for GPT2LMHeadModel" in refused("local", f"--model={tmp_path}", "--tp=2")


def test_a_model_of_transformers_with_int8_weights_is_refused_without_importing_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}))
    said = refused("local", f"--model={tmp_path}", "--quantization=int8", "--device=cpu")
    assert "--quantization int8 is not supported for Gemma3ForCausalLM, only for Tandem's own decoders" in said


def test_the_check_is_cheap_to_import() -> None:
    program = "import sys, launch.instance_command; assert not {'torch', 'transformers', 'zmq', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
