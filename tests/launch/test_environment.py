"""The cores and GPUs of a host are divided, and what libraries read at import is set before."""

import math
import os
import socket
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from common.config import SHARED_STEP_S, EngineConfig, InstanceConfig, TransportName, step_limit_of
from common.errors import ConfigError
from common.host import HostMemory, core_count, count_gpus, devices_of_ranks, divide_cores, mps_is_there, place_on_gpus
from engine import kv_budget
from launch import child, rank_setup
from launch.fleet_options import CoresConfig, FleetCounts, divide_by_work
from launch.local import FleetConfig, LocalPlan
from launch.rank_setup import engines_of_ranks


def local_plan(
    prefill: int = 1,
    decode: int = 2,
    gpus: int = 0,
    cores: CoresConfig = CoresConfig(),  # noqa: B008
    instance: InstanceConfig = InstanceConfig(),  # noqa: B008
    **engine: Any,
) -> LocalPlan:
    counts = FleetCounts(prefill=prefill, decode=decode)
    config = FleetConfig(counts=counts, instance=instance, engine=EngineConfig(**engine))
    return LocalPlan(config=config, gpus=gpus, cores=cores)


@pytest.mark.parametrize(("cores", "instances", "threads"), [(8, 2, 4), (2, 2, 1), (2, 3, 1), (7, 2, 3), (4, 1, 4), (4, 0, 4)])
def test_cores_are_divided_and_every_instance_has_one(cores: int, instances: int, threads: int) -> None:
    assert divide_cores(cores, instances) == threads


@pytest.mark.parametrize(
    ("device", "instances", "gpus", "places"),
    [
        ("auto", 2, 0, [("auto", 2), ("auto", 2)]),
        ("auto", 2, 1, [("cuda:0", 2), ("cuda:0", 2)]),
        ("auto", 2, 8, [("cuda:0", 1), ("cuda:1", 1)]),
        ("auto", 3, 2, [("cuda:0", 2), ("cuda:1", 2), ("cuda:0", 2)]),
        ("cuda:1", 2, 0, [("cuda:1", 2), ("cuda:1", 2)]),
        ("cpu", 2, 8, [("cpu", 2), ("cpu", 2)]),
    ],
)
def test_instances_take_the_gpus_in_turn(device: str, instances: int, gpus: int, places: list[tuple[str, int]]) -> None:
    assert place_on_gpus(device, instances, gpus) == places


def test_mps_is_found_where_cuda_finds_it(tmp_path: Path) -> None:
    nowhere, default, given = tmp_path / "nowhere", tmp_path / "default", tmp_path / "given"
    default.mkdir()
    given.mkdir()
    os.mkfifo(default / "control")
    (given / "control").write_text("no pipe")
    assert mps_is_there({}, default) and not mps_is_there({}, nowhere)
    assert not mps_is_there({"CUDA_MPS_PIPE_DIRECTORY": str(given)}, default), "the variable comes first"
    assert mps_is_there({"CUDA_MPS_PIPE_DIRECTORY": str(default)}, nowhere)
    (given / "control").unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(given / "control"))
        assert mps_is_there({"CUDA_MPS_PIPE_DIRECTORY": str(given)}, nowhere)


@pytest.mark.parametrize(
    ("asked_s", "sharers", "kind", "limit_s"),
    [(0.0, 1, "cuda", math.inf), (0.0, 2, "cuda", SHARED_STEP_S), (0.0, 2, "cpu", math.inf), (0.2, 2, "cuda", 0.2)],
)
def test_steps_have_a_limit_where_others_are_on_the_gpu(asked_s: float, sharers: int, kind: str, limit_s: float) -> None:
    assert step_limit_of(InstanceConfig(step_limit_s=asked_s), EngineConfig(sharers=sharers), kind) == limit_s


def test_the_ranks_of_an_instance_take_gpus_side_by_side() -> None:
    assert place_on_gpus("auto", 3, 5, ranks=2) == [("cuda:0", 2), ("cuda:2", 2), ("cuda:0", 2)]
    assert devices_of_ranks("cuda:2", 2, 4) == ["cuda:2", "cuda:3"]
    assert devices_of_ranks("auto", 2, 0) == ["auto", "auto"]
    with pytest.raises(ConfigError, match="GPUs 3 to 4, and this host has 4"):
        devices_of_ranks("cuda:3", 2, 4)


