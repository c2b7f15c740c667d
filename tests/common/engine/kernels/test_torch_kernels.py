"""The kernels in plain torch."""

from common.engine.kernels.torch_kernels import TorchKernels
from tests.common.engine.kernels.contract import KernelsContract


class TestTorchKernels(KernelsContract):
    kernels = TorchKernels()
