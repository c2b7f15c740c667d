"""A request on a decode instance, and the phases of its life there.

Owns the record. Decides nothing: `scheduler.py` does.
"""

from dataclasses import dataclass
from enum import Enum, auto

from common.ids import Int32Array, Key, Life
from common.instance.line import Rank
from common.instance.prompts import PromptProgress
from common.messages import Failed, Generate, Reserve
from common.pages.pool import PageLease
from common.sampling_params import SamplingParams


class Phase(Enum):
    """
    WAITING ─► RESERVED ────────► DECODING ─► ENDED ─► (gone once no step in flight names its row, and no writer its pages)
       └─────► COMPUTING (local prefill) ─►┘
    """

    WAITING = auto()
    RESERVED = auto()
    COMPUTING = auto()
    DECODING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """asked: what came in: a Reserve, whose KV its writer sends, or a Generate, whose prompt is computed here.

    row: its place in the batch from admission on. emitted: tokens of this attempt that the client has or is being sent.
    untold: how it ended while its writer was to tell the client; if the writer has handed off instead, we must.
    settles: its pages wait until what has arrived for them is in memory.
    """

    asked: Reserve | Generate
    prompt: Int32Array
    writer: Life | None
    rank: Rank
    phase: Phase = Phase.WAITING
    lease: PageLease | None = None
    row: int | None = None
    progress: PromptProgress | None = None
    emitted: int = 0
    untold: Failed | None = None
    settles: bool = False

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

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is ever written: the last token of the answer is never fed back."""
        return len(self.prompt) + self.sampling.max_new_tokens - 1