def test_a_local_fleet_shares_cores_and_gpus_by_name() -> None:
    def engines(gpus: int, **engine: Any) -> dict[str, tuple[str, int, int]]:
        made = local_plan(gpus=gpus, **engine).engines()
        return {name: (each.device, each.sharers, each.threads) for name, each in made.items()}

    threads = divide_cores(core_count(), 3)
    places = {"prefill-0": "cuda:0", "decode-0": "cuda:1", "decode-1": "cuda:0"}
    assert engines(2) == {name: (device, 2, threads) for name, device in places.items()}
    assert engines(0, threads=5) == dict.fromkeys(places, ("auto", 3, 5))
    assert engines(0, device="cuda", sharers=4)["decode-1"] == ("cuda", 4, threads)


@pytest.mark.parametrize(
    ("cores", "instances", "workload", "threads"),
    [
        (2, (1, 1), "512,128", (1, 1)),
        (1, (1, 1), "512,128", (1, 1)),
        (8, (1, 1), "512,128", (5, 3)),
        (8, (1, 1), "128,512", (1, 7)),
        (8, (1, 1), "100000,1", (7, 1)),
        (8, (2, 1), "512,256", (2, 4)),
        (16, (1, 3), "512,128", (10, 2)),
        (64, (2, 2), "512,256", (16, 16)),
        (8, (0, 2), "512,128", (0, 4)),
        (2, (2, 3), "512,128", (1, 1)),
    ],
)
def test_cores_go_to_the_roles_by_the_work_that_each_has(
    cores: int, instances: tuple[int, int], workload: str, threads: tuple[int, int]
) -> None:
    assert divide_by_work(cores, *instances, CoresConfig(workload=workload).prefill_share) == threads


