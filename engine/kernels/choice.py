"""Which implementation of the kernels a device gets.

Owns the choice. Imports Triton only for CUDA: torch brings it along there, and other machines may not have it. A CPU gets C where
there is a compiler.
"""

import logging
from importlib.util import find_spec

import torch

from common.errors import ConfigError
from engine.cpu import build
from engine.cpu.kernels import load_native_kernels
from engine.kernels.port import Kernels
from engine.kernels.torch_kernels import TorchKernels

_log = logging.getLogger(__name__)


def make_kernels(device: torch.device) -> Kernels:
    """Raises ConfigError where Triton is there and cannot compile: it would fail at the first step."""
    if device.type == "cpu":
        return load_native_kernels() or TorchKernels()
    if find_spec("triton") is None:
        _log.warning("Triton is not installed, so torch computes the small operations on %s, which is slower", device)
        return TorchKernels()
    lacking = build.for_triton()
    if lacking:
        raise ConfigError(
            f"Triton compiles kernels for {device}, and there is {build.none_of(lacking)} here: {build.fixes(lacking)}"
        )
    from engine.kernels.triton_kernels import TritonKernels

    return TritonKernels()
