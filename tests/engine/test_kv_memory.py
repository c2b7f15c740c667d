"""How much memory is KV, how long a context it holds, and which data type its pages have.

`--kv-memory auto` takes equal parts of a host's memory, which fit together beside the weights. FP8 pages take half the memory,
and the logits of a whole model are near those of the weights' own dtype.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import PreTrainedModel

from common.config import Dtype, EngineConfig, KVDtypeName, Quantization
from common.errors import ConfigError, MemoryShort
from common.host import HostMemory
from common.pages.layout import KVDtype, KVLayout
from engine.kv_budget import KVBudget, auto_host_kv_bytes, given_kv_bytes, kv_budget, kv_dtype_of, kv_part, part_of
from engine.kv_memory import KVMemory, KVMemoryMeter, total_bytes
from tests.engine.checkpoints import mistral, prompts_of, qwen3, saved
from tests.engine.cpu.test_products import needs_int8
from tests.engine.exact import TOLERANCE, Answer, answers, reference_logits, runner
from tests.engine.models.test_transformers_model import gemma2

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


PROMPTS = prompts_of(5, 40, 100)


@pytest.mark.parametrize(
    ("asked", "dtype", "quantization", "pages"),
    [
        ("auto", "float32", "none", "float32"),
        ("auto", "bfloat16", "fp8", "bfloat16"),
        ("auto", "float16", "none", "float16"),
        ("auto", "float32", "int8", "bfloat16"),
        ("auto", "bfloat16", "int8", "bfloat16"),
        ("float32", "float32", "none", "float32"),
        ("float32", "float32", "int8", "float32"),
        ("bfloat16", "float32", "none", "bfloat16"),
        ("bfloat16", "bfloat16", "none", "bfloat16"),
        ("fp8_e4m3", "float16", "none", "float8_e4m3fn"),
        ("fp8_e4m3", "float32", "int8", "float8_e4m3fn"),
    ],
)
def test_pages_are_as_the_flag_says_and_by_default_as_exact_as_the_weights(
    asked: KVDtypeName, dtype: KVDtype, quantization: Quantization, pages: KVDtype
) -> None:
    assert kv_dtype_of(EngineConfig(kv_dtype=asked, quantization=quantization), dtype) == pages


def test_pages_that_have_no_advantage_over_those_of_the_weights_are_refused_before_the_load(tmp_path: Path) -> None:
    lines: list[str] = []
    path = saved(qwen3(), tmp_path)
    with pytest.raises(ConfigError, match=r"--kv-dtype bfloat16 with --dtype float16: .*give --kv-dtype auto"):
        runner(path, lines.append, dtype="float16", kv_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"--kv-dtype float32 with --dtype bfloat16: .*no more exact: give --kv-dtype auto"):
        runner(path, lines.append, dtype="bfloat16", kv_dtype="float32")
    assert lines == []


@pytest.mark.parametrize(
    ("make", "attention"),
    [
        *((qwen3, attention) for attention in ("native", "torch")),
        *((lambda: mistral(sliding_window=20), attention) for attention in ("native", "torch")),
        *((gemma2, attention) for attention in ("native", "torch")),
        (qwen3, "fp8"),
    ],
)
def test_logits_over_narrow_pages_are_near_those_of_transformers(
    tmp_path: Path, make: Callable[[], PreTrainedModel], attention: str
) -> None:
    """A number of bfloat16 has 7 bits behind the first one: each key and value is up to 2^-8 off. FP8 has 3: up to 1/16."""
    is_fp8 = attention == "fp8"
    model, given = make(), {} if is_fp8 else {"attention": attention}
    path, kv_dtype = saved(model, tmp_path), "fp8_e4m3" if is_fp8 else "bfloat16"
    made = runner(path, kv_dtype=kv_dtype, dtype="float32", **given)  # type: ignore[arg-type]
    layout = made.description.layout
    assert (layout.dtype, made.description.model.dtype) == ("float8_e4m3fn" if is_fp8 else kv_dtype, "float32")
    assert layout.page_bytes * (4 if is_fp8 else 2) == replace(layout, dtype="float32").page_bytes
    errors = errors_of(answers(made, PROMPTS, tokens=8, chunk_tokens=33), model)
    if is_fp8:
        assert TOLERANCE < errors.max() < 0.25
    else:
        assert 1e-3 < errors.mean() < 1e-2 and errors.max() < 0.03


@needs_int8
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_int8_weights_have_bfloat16_pages_unless_the_flag_says_otherwise(tmp_path: Path, dtype: Dtype) -> None:
    path = saved(qwen3(), tmp_path)
    described = runner(path, quantization="int8", dtype=dtype).description
    assert described.layout.dtype == "bfloat16"
    assert described.model.dtype == ("float32" if dtype == "auto" else "bfloat16")


@needs_int8
def test_bfloat16_pages_add_little_to_the_error_of_int8_weights(tmp_path: Path) -> None:
    model = qwen3(initializer_range=0.05)
    path = saved(model, tmp_path)
    far = []
    for weights in ({"quantization": "int8", "kv_dtype": "fp8_e4m3"}, {"quantization": "int8"}, {"kv_dtype": "bfloat16"}):
        made = runner(path, **weights)  # type: ignore[arg-type]
        far.append(float(errors_of(answers(made, PROMPTS, tokens=8, chunk_tokens=33), model).mean()))
    with_fp8, with_bfloat16, pages_alone = far
    assert 4 * pages_alone < with_bfloat16 < with_fp8


def errors_of(given: list[Answer], model: PreTrainedModel) -> Tensor:
    """How far the logits of each token are from those of transformers in float32, in parts of these."""
    pairs = [(torch.stack(answer.logits), reference_logits(model, answer)) for answer in given]
    return torch.cat([(ours - theirs).norm(dim=-1) / theirs.norm(dim=-1) for ours, theirs in pairs])


BOUNDLESS = 2**60


def idle(total_gib: float, taken_gib: float = 0.0) -> HostMemory:
    """A host where nothing runs but a small system, and instances that hold so much."""
    return HostMemory(int(total_gib * GIB), int((total_gib * 0.97 - taken_gib) * GIB))


@pytest.mark.parametrize("total_gib", [8, 16, 23.5, 64, 512])
@pytest.mark.parametrize("sharers", [1, 2, 3])
@pytest.mark.parametrize("weights_gib", [0.5, 1.4])
def test_the_parts_of_a_host_fit_together_and_take_most_of_it(total_gib: float, sharers: int, weights_gib: float) -> None:
    host = idle(total_gib, sharers * weights_gib)
    pages, why = kv_part(host, int(weights_gib * GIB), sharers, BOUNDLESS)
    used = sharers * (pages + weights_gib * GIB)
    assert used <= host.total_bytes * 7 / 8
    assert used >= host.total_bytes * (7 / 8 - sharers / 16) - GIB or "the least" in why


def test_equal_hosts_get_equal_pools_whatever_little_else_they_hold() -> None:
    """The figures of one kind of host, a little apart: what the kernel shows, what is free, and what weights take."""
    total = int(23.5 * GIB)
    pools = {
        kv_part(HostMemory(total, free), int(2.4 * GIB) + more, 2, BOUNDLESS)[0]
        for free in (17 * GIB, 20 * GIB, 22 * GIB)
        for more in (0, 2**20, 20 * 2**20)
    }
    assert len(pools) == 1


@pytest.mark.parametrize(
    ("host", "taken_gib", "useful", "reason"),
    [
        (idle(16), 2.4, BOUNDLESS, r"part of 7.00 GiB \(16.00 GiB less 2.00 GiB for the system, shared by 2\), less 3.00 GiB"),
        (HostMemory(16 * GIB, 4 * GIB), 2.4, BOUNDLESS, r"only 4.00 GiB of 16.00 GiB are free"),
        (idle(16), 2.4, GIB, r"enough for every row at full length"),
        (idle(16), 12.0, BOUNDLESS, r"the least, because weights and steps take 12.50 GiB of a part of 7.00 GiB"),
    ],
)
def test_the_reason_is_told_and_what_others_hold_is_not_taken(
    host: HostMemory, taken_gib: float, useful: int, reason: str
) -> None:
    pages, why = kv_part(host, int(taken_gib * GIB), 2, useful)
    assert re.search(reason, why) and 0 < 2 * pages < host.free_bytes


def test_auto_takes_no_more_than_the_rows_can_use_and_says_why() -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_size=16, dtype="float32")
    lines: list[str] = []
    pages = auto_host_kv_bytes(EngineConfig(max_running=4), 1, layout, 100, lines.append)
    assert pages == 2 * 4 * 7 * layout.page_bytes
    assert len(lines) == 1 and "--kv-memory auto" in lines[0]


@pytest.mark.parametrize(("total_gib", "sharers", "weights_gib"), [(16, 4, 0.3), (16, 2, 0.3), (32, 4, 2.6), (64, 8, 2.6)])
@pytest.mark.parametrize(("busy_gib", "by_hand"), [(0.5, False), (8, False), (0.5, True)])
def test_one_that_starts_again_beside_others_that_use_their_pages_gets_what_it_had(
    total_gib: int, sharers: int, weights_gib: float, busy_gib: float, by_hand: bool
) -> None:
    """busy_gib: held by other programs. By hand, each decides for itself, and is told no part."""
    part = 0 if by_hand else part_of(HostMemory(total_gib * GIB, int((total_gib - busy_gib) * GIB)), sharers, sharers)

    def pages(others_gib: float) -> int:
        free_gib = total_gib - busy_gib - weights_gib - others_gib
        host = HostMemory(total_gib * GIB, int(free_gib * GIB))
        return kv_part(host, int(weights_gib * GIB), sharers, BOUNDLESS, part)[0]

    first = pages((sharers - 1) * weights_gib)
    in_use_gib = sharers * (first / GIB + weights_gib)
    assert in_use_gib <= total_gib - busy_gib
    assert pages(in_use_gib * (sharers - 1) / sharers) == first


def test_a_second_fleet_of_a_host_gets_the_parts_that_the_first_one_left() -> None:
    whole = part_of(idle(16), 4, 2)
    assert part_of(idle(16, 2 * whole / GIB), 4, 2) == whole
    assert part_of(HostMemory(16 * GIB, 5 * GIB), 4, 4) == GIB
