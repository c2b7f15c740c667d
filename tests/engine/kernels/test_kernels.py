"""Which kernels a device gets, what is missed on a host that cannot compile them, and that each fulfils the contract."""

import os
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from engine import backends as choice
from engine.backends import make_kernels
from engine.torch_kernels import Kernels
from tests.engine.kernels.contract import KernelsContract

CARD = torch.device("cuda:0")


def test_a_compiler_that_triton_would_miss_at_the_first_step_is_named_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cc").touch(mode=0o755)  # Triton does not look for it
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setattr(choice, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=r"no C compiler and no Python\.h here: install gcc .*; .*python3-dev"):
        choice.make_kernels(CARD)
    (tmp_path / "gcc").touch(mode=0o755)
    with pytest.raises(ConfigError, match=r"there is no Python\.h here"):
        choice.make_kernels(CARD)
    (tmp_path / "gcc").unlink()
    (tmp_path / "Python.h").touch()
    for asked in ("", "icx", f"{tmp_path}/cc -O2"):
        monkeypatch.setenv("CC", asked)
        with pytest.raises(ConfigError, match="there is no C compiler here"):
            choice.make_kernels(CARD)
    monkeypatch.setenv("CC", f"{tmp_path}/cc")
    pytest.importorskip("triton", reason="needs the package triton, which is there with torch for CUDA")
    assert type(choice.make_kernels(CARD)).__name__ == "TritonKernels"


def test_a_card_without_triton_computes_with_torch_and_says_that_it_is_slower(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert type(choice.make_kernels(CARD)) is Kernels
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "slower" in caplog.text


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


class TestKernels(KernelsContract):
    kernels = Kernels()
