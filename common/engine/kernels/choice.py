"""Which implementation of the kernels a device gets.

Knows no models and no tensors."""

import torch

from common.engine.kernels.port import Kernels
from common.engine.kernels.torch_kernels import TorchKernels


def make_kernels(device: torch.device) -> Kernels:
    return TorchKernels()
