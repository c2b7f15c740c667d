"""The kernels in plain torch."""

from engine.torch_kernels import TorchKernels
from tests.engine.kernels.contract import KernelsContract


class TestTorchKernels(KernelsContract):
    kernels = TorchKernels()
