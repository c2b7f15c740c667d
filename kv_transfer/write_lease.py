"""How long a writer may write: the times on which both ends of a handoff rely.

Owns the numbers and their order. A one-sided write cannot be stopped by its target, so a writer that is cut off stops by its own
clock, and the reader waits longer than that before it gives the pages to somebody else. Clocks are never compared: the writer
counts from the moment when it *sent* its latest word that the reader has answered, the reader from the moment when it heard the
writer's last word, which is later.

    writer   sent ├────── WRITE_LEASE_S ──────┤ posts no slice ── OVERRUN_S ──┤ a write that is still in flight ends the process
    reader      heard ├────── WRITE_LEASE_S ──────┼─────────── MARGIN_S ───────────┤ the pages come home
"""

WRITE_LEASE_S = 5.0
RENEW_S = 1.0
"""How often a writer says that it is alive while a handoff is open."""
MARGIN_S = 15.0
"""Longer than what was posted under the lease may take to land: a transport gives up a silent link after 10 s."""
OVERRUN_S = 12.0
"""Shorter than MARGIN_S. A process that finds itself so late has been stopped, and what it had in flight would go on."""
RENEWALS_AFTER = 3
"""Renewals after the last handoff of a pair has closed: they heal a Handoff or Withdraw that was lost."""
