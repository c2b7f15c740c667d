"""Which attention an instance gets: what it says, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import AttentionName
from common.errors import ConfigError
from common.executor import ExecutorFailed
from common.pages.layout import KVDtype
from engine import backends as choice
from engine.backends import (
    FlashInferHost,
    check_attention,
    check_device,
    flashinfer_refusal,
    host_of,
    make_attention,
    make_flashinfer,
)
from engine.cpu import build
from engine.cpu.attention import NativeAttention, native_library
from engine.cpu.build import NINJA, NVCC
from engine.gpu.flashinfer import AttentionNeeds, FlashInfer, FlashInferAttention
from engine.ports import LayerAttention
from engine.torch_attention import PagedAttention
from engine.torch_kernels import Kernels
from tests.engine.attention.flashinfer_double import FlashInferDouble
from tests.engine.attention.steps import Shape
from tests.engine.checkpoints import qwen3, saved
from tests.engine.exact import runner

H100 = FlashInferHost(capability=(9, 0), version="0.6.4")


def needs(dtype: torch.dtype = torch.bfloat16, kv_dtype: KVDtype = "bfloat16", head_dim: int = 128) -> AttentionNeeds:
    layers = (LayerAttention(0.1), LayerAttention(0.1, window=7, softcap=3.0))
    return AttentionNeeds(Shape(4, 2, head_dim, 16, layers, dtype, kv_dtype).memory(2), 4, layers, dtype, 8, 8)


@pytest.mark.parametrize(
    "supported",
    [needs(), needs(head_dim=64), needs(torch.float16, "float16", 256), needs(kv_dtype="float8_e4m3fn")],
)
def test_flashinfer_takes_half_precision_over_the_same_or_fp8_pages(supported: AttentionNeeds) -> None:
    assert flashinfer_refusal(supported.memory.layout, supported.dtype, H100) is None


@pytest.mark.parametrize(
    ("refused", "host", "reason", "fix"),
    [
        (needs(), replace(H100, capability=None), "computes on CPU", "--device cuda"),
        (needs(), replace(H100, version=None), "not installed", "flashinfer"),
        (needs(), replace(H100, capability=(7, 5)), "7.5", "newer"),
        (needs(), replace(H100, lacking=(NVCC, NINJA)), "no nvcc and no ninja", "CUDA_HOME to its folder; pip install ninja"),
        (needs(torch.float32, "float32"), H100, "float32", "--dtype bfloat16"),
        (needs(torch.float16, "bfloat16"), H100, "float16 over bfloat16", "--kv-dtype"),
        (needs(head_dim=96), H100, "96", "model"),
    ],
)
def test_what_flashinfer_does_not_support_is_named_with_the_fix(
    refused: AttentionNeeds, host: FlashInferHost, reason: str, fix: str
) -> None:
    refusal = flashinfer_refusal(refused.memory.layout, refused.dtype, host)
    assert refusal is not None
    assert reason in refusal.reason and fix in refusal.fix


def test_auto_takes_flashinfer_where_it_can_and_has_its_kernels_compiled_at_once() -> None:
    lines: list[str] = []
    double, needed = FlashInferDouble(), needs()
    made = make_flashinfer(needed, "auto", Kernels(), lines.append, H100, lambda: double)
    assert (
        isinstance(made.attention, FlashInferAttention) and made.name == "FlashInfer 0.6.4, chunks by fa3, decode on CUDA cores"
    )
    assert len(lines) == 1 and "0.6.4" in lines[0] and "fa3" in lines[0] and "minutes" in lines[0]
    ran = [call.owner for call in double.calls if call.name == "run"]
    # Each for both ways in which layers attend, chunks by FA3 and by FA2.
    assert sorted(ran) == sorted(4 * ["BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"])


@pytest.mark.parametrize(("kv_dtype", "kernels"), [("bfloat16", "chunks by fa3"), ("float8_e4m3fn", "chunks by fa2")])
def test_hoppers_kernels_are_taken_for_pages_that_they_read(kv_dtype: KVDtype, kernels: str) -> None:
    lines: list[str] = []
    needed = needs(kv_dtype=kv_dtype)
    made = make_flashinfer(needed, "flashinfer", Kernels(), lines.append, H100, FlashInferDouble)
    assert isinstance(made.attention, FlashInferAttention) and kernels in lines[0]


def failing(error: Exception) -> Callable[[], FlashInfer]:
    def load() -> FlashInfer:
        raise error

    return load


NO_HEADER = """Ninja build failed. Ninja output:
[1/9] nvcc -c batch_prefill_sm90.cu
cutlass_utils.cuh:9: fatal error: curand_kernel.h: No such file or directory
ninja: build stopped: subcommand failed."""


class Broken(FlashInferDouble):
    """FlashInfer on a host where these kernels for chunks do not compile."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self._kinds = kinds

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs["backend"] in self._kinds:
            raise RuntimeError(NO_HEADER)
        return super().BatchPrefillWithPagedKVCacheWrapper(*args, **kwargs)


