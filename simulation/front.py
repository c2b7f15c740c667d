"""What requests and tokens cost before and behind the instances: HTTP, the chat template, tokenizing, text and events.

Owns these costs, how a flag spells them, and a process that they occupy. Does not know who measures them.

    client ─► HTTP, template, tokenizing ─► router … instances … ─► detokenizer ─► router: events ─► client
              request_s + tokens * prompt_token_s                   token_s each   event_s each
"""

import msgspec

from common.options import parse_numbers, require
from common.ranges import Seconds

MEASURE = "measure"
FRONT_COSTS = "0.001,0.000001,0.00001,0.00005"


class FrontCosts(msgspec.Struct, frozen=True):
    """Seconds of one core."""

    request_s: Seconds = 0.0
    """A request occupies its router."""
    prompt_token_s: Seconds = 0.0
    """A token of its prompt delays it, on a thread of its own."""
    token_s: Seconds = 0.0
    """A token of an answer occupies the detokenizer."""
    event_s: Seconds = 0.0
    """An event of a stream occupies the router, until its client has read it."""

    @classmethod
    def parse(cls, text: str) -> "FrontCosts":
        """Those that a flag spells as four numbers of seconds. Raises ConfigError."""
        rule = f"four numbers of seconds such as {FRONT_COSTS}, or {MEASURE}"
        costs = parse_numbers(text, "front", float, rule)
        require(len(costs) == 4 and all(0 <= cost < 1 for cost in costs), "front", rule, text)
        return cls(*costs)

    @property
    def spelled(self) -> str:
        """As the flag takes them."""
        return ",".join(f"{cost:.3g}" for cost in msgspec.structs.astuple(self))
