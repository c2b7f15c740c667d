"""What a simulated instance of the tests computes and writes with: the toy engine and the in-process transport.

Owns nothing: it gives them their types.
"""

from engine.toy import ToyExecutor
from kv_transfer.memory import MemoryTransport
from simulation.instance import Instance


def toy_of(instance: Instance) -> ToyExecutor:
    assert isinstance(instance.engine, ToyExecutor)
    return instance.engine


def toys_of(instance: Instance) -> list[ToyExecutor]:
    """Those of all ranks."""
    engines = [instance.engine, *(follower.rank.engine for follower in instance.followers)]
    return [engine for engine in engines if isinstance(engine, ToyExecutor)]


def transport_of(instance: Instance) -> MemoryTransport:
    assert isinstance(instance.transport, MemoryTransport)
    return instance.transport
