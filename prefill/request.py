"""A request on a prefill instance: what it adds to the shared record. Decides nothing: `scheduler.py` does."""

from dataclasses import dataclass

from common.instance.request import Request


@dataclass(slots=True, eq=False)
class PrefillRequest(Request):
    """Its peer is the decode instance that its KV goes to.

    source_open: pushes may still read its pages. sampled_s: when the first token was sampled, on this instance's clock.
    """

    source_open: bool = False
    sampled_s: float = 0.0
