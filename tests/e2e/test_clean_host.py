"""A host without compilers and ninja: a fleet serves on its processor, and one with a card is told what lacks before it loads."""

import json
from pathlib import Path

import pytest
import torch

from common.config import AttentionName, EngineConfig, ModelConfig
from common.errors import ConfigError
from common.processes.local_fleet import local_fleet
from common.processes.router_client import RouterClient
from engine.cpu import build
from engine.model_runner import ModelRunner
from launch.child import find_programs
from tests.rig.client import completion_of_ids
from tests.rig.forks import forked, forks


@pytest.fixture(scope="module", autouse=True)
def forking() -> None:
    """The process that forks is there before the host is clean."""
    forks()


@pytest.fixture(autouse=True)
def clean_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(build, "CUDA", tmp_path)
    for name in ("CC", "CXX", "CUDA_HOME", "CUDA_PATH", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_the_processor_serves_the_log_says_what_lacks_and_the_fleet_stops_in_order() -> None:
    with forked(), local_fleet() as fleet:
        router = RouterClient(fleet.url)
        asked = json.loads(completion_of_ids("demo", list(range(300, 320)), 6, return_token_ids=True))
        assert len(router.post("/v1/completions", asked)["choices"][0]["token_ids"]) == 6
        instances = router.get("/cluster")["instances"]
    assert "there is no C compiler; install gcc or clang, or name one in CC" in fleet.output
    told = {instance["role"]: instance["ranks"][0]["engine"] for instance in instances}
    for engine in told.values():
        assert engine["attention"] == "torch, because attention in C could not be compiled (the log says why)"
    assert told["decode"]["graphs"] == "off, because there is no C compiler"


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        ("auto", "--attention auto: FlashInfer .*, or take --attention torch"),
        ("torch", r"Triton compiles kernels for cuda:0, and there is no C compiler .*here: install gcc"),
    ],
)
def test_a_card_is_refused_with_what_lacks_before_the_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, attention: AttentionName, reason: str
) -> None:
    find_programs()  # as a start does
    pytest.importorskip("triton", reason="needs the package triton, which is there with torch for CUDA")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**36, 2**36))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    said: list[str] = []
    with pytest.raises(ConfigError, match=reason) as refused:
        ModelRunner(ModelConfig(), EngineConfig(device="cuda:0", attention=attention, graphs="off"), said.append)
    assert said == [] and "ninja" not in str(refused.value), "it is beside the interpreter, on no PATH"
