"""How much memory is KV, and how long a context it holds."""

import os

import pytest
import torch

from common.errors import ConfigError, MemoryShort
from common.pages.layout import KVLayout
from engine.kv_budget import KVBudget, given_kv_bytes, kv_budget
from engine.kv_memory import KVMemory, KVMemoryMeter, total_bytes

GIB = 2**30
QWEN3_0_6B = KVLayout(layers=28, kv_heads=8, head_dim=128, page_size=16, dtype="float32")


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


class Card:
    """The memory of a device, as torch tells of it. What torch caches counts as used until the cache is emptied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_bytes: int, total_bytes: int = 80 * GIB) -> None:
        self.free_bytes, self.cached_bytes = free_bytes, 0
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty_cache)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free_bytes - self.cached_bytes, total_bytes))

    def _empty_cache(self) -> None:
        self.cached_bytes = 0


def test_on_cuda_pages_get_what_weights_steps_and_a_reserve_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 GiB are free after the weights. The trial takes 10 of them, 2 of which are its pool, and gives back all but 1."""
    card, said = Card(monkeypatch, 60 * GIB), list[str]()
    card.cached_bytes = 3 * GIB
    meter = KVMemoryMeter(torch.device("cuda", 0), sharers=1)
    card.cached_bytes = 10 * GIB
    workspace = meter.peak_bytes() - 2 * GIB
    card.free_bytes -= GIB
    assert meter.held_bytes() == GIB, "torch's cache is no longer counted"
    kept = 80 * GIB * 2 // 100
    assert meter.left_for_pages(workspace, said.append) == 60 * GIB - GIB - 8 * GIB - kept
    assert "take 21.00 GiB, steps and graphs 8.00 GiB" in said[0] and "49.40 GiB are left" in said[0]


def test_instances_that_share_a_gpu_have_equal_parts_whoever_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB for two: each has 40 for its weights, its steps and its pages, and for CUDA itself. No part is more than is free."""
    parts = []
    for free_bytes in (62 * GIB, 45 * GIB, 8 * GIB):
        Card(monkeypatch, free_bytes)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 16 * GIB)
        meter = KVMemoryMeter(torch.device("cuda", 0), sharers=2)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20 * GIB)
        assert meter.peak_bytes() == meter.held_bytes() == 4 * GIB
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 16 * GIB)
        parts.append(meter.left_for_pages(4 * GIB, lambda text: None))
    first, second, short = parts
    assert first == second == (40 - 16 - 4 - 1 - 1) * GIB, "1 for CUDA itself and 1 that stays free"
    assert 0 < short < 4 * GIB
    with pytest.raises(MemoryShort, match="for each of 5 instances"):
        KVMemoryMeter(torch.device("cuda", 0), sharers=5).left_for_pages(GIB, lambda text: None)


@pytest.mark.parametrize(("total_gib", "kept"), [(16, GIB), (24, GIB), (80, 80 * GIB // 50), (140, 140 * GIB // 50)])
def test_what_libraries_take_late_stays_free_on_a_small_card_too(
    monkeypatch: pytest.MonkeyPatch, total_gib: int, kept: int
) -> None:
    said = list[str]()
    Card(monkeypatch, total_gib * GIB, total_gib * GIB)
    left = KVMemoryMeter(torch.device("cuda", 0), sharers=1).left_for_pages(0, said.append)
    assert left == total_gib * GIB - kept and f"{kept / GIB:.2f} GiB stay free for libraries" in said[0]


def test_on_cuda_too_little_memory_is_refused_with_the_figures_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, GIB)
    meter = KVMemoryMeter(torch.device("cuda", 0), sharers=1)
    figures = r"cuda:0 has 80.00 GiB: .* 79.00 GiB, .* 1.00 GiB are free now: .* lower --chunk-tokens, --max-running or"
    with pytest.raises(MemoryShort, match=figures):
        meter.left_for_pages(GIB // 2, lambda text: None)
    assert "take 79.00 GiB" in str(meter)


@pytest.mark.parametrize("kv_bytes", [1, QWEN3_0_6B.page_bytes])
def test_too_few_pages_may_be_more_later_if_their_memory_was_measured_but_not_if_it_was_asked_for(kv_bytes: int) -> None:
    with pytest.raises(MemoryShort):
        kv_budget(QWEN3_0_6B, kv_bytes, own_context=4096, asked_context=2048, measured=True)
    with pytest.raises(ConfigError) as refused:
        kv_budget(QWEN3_0_6B, kv_bytes, own_context=4096, asked_context=2048)
    assert not refused.value.retryable


def _given(kv_memory: str, device: torch.device) -> int | None:
    return given_kv_bytes(kv_memory, str(device), total_bytes(device))


def test_a_share_is_one_of_the_devices_whole_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, GIB)
    assert _given("40%", torch.device("cuda", 0)) == 32 * GIB
    assert _given("512MiB", torch.device("cuda", 0)) == GIB // 2
    assert _given("auto", torch.device("cuda", 0)) is None
    with pytest.raises(ConfigError, match=r"--kv-memory 81GiB is more than cuda:0 has, which is 80.00 GiB"):
        _given("81GiB", torch.device("cuda", 0))
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert _given("10%", torch.device("cpu")) == pytest.approx(whole / 10, rel=0.01)


def test_memory_that_cannot_be_allocated_is_refused_by_flag() -> None:
    with pytest.raises(MemoryShort, match=r"--kv-memory: cannot allocate .* on cpu"):
        KVMemory(QWEN3_0_6B, 2**50 // QWEN3_0_6B.page_bytes, torch.device("cpu"))
