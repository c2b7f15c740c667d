"""What a simulated instance is made of.

Owns the numbers. Pure data.
"""

from dataclasses import dataclass

from common.instance.limits import InstanceLimits
from engine.timed import StepCost


@dataclass(frozen=True, kw_only=True)
class Looks:
    """How often a transfer loop looks what has become of its pushes, when it has none but awaits others', and when there are
    none."""

    busy_s: float = 0.025
    expecting_s: float = 0.2
    idle_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Size(InstanceLimits):
    """What an instance is made of, with its limits. pages: of 4 tokens each in the toy. rows: requests that run at once.
    prepare_s: how long a grammar takes to be ready. apart: each instance has a host of its own."""

    pages: int = 64
    rows: int = 4
    chunk_tokens: int = 8
    max_waiting: int = 64
    request_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    cost: StepCost = StepCost(step_s=0.001, chunk_token_s=0.0, decode_row_s=0.0)
    verify_pages: bool = False
    apart: bool = False
    looks: Looks = Looks()
    prepare_s: float = 0.0
