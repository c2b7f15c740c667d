"""The cut of what one turn of the detokenizer brought into batches.

Owns how large a batch may be. Does not know sockets or texts.
"""

from collections.abc import Iterable, Iterator

import msgspec

from common.messages import TextBatch, TextDelta

BATCH_BYTES = 4 * 2**20
"""No batch is larger, so none comes near the limit of a frame; only a single delta may be."""
BATCH_DELTAS = 512
"""The router takes in a whole batch before it looks at anything else."""

_encode = msgspec.msgpack.Encoder().encode


def cut(deltas: Iterable[TextDelta]) -> Iterator[TextBatch]:
    """All of them, in order."""
    batch: list[TextDelta] = []
    batch_bytes = 0
    for delta in deltas:
        delta_bytes = len(_encode(delta))
        if batch and (batch_bytes + delta_bytes > BATCH_BYTES or len(batch) == BATCH_DELTAS):
            yield TextBatch(deltas=tuple(batch))
            batch, batch_bytes = [], 0
        batch.append(delta)
        batch_bytes += delta_bytes
    if batch:
        yield TextBatch(deltas=tuple(batch))
