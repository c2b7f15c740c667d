"""How much memory is KV, and how long a context it holds."""

import os
from pathlib import Path

import pytest
import torch

from common.engine import kv_budget as module
from common.engine.kv_budget import KVBudget, auto_kv_bytes, given_kv_bytes, kv_budget, workspace_bytes
from common.engine.kv_memory import KVMemory
from common.engine.models.rotary import Rope
from common.engine.models.shape import ModelShape
from common.errors import ConfigError
from common.pages.layout import KVLayout

GIB = 2**30
QWEN3_0_6B = KVLayout(layers=28, kv_heads=8, head_dim=128, page_size=16, dtype="float32")
SHAPE_8B = ModelShape(
    architecture="LlamaForCausalLM", vocab_size=128_256, hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8,
    head_dim=128, context_tokens=131_072, norm_eps=1e-5, rope=Rope("default", 5e5, 131_072, 131_072), windows=(None,) * 32,
    qk_norm=False, qkv_bias=False, output_bias=False, mlp_bias=False, tied=False, eos_token_ids=(2,),
)  # fmt: skip
LAYOUT_8B = KVLayout(layers=32, kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")


def test_an_ordinary_model_starts_in_the_memory_of_a_laptop() -> None:
    budget = kv_budget(QWEN3_0_6B, GIB, own_context=40_960, asked_context=0)
    assert budget == KVBudget(total_pages=292, context_tokens=4096)


def test_instances_whose_memory_differs_a_little_agree_on_the_context() -> None:
    contexts = {kv_budget(QWEN3_0_6B, int(GIB * share), 40_960, 0).context_tokens for share in (0.9, 0.95, 1.0, 1.1, 1.5)}
    assert contexts == {4096}


@pytest.mark.parametrize("own_context", [100, 4096, 40_960, 4672])
@pytest.mark.parametrize("kv_bytes", [QWEN3_0_6B.page_bytes, 3 * QWEN3_0_6B.page_bytes, GIB, 40 * GIB])
def test_the_pool_always_holds_one_context(own_context: int, kv_bytes: int) -> None:
    budget = kv_budget(QWEN3_0_6B, kv_bytes, own_context, 0)
    assert QWEN3_0_6B.pages_for(budget.context_tokens) <= budget.total_pages
    assert budget.context_tokens == own_context or budget.context_tokens > budget.total_pages * 16 / 2


def cuda_with(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))

    def asked(device: torch.device) -> tuple[int, int]:
        calls.append("asked")
        return free_bytes, 80 * GIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", asked)
    return calls


def test_on_cuda_a_workspace_stays_free_and_what_torch_caches_is_given_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = cuda_with(monkeypatch, free_bytes=60 * GIB)
    kv_bytes = auto_kv_bytes(torch.device("cuda", 0), workspace_bytes=10 * GIB)
    assert calls == ["emptied", "asked"]
    assert 40 * GIB < kv_bytes < 50 * GIB


def test_on_cuda_too_little_memory_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_with(monkeypatch, free_bytes=GIB)
    with pytest.raises(ConfigError, match="lower --chunk-tokens or --max-running"):
        auto_kv_bytes(torch.device("cuda", 0), workspace_bytes=GIB)


def test_instances_that_share_a_gpu_have_equal_parts_whoever_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB for two: each has 40 for its weights, its workspace and its pages, and for CUDA itself."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 16 * GIB)
    parts = []
    for free_bytes in (62 * GIB, 45 * GIB):
        cuda_with(monkeypatch, free_bytes)
        parts.append(auto_kv_bytes(torch.device("cuda", 0), 4 * GIB, sharers=2))
    first, second = parts
    assert first == second
    assert 2 * (first + 16 * GIB + 4 * GIB) < 80 * GIB
    cuda_with(monkeypatch, free_bytes=8 * GIB)
    assert auto_kv_bytes(torch.device("cuda", 0), 4 * GIB, sharers=2) < 4 * GIB, "no more than there is"
    with pytest.raises(ConfigError, match="one of 5 instances"):
        auto_kv_bytes(torch.device("cuda", 0), GIB, sharers=5)


def test_a_share_is_one_of_the_devices_whole_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_with(monkeypatch, free_bytes=GIB)
    assert given_kv_bytes("40%", torch.device("cuda", 0)) == 32 * GIB
    assert given_kv_bytes("512MiB", torch.device("cuda", 0)) == GIB // 2
    assert given_kv_bytes("auto", torch.device("cuda", 0)) is None
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert given_kv_bytes("10%", torch.device("cpu")) == pytest.approx(whole / 10, rel=0.01)


def test_on_cpu_the_share_is_of_the_hosts_memory_unless_it_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Meminfo:
        def __init__(self, path: str) -> None:
            assert path == "/proc/meminfo"

        def read_text(self) -> str:
            return f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n"

    monkeypatch.setattr(module, "Path", Meminfo)
    for total, available, expected in (  # noqa: B007 - read_text reads them
        (64 * GIB, 60 * GIB, GIB),
        (4 * GIB, 3 * GIB, GIB // 2),
        (4 * GIB, 2 * GIB, GIB // 2),
        (4 * GIB, GIB // 2, GIB // 4),
    ):
        assert auto_kv_bytes(torch.device("cpu"), 0) == expected


def test_the_workspace_is_enough_for_a_step_of_a_large_model() -> None:
    """Counted by hand for one chunk of 2,048 and 64 rows: gate_up and its product; logits twice, noise in doubles; the mask."""
    workspace = workspace_bytes(SHAPE_8B, LAYOUT_8B, chunk_tokens=2048, max_running=64, context_tokens=131_072)
    mlp = (2048 + 64) * 4 * 14336 * 2
    sampling = 64 * 128_256 * (4 + 4 + 8 * 3)
    mask = 2048 * 4 * 131_072 * 2
    assert mlp + sampling + mask < workspace < 8 * GIB
    assert workspace_bytes(SHAPE_8B, LAYOUT_8B, 512, 64, 131_072) < workspace


def test_memory_that_cannot_be_allocated_is_refused_by_flag() -> None:
    with pytest.raises(ConfigError, match=r"--kv-memory: cannot allocate .* on cpu"):
        KVMemory(QWEN3_0_6B, 2**50 // QWEN3_0_6B.page_bytes, torch.device("cpu"))
