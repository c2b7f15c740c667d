"""The parts of a rank that computes nothing: an executor whose steps take no time, and transfers that move nothing.

Owns these stand-ins. What is between ranks is the product's own.
"""

from common.engine.executor import EngineDescription
from common.engine.timed import Pace, StepCost, TimedExecutor
from common.instance.ports import TransferCommand, TransferEvent
from common.messages import ModelIdentity, PoolDescriptor
from common.pages.layout import KVLayout, MemoryRegion

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8, page_size=16, dtype="float32")
MODEL = ModelIdentity(
    name="none", fingerprint="", architecture="none", dtype="float32", vocab_size=1000, context_tokens=4096, kv_heads=1
)
POOL = PoolDescriptor(backend="none", agent="none", address=0, total_pages=1, device="cpu", layout=LAYOUT, wire=b"")
MOST_ROWS = 4096


def executor() -> TimedExecutor:
    region = MemoryRegion(address=0, region_bytes=LAYOUT.page_bytes, device="cpu")
    description = EngineDescription(
        model=MODEL, layout=LAYOUT, total_pages=1, max_rows=MOST_ROWS, memory=region, eos_token_ids=(), device="cpu"
    )
    return TimedExecutor(description, Pace(StepCost(0.0, 0.0, 0.0), lambda: 0.0))


class NoTransfers:
    """Implements `common.instance.ports.Transfers`."""

    progress_s = 0.0

    def submit(self, command: TransferCommand) -> None:
        """Nothing to move."""

    def poll(self) -> list[TransferEvent]:
        return []

    def close(self) -> None:
        """Nothing to close."""
