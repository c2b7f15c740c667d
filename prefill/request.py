"""A request on a prefill instance, and the phases of its life there.

Owns the record. Decides nothing: `scheduler.py` does.
"""

from dataclasses import dataclass
from enum import Enum, auto

from common.ids import Incarnation, InstanceId, Int32Array, Key
from common.instance.prompts import PromptProgress
from common.pages.pool import Lease
from common.sampling_params import SamplingParams


class Phase(Enum):
    """
    WAITING ─► COMPUTING ─► HANDING_OFF ─► (gone)
       └───────────┴──────────────┴─────► ENDED ─► (gone once no step and no push is in flight)
    """

    WAITING = auto()
    COMPUTING = auto()
    HANDING_OFF = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """decode: where the KV goes; None when the answer is one token. emitted: tokens sent to the client, 0 or 1."""

    key: Key
    prompt: Int32Array
    packed_prompt: bytes
    sampling: SamplingParams
    decode: InstanceId | None
    decode_incarnation: Incarnation
    phase: Phase = Phase.WAITING
    lease: Lease | None = None
    progress: PromptProgress | None = None
    source_open: bool = False
    emitted: int = 0