def test_all_instances_and_ranks_that_are_started_together_get_one_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided from what is free then: later readings differ."""
    free_gib = iter((9, 5))
    monkeypatch.setattr(kv_budget, "host_memory_now", lambda: HostMemory(16 * 2**30, next(free_gib) * 2**30))
    assert {made.memory_part for made in local_plan(decode=3).engines().values()} == {2 * 2**30}
    engines = engines_of_ranks(InstanceConfig(tp=2), EngineConfig(device="cpu", sharers=1))
    assert {made.memory_part for made in engines.values()} == {2 * 2**30}
    given = engines_of_ranks(InstanceConfig(tp=2), EngineConfig(device="cpu", memory_part=5))
    assert {made.memory_part for made in given.values()} == {5}, "the fleet's decision stays"
    for plan in (local_plan(decode=3, kv_memory="10%"), local_plan(decode=3, device="cuda")):
        assert {made.memory_part for made in plan.engines().values()} == {0}


def test_nccl_for_ranks_and_for_kv_on_one_gpu_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(device: str, gpus: int, tp: int, transport: TransportName) -> LocalPlan:
        return local_plan(decode=1, gpus=gpus, instance=InstanceConfig(tp=tp, transport=transport), device=device)

    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=r"--transport torch with --tp 2 on GPUs: .*--transport nixl"):
            plan(device, 4, 2, "torch")
        plan(device, 4, 2, "nixl"), plan(device, 4, 1, "torch")
    plan("cpu", 4, 2, "torch"), plan("auto", 0, 2, "torch")
    monkeypatch.setattr(rank_setup, "count_gpus", lambda: 1)
    one_of_two = InstanceConfig(tp=2, rank="1", leader="tcp://127.0.0.1:1", transport="torch")
    with pytest.raises(ConfigError, match="--transport torch with --tp 2 on GPUs"):
        engines_of_ranks(one_of_two, EngineConfig())
    assert set(engines_of_ranks(one_of_two, EngineConfig(device="cpu"))) == {1}


def test_nccl_alone_is_asked_for_where_ranks_are_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--all-reduce has no effect without --tp"):
        InstanceConfig(all_reduce="nccl")
    monkeypatch.setattr(rank_setup, "count_gpus", lambda: 2)
    asked = InstanceConfig(tp=2, all_reduce="nccl")
    assert set(engines_of_ranks(asked, EngineConfig())) == {0, 1}
    with pytest.raises(ConfigError, match="--all-reduce has no effect without GPUs"):
        engines_of_ranks(asked, EngineConfig(device="cpu"))


def test_no_division_that_uses_as_many_cores_is_faster() -> None:
    """Against all pairs of numbers that fit."""
    for cores, prefill, decode in product(range(2, 25, 2), range(1, 5), range(1, 5)):
        pairs = [each for each in product(range(1, cores), repeat=2) if prefill * each[0] + decode * each[1] <= cores]
        for share in (0.1, 0.5, 2 / 3, 0.9) if pairs else ():
            slower = [max(share / (prefill * a), (1 - share) / (decode * b)) for a, b in pairs]
            chosen = divide_by_work(cores, prefill, decode, share)
            assert slower[pairs.index(chosen)] == min(slower)


def test_cores_are_lent_where_several_instances_compute_on_the_processor_with_one_rank_each() -> None:
    def lends(tp: int = 1, **more: Any) -> bool:
        return local_plan(decode=1, instance=InstanceConfig(tp=tp), **more).lends_cores

    assert lends() and lends(device="cpu")
    assert lends(device="cpu", gpus=2), "a host may have GPUs that are not used"
    assert not lends(cores=CoresConfig(lend_cores="off"))
    without_effect: list[tuple[dict[str, Any], str]] = [
        ({"threads": 1}, "with --threads"),
        ({"gpus": 1}, "on GPUs"),
        ({"device": "cuda"}, "on GPUs"),
        ({"executor": "timed"}, "with --executor timed"),
        ({"prefill": 0}, "with --prefill 0|with one instance"),
    ]
    for flags, why in without_effect:
        assert not lends(**flags)
        for cores in (CoresConfig(workload="1,1"), CoresConfig(lend_cores="off")):
            with pytest.raises(ConfigError, match=f"--(workload|lend-cores) has no effect ({why})"):
                lends(cores=cores, **flags)
    assert not lends(tp=2, cores=CoresConfig(workload="1,1"))
    with pytest.raises(ConfigError, match="--lend-cores has no effect with --tp"):
        lends(tp=2, cores=CoresConfig(lend_cores="off"))
    with pytest.raises(ConfigError, match="--workload must be two numbers"):
        CoresConfig(workload="512")


def test_shares_of_a_memory_that_do_not_fit_on_one_device_are_refused_before_anything_starts() -> None:
    for share, gpus, most in (("60%", 0, 33), ("33.5%", 1, 33), ("60%", 2, 50)):
        with pytest.raises(ConfigError, match=f"--kv-memory {share} .* at most {most}%"):
            local_plan(kv_memory=share, gpus=gpus)
        local_plan(kv_memory=f"{most}%", gpus=gpus)
    local_plan(kv_memory="60%", gpus=3)


def test_a_host_without_the_driver_has_no_gpus() -> None:
    assert count_gpus(driver=()) == 0


def test_thread_pools_get_what_the_process_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "64", "UCX_LOG_LEVEL": "info"})
    child.prepare(3)
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "3"
    assert os.environ["UCX_LOG_LEVEL"] == "info", "what a person set stays"
    assert int(os.environ["GOMP_SPINCOUNT"]) < 10_000
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "ACTIVE"})
    child.prepare(3)
    assert "GOMP_SPINCOUNT" not in os.environ, "what a person set stays"
    child.prepare(0)
    assert os.environ["OMP_NUM_THREADS"] == str(core_count())


@pytest.mark.parametrize("given", ["/usr/bin:/bin", "", None])
def test_programs_beside_the_interpreter_are_found_though_nobody_has_activated_its_environment(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """FlashInfer starts `ninja`, which pip has put there."""
    ours = str(Path(sys.executable).parent)
    monkeypatch.setattr(os, "environ", {} if given is None else {"PATH": given})
    child.prepare(1)
    assert (
        os.environ["PATH"].split(":")
        == [ours, *(os.defpath if given is None else given).split(":")][: None if given != "" else 1]
    )
    child.prepare(1)
    assert os.environ["PATH"].split(":").count(ours) == 1
    monkeypatch.setattr(os, "environ", {"PATH": f"/first:{ours}"})
    child.prepare(1)
    assert os.environ["PATH"] == f"/first:{ours}", "the order of an environment that is activated stays"


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ALLOCATES = """
from launch import child, rank_setup
child.prepare(1)
import torch
weight = torch.ones(2**24)
sizes = [line.split() for line in open("/proc/self/smaps") if line.startswith("AnonHugePages")]
print(sum(int(size) for _, size, _ in sizes) * 1024)
"""


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="this system gives a process no huge pages"
)
def test_weights_are_in_huge_pages() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    said = subprocess.run([sys.executable, "-c", ALLOCATES], check=True, capture_output=True, encoding="utf-8", env=environ)
    assert int(said.stdout) > 2**25, "at least half of the weight"
