"""How many GPUs this process may use.

Owns the question. Uses none of them: a count takes no memory there.
"""

from collections.abc import Sequence
from pathlib import Path

DRIVER = (Path("/proc/driver/nvidia"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Where NVIDIA's driver shows itself: on Linux, in containers, in WSL."""


def count_gpus(driver: Sequence[Path] = DRIVER) -> int:
    """GPUs that torch can use, as CUDA_VISIBLE_DEVICES allows. A host without the driver answers at once: importing torch takes
    seconds."""
    if not any(path.exists() for path in driver):
        return 0
    import torch

    return torch.cuda.device_count()
