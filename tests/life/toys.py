"""What a simulated instance of the tests computes and writes with: the toy engine and the in-process transport.

Owns nothing: it gives them their types.
"""

from tests.engine.toy import ToyExecutor
from tests.kv_transfer.memory import MemoryTransport
from tests.life.ranks import ToyInstance


def toy_of(instance: ToyInstance) -> ToyExecutor:
    assert isinstance(instance.rank.engine, ToyExecutor)
    return instance.rank.engine


def toys_of(instance: ToyInstance) -> list[ToyExecutor]:
    """Those of all ranks."""
    engines = [rank.engine for rank in instance.ranks]
    return [engine for engine in engines if isinstance(engine, ToyExecutor)]


def transport_of(instance: ToyInstance) -> MemoryTransport:
    assert isinstance(instance.rank.transport, MemoryTransport)
    return instance.rank.transport
