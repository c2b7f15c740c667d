"""How long a writer may write: the times on which both ends of a handoff rely.

Owns the numbers and their order. The target of a one-sided write cannot stop it. So a writer that is cut off stops by its own
clock, and the reader waits longer than that before it reuses the pages. Clocks are never compared: the writer counts from when it
*sent* its latest message that the reader has answered, the reader from when the writer's last message arrived, which is later.

    writer   sent ├────── WRITE_LEASE_S ──────┤ posts no slice ── OVERRUN_S ──┤ if a write is still in flight, the process ends
    reader      heard ├────── WRITE_LEASE_S ──────┼─────────── MARGIN_S ───────────┤ the pages come home
"""

WRITE_LEASE_S = 5.0
RENEW_S = 1.0
"""How often a writer renews its lease while a handoff is open."""
MARGIN_S = 15.0
"""Longer than a write that was posted under the lease takes to land: a transport gives up a silent link after 10 s."""
OVERRUN_S = 12.0
"""Shorter than MARGIN_S. A process that is this late was stopped, and its writes in flight would go on."""
RENEWALS_AFTER = 3
"""Renewals that follow the last handoff of a pair: they make up for a Handoff or Withdraw that was lost."""
