"""The cut into batches: whatever a turn brings, no frame is too large and nothing is lost or reordered."""

import msgspec
import pytest

from common.mail import MAX_FRAME_BYTES
from common.messages import TextDelta
from common.text.detokenizer import BATCH_BYTES, BATCH_DELTAS, cut
from tests.builders import key


def delta(number: int, chars: int) -> TextDelta:
    return TextDelta(key(), number, (number,), "x" * chars)


@pytest.mark.parametrize(
    ("deltas", "chars"), [(0, 0), (1, 4), (BATCH_DELTAS, 4), (10 * BATCH_DELTAS + 1, 4), (30, 3 * 2**20), (2, BATCH_BYTES)]
)
def test_batches_hold_everything_in_order_and_each_fits_a_frame(deltas: int, chars: int) -> None:
    whole = [delta(number, chars) for number in range(deltas)]
    batches = list(cut(whole))
    assert [one for batch in batches for one in batch.deltas] == whole
    for batch in batches:
        assert 1 <= len(batch.deltas) <= BATCH_DELTAS
        batch_bytes = len(msgspec.msgpack.encode(batch))
        assert batch_bytes < MAX_FRAME_BYTES / 2
        assert batch_bytes <= BATCH_BYTES + 64 or len(batch.deltas) == 1


def test_what_fits_one_batch_is_one() -> None:
    assert len(list(cut(delta(number, 8) for number in range(BATCH_DELTAS)))) == 1
