"""The kernels in plain torch."""

from engine.torch_kernels import Kernels
from tests.engine.kernels.contract import KernelsContract


class TestKernels(KernelsContract):
    kernels = Kernels()
