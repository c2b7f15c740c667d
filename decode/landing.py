"""Landings: whether a handoff fits the reservation that waited for it.

Owns the checks: what a writer says is verified wherever that is possible. Changes nothing.
"""

from dataclasses import dataclass

from common.executor import EngineDescription
from common.messages import Handoff
from kv_transfer.digests import Digest, corrupt_pages
from kv_transfer.handoff_target import Reservation


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a handoff cannot be decoded from. corrupt_pages: how many pages differ from what was sent."""

    reason: str
    corrupt_pages: int = 0


def find_objection(
    handoff: Handoff, reservation: Reservation, engine: EngineDescription, page_bytes: int, digest: Digest | None
) -> Objection | None:
    """The first thing in which a handoff does not fit its reservation. page_bytes: on all ranks together. digest: if given, the
    pages are compared too; the router sees to it that the writer sends digests then."""
    have = reservation.have_tokens // engine.layout.page_size
    pages = reservation.prompt_pages - have
    if handoff.pushed_pages != pages or handoff.pushed_bytes != pages * page_bytes:
        return Objection(f"{handoff.pushed_pages} pages and {handoff.pushed_bytes} bytes were pushed for {pages} pages")
    if not 0 <= handoff.first_token < engine.model.vocab_size:
        return Objection(f"its first token {handoff.first_token} is not in the vocabulary")
    if digest is not None:
        corrupt = corrupt_pages(handoff.digests, digest(reservation.lease.pages[have : reservation.prompt_pages]))
        if corrupt:
            return Objection(f"{corrupt} of {pages} pages differ from what was sent", corrupt)
    return None
