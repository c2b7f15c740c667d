"""The device of an instance, what is decided by it where a flag leaves it open, and whether it can go on after an error.

Owns those defaults. Knows no models and no memory.
"""

import torch

from common.config import Dtype, EngineConfig, with_step_size
from common.errors import ConfigError
from common.executor import ExecutorFailed
from common.pages.layout import KVDtype


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
