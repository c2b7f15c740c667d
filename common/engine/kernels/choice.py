"""Which implementation of the kernels a device gets.

Owns the choice. Imports Triton only for CUDA: torch brings it along there, and other machines may not have it. A CPU gets C where
there is a compiler.
"""

from importlib.util import find_spec

import torch

from common.engine.kernels.native_kernels import load_native_kernels
from common.engine.kernels.port import Kernels
from common.engine.kernels.torch_kernels import TorchKernels


def make_kernels(device: torch.device) -> Kernels:
    if device.type == "cpu":
        return load_native_kernels() or TorchKernels()
    if device.type != "cuda" or find_spec("triton") is None:
        return TorchKernels()
    from common.engine.kernels.triton_kernels import TritonKernels

    return TritonKernels()
