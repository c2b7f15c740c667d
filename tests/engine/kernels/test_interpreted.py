"""The Triton kernels agree with their references when they are interpreted on CPU. The tests are in `interpreted.py`."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from engine.backends import make_kernels
from engine.torch_kernels import Kernels


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton, which is there with torch for CUDA")
def test_interpreted_triton_kernels_fulfil_the_contract() -> None:
    tests = Path(__file__).with_name("interpreted.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--timeout=200", str(tests)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, env=environment | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout and "skipped" not in done.stdout


def test_a_cpu_gets_kernels_that_need_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # to import it would fail
    assert isinstance(make_kernels(torch.device("cpu")), Kernels)