def test_where_hoppers_kernels_fail_the_older_ones_are_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []
    made = make_flashinfer(needs(), "auto", Kernels(), lines.append, H100, lambda: Broken("fa3"))
    assert isinstance(made.attention, FlashInferAttention)
    for told in (made.name, caplog.messages[-1]):
        assert "fa2" in told and "fa3 fails with: cutlass_utils.cuh:9: fatal error: curand_kernel.h: No such file" in told
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert NO_HEADER in caplog.text and made.prefill == "fa2"
    caplog.clear()
    again = replace(needs(), prefill=made.prefill)  # of the same start, on the whole pool: minutes of compiling do not fail again
    assert make_flashinfer(again, "auto", Kernels(), lines.append, H100, lambda: Broken("fa3")).prefill == "fa2"
    assert not caplog.records


@pytest.mark.parametrize("asked", ["auto", "flashinfer"])
def test_where_no_kernels_of_flashinfer_can_be_had_the_start_is_refused_with_each_reason(asked: AttentionName) -> None:
    loads = (lambda: Broken("fa2", "fa3"), failing(ImportError("no module named cuda")))
    for load, reason in zip(loads, ("curand_kernel.h: No such file", "no module named cuda"), strict=True):
        with pytest.raises(ConfigError, match=rf"--attention {asked}: .*--attention torch") as refused:
            make_flashinfer(needs(), asked, Kernels(), lambda line: None, H100, load)
        text = str(refused.value)
        assert text.count(reason) == 2 and "fa3 fails" in text and "fa2 fails" in text and "\n" not in text


def test_a_card_that_can_compute_nothing_more_ends_the_start_with_the_first_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    first = RuntimeError("CUDA error: an illegal memory access was encountered\nFor debugging consider passing ...")
    with pytest.raises(ExecutorFailed, match=r"cuda:0 .*: CUDA error: an illegal memory access was encountered$"):
        check_device(torch.device("cuda:0"), first)


def test_no_other_kernels_are_tried_on_a_card_that_can_compute_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device, error: Exception) -> None:
        raise ExecutorFailed(f"{device} is lost: {error}")

    monkeypatch.setattr(choice, "check_device", lost)
    with pytest.raises(ExecutorFailed, match="is lost: Ninja build failed"):
        make_flashinfer(needs(), "auto", Kernels(), lambda line: None, H100, lambda: Broken("fa3"))


