"""Which attention an instance gets: what it says, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.engine.attention.choice import (
    AttentionNeeds,
    Host,
    check_attention,
    flashinfer_or_torch,
    flashinfer_refusal,
    make_attention,
)
from common.engine.attention.flashinfer import FlashInfer, FlashInferAttention
from common.engine.attention.native import NativeAttention, native_library
from common.engine.attention.paged import PagedAttention
from common.engine.attention.port import LayerAttention
from common.engine.kernels.torch_kernels import TorchKernels
from common.errors import ConfigError
from common.pages.layout import KVDtype
from tests.common.engine.attention.flashinfer_double import FlashInferDouble
from tests.common.engine.attention.steps import Shape
from tests.common.engine.checkpoints import qwen3, saved
from tests.common.engine.exact import runner

H100 = Host(capability=(9, 0), version="0.6.4", can_compile=True)


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
        (needs(), replace(H100, can_compile=False), "nvcc", "CUDA_HOME"),
        (needs(torch.float32, "float32"), H100, "float32", "--dtype bfloat16"),
        (needs(torch.float16, "bfloat16"), H100, "float16 over bfloat16", "--kv-dtype"),
        (needs(head_dim=96), H100, "96", "model"),
    ],
)
def test_what_flashinfer_does_not_support_is_named_with_the_fix(
    refused: AttentionNeeds, host: Host, reason: str, fix: str
) -> None:
    refusal = flashinfer_refusal(refused.memory.layout, refused.dtype, host)
    assert refusal is not None
    assert reason in refusal.reason and fix in refusal.fix


def test_auto_takes_flashinfer_where_it_can_and_has_its_kernels_compiled_at_once() -> None:
    lines: list[str] = []
    double, needed = FlashInferDouble(), needs()
    made = flashinfer_or_torch(needed, "auto", TorchKernels(), lines.append, H100, lambda: double)
    assert isinstance(made, FlashInferAttention)
    assert len(lines) == 1 and "0.6.4" in lines[0] and "fa3" in lines[0] and "minutes" in lines[0]
    ran = [call.owner for call in double.calls if call.name == "run"]
    assert sorted(ran) == sorted(2 * ["BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"])


@pytest.mark.parametrize(("kv_dtype", "kernels"), [("bfloat16", "chunks by fa3"), ("float8_e4m3fn", "chunks by fa2")])
def test_hoppers_kernels_are_taken_for_pages_that_they_read(kv_dtype: KVDtype, kernels: str) -> None:
    lines: list[str] = []
    needed = needs(kv_dtype=kv_dtype)
    made = flashinfer_or_torch(needed, "flashinfer", TorchKernels(), lines.append, H100, FlashInferDouble)
    assert isinstance(made, FlashInferAttention) and kernels in lines[0]


def failing(error: Exception) -> Callable[[], FlashInfer]:
    def load() -> FlashInfer:
        raise error

    return load


@pytest.mark.parametrize("error", [ImportError("no module"), RuntimeError("Ninja build failed\nnvcc: no such file")])
def test_flashinfer_that_fails_on_the_host_is_left_with_its_last_words(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[str] = []
    made = flashinfer_or_torch(needs(), "auto", TorchKernels(), lines.append, H100, failing(error))
    last = str(error).splitlines()[-1]
    assert isinstance(made, PagedAttention) and last in lines[-1]
    assert str(error) in caplog.text
    with pytest.raises(ConfigError, match=f"--attention flashinfer: .*{last}.*--attention torch"):
        flashinfer_or_torch(needs(), "flashinfer", TorchKernels(), lines.append, H100, failing(error))


def test_cpu_computes_in_c_where_there_is_a_compiler_and_says_so() -> None:
    lines: list[str] = []
    made = make_attention(needs(), "auto", TorchKernels(), lines.append)
    if native_library() is None:
        pytest.skip("there is no C compiler")
    assert isinstance(made, NativeAttention)
    assert len(lines) == 1 and "C" in lines[0]


def test_without_a_compiler_cpu_gets_torch_and_is_told_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/cc")
    lines: list[str] = []
    assert isinstance(make_attention(needs(), "auto", TorchKernels(), lines.append), PagedAttention)
    assert len(lines) == 1 and "could not be compiled" in lines[0] and "install gcc" in lines[0]
    with pytest.raises(ConfigError, match=r"--attention native: .*install gcc.*--attention torch"):
        make_attention(needs(), "native", TorchKernels(), lines.append)


def test_torch_is_taken_when_it_is_asked_for() -> None:
    lines: list[str] = []
    assert isinstance(make_attention(needs(), "torch", TorchKernels(), lines.append), PagedAttention)
    assert len(lines) == 1 and "--attention" in lines[0]


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


def test_flashinfer_on_cpu_is_refused_before_the_weights_are_loaded(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(ConfigError, match=r"--attention flashinfer: .*computes on CPU.*--device cuda.*--attention torch"):
        runner(saved(qwen3(), tmp_path), lines.append, attention="flashinfer")
    assert lines == []


def test_c_without_a_compiler_is_refused_before_the_weights_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/cc")
    lines: list[str] = []
    with pytest.raises(ConfigError, match=r"--attention native: .*install gcc.*--attention torch"):
        runner(saved(qwen3(), tmp_path), lines.append, attention="native")
    assert lines == []
