"""Landings: whether what was handed off is what its reservation waited for.

Owns the checks: what a writer says is not believed where it can be seen. Changes nothing.
"""

from dataclasses import dataclass

from common.engine.executor import EngineDescription
from common.messages import Handoff
from kv_transfer.digests import Digest, corrupt_pages
from kv_transfer.handoff_target import Reservation


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a handoff cannot be decoded from. corrupt_pages: how many are not as they were sent."""

    reason: str
    corrupt_pages: int = 0


def find_objection(
    handoff: Handoff, reservation: Reservation, engine: EngineDescription, digest: Digest | None
) -> Objection | None:
    """What of a handoff does not fit its reservation. digest: compares the pages too, if the writer sent their digests."""
    have = reservation.have_tokens // engine.layout.page_size
    pages = reservation.prompt_pages - have
    if handoff.pushed_pages != pages or handoff.pushed_bytes != pages * engine.layout.page_bytes:
        return Objection(f"{handoff.pushed_pages} pages and {handoff.pushed_bytes} bytes were pushed for {pages} pages")
    if not 0 <= handoff.first_token < engine.model.vocab_size:
        return Objection(f"its first token {handoff.first_token} is not in the vocabulary")
    if digest is not None and handoff.digests:
        corrupt = corrupt_pages(handoff.digests, digest(reservation.lease.pages[have : reservation.prompt_pages]))
        if corrupt:
            return Objection(f"{corrupt} of {pages} pages are not as they were sent", corrupt)
    return None