@pytest.mark.parametrize("asked", ["torch", "flashinfer", "auto"])
def test_fp8_pages_are_refused_on_cards_that_cannot_convert_to_them(
    monkeypatch: pytest.MonkeyPatch, asked: AttentionName
) -> None:
    card, fp8, half = torch.device("cuda:0"), needs(kv_dtype="float8_e4m3fn").memory.layout, needs().memory.layout
    for capability in ((7, 5), (8, 0), (8, 6)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        have = ".".join(map(str, capability))
        with pytest.raises(ConfigError, match=rf"--kv-dtype fp8_e4m3: .* {have}, and FP8 needs 8\.9.*--kv-dtype auto"):
            check_attention(asked, fp8, torch.bfloat16, card)
        check_attention("torch", half, torch.bfloat16, card)
    for capability in ((8, 9), (9, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        check_attention("torch", fp8, torch.bfloat16, card)


@pytest.mark.parametrize("there", [(), ("nvcc",), ("ninja",), ("c++",), ("nvcc", "c++"), ("nvcc", "ninja", "c++")])
def test_what_flashinfer_compiles_with_is_missed_before_the_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build, "CUDA", tmp_path / "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in there:
        (tmp_path / name).touch(mode=0o755)
    card, layout = torch.device("cuda:0"), needs().memory.layout
    missing = [name for name, tool in (("nvcc", "nvcc"), ("ninja", "ninja"), ("C++ compiler", "c++")) if tool not in there]
    assert [each.tool for each in host_of(card).lacking] == missing
    check_attention("torch", layout, torch.bfloat16, card)
    if host_of(card).version is None:
        return  # that comes first
    for asked in ("auto", "flashinfer") if missing else ():
        with pytest.raises(ConfigError, match=rf"--attention {asked}: .*--attention torch") as refused:
            check_attention(asked, layout, torch.bfloat16, card)
        assert all(f"no {name}" in str(refused.value) for name in missing)


def test_the_toolkit_is_found_where_cuda_home_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert NVCC in build.for_flashinfer(), "FlashInfer looks nowhere else then"
    (tmp_path / "bin" / "nvcc").touch(mode=0o755)
    assert NVCC not in build.for_flashinfer()


@pytest.mark.parametrize(("asked", "kind", "told"), [("auto", NativeAttention, "C"), ("torch", PagedAttention, "--attention")])
def test_cpu_computes_in_c_or_in_torch_when_that_is_asked_for_and_says_so(asked: AttentionName, kind: type, told: str) -> None:
    lines: list[str] = []
    made = make_attention(needs(), asked, Kernels(), lines.append).attention
    if asked == "auto" and native_library() is None:
        pytest.skip("there is no C compiler")
    assert isinstance(made, kind) and len(lines) == 1 and told in lines[0]


def test_without_a_compiler_cpu_gets_torch_and_is_told_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/cc")
    lines: list[str] = []
    assert isinstance(make_attention(needs(), "auto", Kernels(), lines.append).attention, PagedAttention)
    assert len(lines) == 1 and "could not be compiled" in lines[0] and "install gcc" in lines[0]
    with pytest.raises(ConfigError, match=r"--attention native: .*install gcc.*--attention torch"):
        make_attention(needs(), "native", Kernels(), lines.append)


@pytest.mark.parametrize(
    ("refused", "device", "reason", "fix"),
    [
        (needs(), "cuda", "for CPU", "--device"),
        (needs(torch.float16, "float16"), "cpu", "float16", "--dtype"),
        (needs(torch.float32, "float8_e4m3fn"), "cpu", "float8_e4m3fn pages", "--kv-dtype"),
    ],
)
def test_what_c_does_not_support_is_named_with_the_fix(refused: AttentionNeeds, device: str, reason: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"--attention native: .*{reason}.*{fix}"):
        check_attention("native", refused.memory.layout, refused.dtype, torch.device(device))


@pytest.mark.parametrize(
    ("asked", "reason"), [("flashinfer", r"computes on CPU.*--device cuda"), ("native", r"install gcc")], ids=["flashinfer", "c"]
)
def test_what_cannot_be_had_is_refused_before_the_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, reason: str
) -> None:
    monkeypatch.setenv("CC", "/no/such/cc")
    lines: list[str] = []
    with pytest.raises(ConfigError, match=rf"--attention {asked}: .*{reason}.*--attention torch"):
        runner(saved(qwen3(), tmp_path), lines.append, attention=asked)
    assert lines == []
