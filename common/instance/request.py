"""A request on an instance, and the phases of its life there.

Owns the record that both roles keep; a role adds fields of its own. Decides nothing: the role's scheduler does.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from common.engine.plan import RowStart
from common.ids import InstanceId, Int32Array, Key, Life
from common.instance.prompts import PromptProgress
from common.instance.token_memory import Emitted
from common.instance.waiting_line import Rank
from common.messages import Ending, Generate, Reserve
from common.pages.pool import PageLease


class Phase(Enum):
    """From any phase a request may go to ENDED. It is gone when no step and no write can touch its pages any more.

    prefill   WAITING ─► COMPUTING ─► HANDING_OFF ─► ENDED ─► (gone)
    decode    WAITING ─► RESERVED ────────────► DECODING ─► ENDED ─► (gone)
                 └─────► COMPUTING (local prefill) ─►┘
    """

    WAITING = auto()
    RESERVED = auto()
    COMPUTING = auto()
    HANDING_OFF = auto()
    DECODING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """asked: the message that brought it. peer: the instance that its KV goes to or comes from; None when this instance serves it
    alone. decode: the life of the decode instance that has granted the reservation, on its prefill instance. pages: to be leased
    on admission. accepted_s, deadline_s: on this instance's clock. next_token: number of the token that this instance emits next.
    token_ids: the tokens up to there that are known here. told: the ending that was emitted. pipeline: who gets them.
    """

    asked: Generate | Reserve
    key: Key
    prompt: Int32Array
    peer: Life | None
    rank: Rank
    pages: int
    accepted_s: float
    deadline_s: float
    next_token: int
    pipeline: InstanceId
    phase: Phase = Phase.WAITING
    lease: PageLease | None = None
    progress: PromptProgress | None = None
    decode: Life | None = None
    token_ids: list[int] = field(default_factory=list)
    told: Ending | None = None

    def note(self, token_id: int) -> None:
        """The token goes to the client, or has gone there by another instance."""
        self.token_ids.append(token_id)
        self.next_token += 1

    def row_start(self, row: int, length: int = 0, last_token: int | None = None) -> RowStart:
        """The request begins in this row, on its leased pages. length, last_token: see `RowStart`."""
        assert self.lease is not None
        sampling, token_ids = self.asked.sampling, None
        if sampling.needs_tokens:
            token_ids = np.concatenate([self.prompt, np.array(self.token_ids, dtype=np.int32)])
        return RowStart(row, self.lease.pages, sampling, length, last_token, token_ids, self.asked.first + len(self.token_ids))

    @property
    def emitted(self) -> Emitted:
        """What can be sent again."""
        return Emitted(self.next_token - len(self.token_ids), self.token_ids, self.told)
