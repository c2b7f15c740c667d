"""A request on a prefill instance, and the phases of its life there.

Owns the record. Decides nothing: `scheduler.py` does.
"""

from dataclasses import dataclass
from enum import Enum, auto

from common.ids import Int32Array, Key, Life
from common.instance.line import Rank
from common.instance.prompts import PromptProgress
from common.messages import Generate
from common.pages.pool import PageLease
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
    """asked: what the router sent. decode: where the KV goes; None when the answer is one token. emitted: tokens sent to the
    client, 0 or 1. deadline_s, and sampled_s, when that was: on this instance's clock."""

    asked: Generate
    prompt: Int32Array
    decode: Life | None
    rank: Rank
    deadline_s: float = 0.0
    phase: Phase = Phase.WAITING
    lease: PageLease | None = None
    progress: PromptProgress | None = None
    source_open: bool = False
    emitted: int = 0
    sampled_s: float = 0.0

    @property
    def key(self) -> Key:
        return self.asked.key

    @property
    def sampling(self) -> SamplingParams:
        return self.asked.sampling

    @property
    def next_token(self) -> int:
        return self.asked.first + self.emitted

    @property
    def standing(self) -> int | None:
        return None if self.phase is Phase.ENDED else self.next_token
