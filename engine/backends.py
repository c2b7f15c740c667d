"""What an instance computes with: its device, and which implementations of kernels and attention it gets there, and why.

Owns the choice, what each backend supports, what is decided by the device where a flag leaves it open, and whether a device can
go on after an error. Imports Triton and FlashInfer only where they are taken: other machines may not have them. A CPU gets C
where there is a compiler. Does not know models, rows or plans.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from subprocess import SubprocessError

import torch

from common.config import AttentionName, Dtype, EngineConfig, shares_gpu, with_step_size
from common.errors import ConfigError
from common.executor import ExecutorFailed
from common.extras import install_command
from common.pages.layout import KVDtype, KVLayout
from engine.cpu import build
from engine.cpu.attention import DTYPES, NativeAttention, native_library
from engine.cpu.build import processor_flags
from engine.cpu.kernels import load_native_kernels
from engine.gpu.flashinfer import AttentionNeeds, FlashInfer, FlashInferAttention, PrefillKernels, decodes_on_tensor_cores
from engine.kv_memory import torch_dtype
from engine.ports import Attention
from engine.torch_attention import PagedAttention
from engine.torch_kernels import Kernels


def device_of(name: str) -> torch.device:
    """Raises ConfigError when the device is not there."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is not a device: use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name!r} is not supported: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: this host has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def dtype_of(name: Dtype, device: torch.device) -> KVDtype:
    if name == "auto":
        return "bfloat16" if device.type == "cuda" else "float32"
    return name


def with_device_defaults(engine: EngineConfig) -> EngineConfig:
    """The config with numbers where it says 0 for what the device suggests. Raises ConfigError."""
    return with_step_size(engine, "cuda" if device_of(engine.device).type == "cuda" else "cpu")


def sharing_of(engine: EngineConfig, device: torch.device, has_mps: bool) -> str:
    """`EngineChoices.sharing`."""
    if not shares_gpu(engine, device.type):
        return ""
    if has_mps:
        return f"MPS: kernels of the {engine.sharers} instances on {device} run side by side"
    return (
        f"no MPS: the {engine.sharers} instances on {device} compute in turns; to let their kernels run side by side, call "
        f"nvidia-cuda-mps-control -d before the start"
    )


def check_device(device: torch.device, error: Exception) -> None:
    """Call it before anything else is tried instead of what failed with `error`. After some errors CUDA computes nothing more in
    this process, and everything later fails with a reason of its own. Raises ExecutorFailed with the first one then."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as later:
        raise ExecutorFailed(f"{device} can compute nothing more in this process: {first_reason(error)}") from later


def first_reason(error: Exception) -> str:
    """One line: the first that names an error, because CUDA's end in general advice and compilers' in a count; or the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "error:" in line.lower()]
    return (named or lines[-1:] or [type(error).__name__])[0]


_log = logging.getLogger(__name__)


def make_kernels(device: torch.device) -> Kernels:
    """Raises ConfigError where Triton is there and cannot compile: it would fail at the first step."""
    if device.type == "cpu":
        return load_native_kernels() or Kernels()
    if find_spec("triton") is None:
        _log.warning("Triton is not installed, so torch computes the small operations on %s, which is slower", device)
        return Kernels()
    lacking = build.for_triton()
    if lacking:
        raise ConfigError(
            f"Triton compiles kernels for {device}, and there is {build.none_of(lacking)} here: {build.fixes(lacking)}"
        )
    from engine.gpu.triton_kernels import TritonKernels

    return TritonKernels()


HEAD_DIMS = (64, 128, 256)
"""That FlashInfer's kernels are written for."""
FP8_CAPABILITY = (8, 9)
"""Compute capability from which on kernels convert to FP8."""


@dataclass(frozen=True, slots=True)
class FlashInferHost:
    """What FlashInfer needs of the host."""

    capability: tuple[int, int] | None
    """The GPU's, (major, minor); None on CPU."""
    version: str | None
    """None if FlashInfer is not installed."""
    lacking: tuple[build.Lacking, ...] = ()
    """What it compiles with and is not there; nothing where there is the package of compiled kernels."""


@dataclass(frozen=True, slots=True)
class BackendRefusal:
    """Why a backend cannot be used, and what to do for it to be."""

    reason: str
    fix: str

    def as_error(self, asked: AttentionName) -> ConfigError:
        return ConfigError(f"--attention {asked}: {self.reason}: {self.fix}, or take --attention torch, which is slower")


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """The attention that an instance got."""

    attention: Attention
    name: str
    """The implementation, for people."""
    prefill: PrefillKernels | None = None
    """As in the needs; None where it is not FlashInfer."""


