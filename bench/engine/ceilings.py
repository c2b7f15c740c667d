"""What the device can do, measured in the run whose figures are shares of it: copies and products of matrices.

Owns the two measurements. Knows no engine.
"""

from collections.abc import Iterator

import torch

from bench.engine.device import current, timed_s
from bench.engine.figures import Ceilings
from bench.engine.plan import MeasureCeilings
from bench.report import Spread

COPY_BYTES = {"cuda": 2**32, "cpu": 2**26}
"""Many times what a cache holds."""
MATMUL_SIDE = {"cuda": 8192, "cpu": 512}
REPEATS = 20


def measure(task: MeasureCeilings) -> Iterator[Ceilings]:
    device = current(task.engine.device)
    side, dtype = MATMUL_SIDE[device.type], torch.bfloat16 if device.type == "cuda" else torch.float32
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    source.view(torch.int64).random_()
    target = torch.empty_like(source)
    copies = timed_s(lambda: target.copy_(source), device, REPEATS)
    a, b = torch.randn(2, side, side, device=device).to(dtype).unbind()
    out = torch.empty_like(a)
    products = timed_s(lambda: torch.mm(a, b, out=out), device, REPEATS)
    yield Ceilings(
        device=str(device),
        copy_gb_per_s=Spread.of(2 * len(source) / 1e9 / seconds for seconds in copies),
        matmul=f"{side}^3 {str(dtype).removeprefix('torch.')}",
        matmul_tflop_per_s=Spread.of(2 * side**3 / 1e12 / seconds for seconds in products),
    )
