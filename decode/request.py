"""A request on a decode instance, and the phases of its life there.

Owns the record. Decides nothing: `scheduler.py` does.
"""

from dataclasses import dataclass
from enum import Enum, auto

from common.ids import InstanceId, Int32Array, Key
from common.instance.prompts import PromptProgress
from common.pages.pool import Lease
from common.sampling_params import SamplingParams


class Phase(Enum):
    """
    WAITING ─► RESERVED ────────► DECODING ─► ENDED ─► (gone once no step in flight names its row)
       └─────► COMPUTING (local prefill) ─►┘
    """

    WAITING = auto()
    RESERVED = auto()
    COMPUTING = auto()
    DECODING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """source: the prefill instance that sends the KV; None when this instance computes the prompt itself.

    row: its place in the batch from admission on. first: number of the first token that this instance emits.
    """

    key: Key
    prompt: Int32Array
    sampling: SamplingParams
    source: InstanceId | None
    phase: Phase = Phase.WAITING
    lease: Lease | None = None
    row: int | None = None
    progress: PromptProgress | None = None

    @property
    def first(self) -> int:
        return 0 if self.source is None else 1