NOT_COMPILED = BackendRefusal("attention in C could not be compiled (the log says why)", "install gcc or clang")


def check_attention(asked: AttentionName, layout: KVLayout, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if attention cannot be what was asked for, or what a GPU is for. dtype: of queries.

    Call it before the weights are loaded, which takes long."""
    refusal = None
    _check_fp8_pages(layout, device)
    if asked == "torch" and device.type == "cuda":
        _log.warning("attention by torch is many times slower on %s than FlashInfer's, and has no CUDA graphs", device)
    if asked == "flashinfer" or (asked == "auto" and device.type == "cuda"):
        refusal = flashinfer_refusal(layout, dtype, host_of(device))
    elif asked == "native":
        refusal = native_refusal(layout, dtype, device) or (None if native_library() is not None else NOT_COMPILED)
    if refusal is not None:
        raise refusal.as_error(asked)


def _check_fp8_pages(layout: KVLayout, device: torch.device) -> None:
    """Refuses FP8 pages on older GPUs, whatever the attention: what writes keys and values cannot convert to FP8 there. Raises
    ConfigError."""
    if device.type != "cuda" or torch_dtype(layout.dtype) != torch.float8_e4m3fn:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        have, need = (".".join(map(str, each)) for each in (capability, FP8_CAPABILITY))
        raise ConfigError(
            f"--kv-dtype fp8_e4m3: the GPU's compute capability is {have}, and FP8 needs {need} (Ada, Hopper or later): give "
            f"--kv-dtype auto"
        )


def make_attention(
    needs: AttentionNeeds, asked: AttentionName, kernels: Kernels, progress: Callable[[str], None]
) -> ChosenAttention:
    """asked: the flag --attention. Says through `progress` what it took and why. Raises ConfigError when FlashInfer or C cannot
    be used and is asked for, which on CUDA `auto` does: an instance at a tenth of the speed would call itself ready."""
    device = needs.memory.pool.device
    if asked == "torch":
        progress("attention: torch, as --attention says")
        return ChosenAttention(_torch(needs), "torch, as --attention says")
    if asked == "native" or (asked == "auto" and device.type == "cpu"):
        return _native_or_torch(needs, asked, progress)
    return make_flashinfer(needs, asked, kernels, progress, host_of(device), _imported)


def make_flashinfer(
    needs: AttentionNeeds,
    asked: AttentionName,
    kernels: Kernels,
    progress: Callable[[str], None],
    host: FlashInferHost,
    load: Callable[[], FlashInfer],
) -> ChosenAttention:
    """As `make_attention`, on a known host, with the kernels compiled. load: imports FlashInfer.

    FA3 is Hopper's; it does not read FP8 pages for queries in half precision. Where it fails, FA2 is tried."""
    refusal = flashinfer_refusal(needs.memory.layout, needs.dtype, host)
    if refusal is not None:
        raise refusal.as_error(asked)
    kv_dtype = needs.memory.pool.dtype
    on = "tensor" if decodes_on_tensor_cores(needs.query_heads // needs.memory.layout.kv_heads, kv_dtype) else "CUDA"
    cache = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()) / ".cache" / "flashinfer"
    failures: list[str] = []
    kinds: tuple[PrefillKernels, ...] = ("fa3", "fa2") if host.capability == (9, 0) and kv_dtype == needs.dtype else ("fa2",)
    for kind in kinds if needs.prefill is None else (needs.prefill,):
        name = f"FlashInfer {host.version}, chunks by {kind}, decode on {on} cores"
        progress(
            f"attention: {name}; its first start with a shape of heads compiles kernels into {cache}, which can take minutes"
        )
        made = _flashinfer(needs, kind, kernels, load)
        if isinstance(made, FlashInferAttention):
            if failures:
                _log.warning("attention on chunks is by FlashInfer's %s, which is slower here, because %s", kind, failures[0])
                name += f", because {failures[0]}"
            return ChosenAttention(made, name, kind)
        failures.append(f"{kind} fails with: {made}")
    raise BackendRefusal(f"FlashInfer cannot be used: {'; '.join(failures)}", "see the whole errors in the log").as_error(asked)


def host_of(device: torch.device) -> FlashInferHost:
    try:
        installed = version("flashinfer-python")
    except PackageNotFoundError:
        installed = None
    return FlashInferHost(
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        version=installed,
        lacking=() if find_spec("flashinfer_jit_cache") is not None else build.for_flashinfer(),
    )


def flashinfer_refusal(layout: KVLayout, dtype: torch.dtype, host: FlashInferHost) -> BackendRefusal | None:
    """None if FlashInfer can be used. dtype: of queries."""
    kv_dtype, dims = torch_dtype(layout.dtype), ", ".join(map(str, HEAD_DIMS))
    has, lacking = ".".join(map(str, host.capability or ())), build.none_of(host.lacking)
    of_queries, pair = _name(dtype), f"{_name(dtype)} over {_name(kv_dtype)} pages"
    return _first_broken(
        (host.capability is not None, "FlashInfer needs a CUDA device and this instance computes on CPU", "give --device cuda"),
        (host.version is not None, "FlashInfer is not installed", f"install it: {install_command('flashinfer')}"),
        (
            (host.capability or ()) >= (8, 0),
            f"the GPU's compute capability is {has} and FlashInfer needs 8.0",
            "take a newer GPU",
        ),
        (not host.lacking, f"FlashInfer compiles its kernels, and there is {lacking} here", build.fixes(host.lacking)),
        (dtype in (torch.float16, torch.bfloat16), f"FlashInfer has no kernels for {of_queries}", "give --dtype bfloat16"),
        (kv_dtype in (dtype, torch.float8_e4m3fn), f"FlashInfer has no kernels for {pair}", "give --kv-dtype auto"),
        (
            layout.head_dim in HEAD_DIMS,
            f"the model's heads have {layout.head_dim} elements and FlashInfer has {dims}",
            "take another model",
        ),
    )


def native_refusal(layout: KVLayout, dtype: torch.dtype, device: torch.device) -> BackendRefusal | None:
    """None if attention in C can be used where it compiles. dtype: of queries."""
    kv_dtype, is_cpu = torch_dtype(layout.dtype), device.type == "cpu"
    return _first_broken(
        (is_cpu, f"attention in C is for CPU and this instance computes on {device.type}", "give --device cpu"),
        (dtype in DTYPES, f"attention in C has no {_name(dtype)}", "give --dtype float32 or bfloat16"),
        (kv_dtype in DTYPES, f"attention in C does not read {_name(kv_dtype)} pages", "give --kv-dtype auto"),
    )


def _first_broken(*rules: tuple[bool, str, str]) -> BackendRefusal | None:
    """rules: whether each holds, and the reason and the fix where it does not."""
    return next((BackendRefusal(reason, fix) for holds, reason, fix in rules if not holds), None)


def _native_or_torch(needs: AttentionNeeds, asked: AttentionName, progress: Callable[[str], None]) -> ChosenAttention:
    refusal = native_refusal(needs.memory.layout, needs.dtype, needs.memory.pool.device)
    library = native_library() if refusal is None else None
    if library is not None:
        # oneDNN's products on matrix units are twice as fast as ours on vectors, though torch gathers the pages for them.
        of_chunks = _torch(needs) if needs.dtype == torch.bfloat16 and "amx_bf16" in processor_flags() else None
        name = "in C over the pages" + ("" if of_chunks is None else ", chunks by torch on the matrix units")
        progress(f"attention: {name}")
        made = NativeAttention(needs.memory, needs.query_heads, needs.layers, needs.dtype, library, of_chunks)
        return ChosenAttention(made, name)
    refusal = refusal or NOT_COMPILED
    if asked == "native":
        raise refusal.as_error(asked)
    progress(f"attention: torch, which is slower than C, because {refusal.reason}; to use C, {refusal.fix}")
    return ChosenAttention(_torch(needs), f"torch, because {refusal.reason}")


def _torch(needs: AttentionNeeds) -> PagedAttention:
    return PagedAttention(needs.memory, needs.query_heads, needs.layers, needs.dtype)


def _flashinfer(
    needs: AttentionNeeds, kind: PrefillKernels, kernels: Kernels, load: Callable[[], FlashInfer]
) -> FlashInferAttention | str:
    """FlashInfer with its kernels compiled, or why it cannot be. Raises ExecutorFailed if the device cannot go on after that."""
    try:
        made = FlashInferAttention(replace(needs, prefill=kind), kernels, load())
        made.load_kernels()
    except torch.OutOfMemoryError:
        raise
    except (ImportError, OSError, RuntimeError, SubprocessError) as error:  # compilers and kernels that fail are RuntimeErrors
        _log.warning("FlashInfer with chunks by %s cannot be used", kind, exc_info=True)
        check_device(needs.memory.pool.device, error)
        return first_reason(error)
    return made


def _imported() -> FlashInfer:
    import flashinfer

    library: FlashInfer = flashinfer
    return library


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
