"""Where an engine computes; and the contract of an engine on the CPU, which cards run in tests/gpu/test_engine.py."""

import warnings

import pytest
import torch
from _pytest.config import parse_warning_filter

from common.config import EngineConfig
from common.errors import ConfigError
from engine.backends import device_of, dtype_of, sharing_of, with_device_defaults
from tests.engine.device_contract import EngineContract
from tests.gpu.conftest import FILTERS


def test_what_a_flag_leaves_open_is_decided_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = with_device_defaults(EngineConfig(device="cpu"))
    assert (on_cpu.chunk_tokens, on_cpu.max_running) == (512, 64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_cuda = with_device_defaults(EngineConfig())
    assert (on_cuda.chunk_tokens, on_cuda.max_running) == (8192, 256)
    given = EngineConfig(chunk_tokens=7, max_running=3, sharers=2)
    assert with_device_defaults(given) == given
    assert dtype_of("auto", torch.device("cuda", 0)) == "bfloat16"
    assert dtype_of("auto", torch.device("cpu")) == "float32"


def test_how_instances_share_a_gpu_is_told_and_what_would_be_faster() -> None:
    on_gpu, two = torch.device("cuda", 0), EngineConfig(sharers=2)
    assert sharing_of(two, on_gpu, has_mps=True) == "MPS: kernels of the 2 instances on cuda:0 run side by side"
    without = sharing_of(two, on_gpu, has_mps=False)
    assert without.startswith("no MPS: the 2 instances on cuda:0 compute in turns") and "nvidia-cuda-mps-control -d" in without
    assert {sharing_of(EngineConfig(sharers=1), on_gpu, False), sharing_of(two, torch.device("cpu"), False)} == {""}


def test_a_device_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of("cuda") == torch.device("cuda", 0) and device_of("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="--device cuda:2: this host has 2 CUDA devices"):
        device_of("cuda:2")
    with pytest.raises(ConfigError, match="--device 'xpu'"):
        device_of("xpu")


def test_on_a_card_a_warning_of_ours_fails_a_test_and_one_of_the_libraries_there_does_not() -> None:
    def warn(module: str, text: str = "old") -> None:
        warnings.warn_explicit(text, DeprecationWarning, "file.py", 1, module=module)

    with warnings.catch_warnings(record=True):
        for text in ("error", *FILTERS):
            warnings.filterwarnings(*parse_warning_filter(text, escape=False))
        warn("cutlass.base_dsl")
        warn("commonly.used")
        warn("tests.gpu.test_engine", "Synchronization debug mode is a prototype feature and does not yet detect all ...")
        for ours in ("engine.graphs", "tests.gpu.test_engine", "common"):
            with pytest.raises(DeprecationWarning):
                warn(ours)


class TestEngineOnCpu(EngineContract):
    device = "cpu"
