"""How long a writer may write: the times on which both ends of a handoff rely.

Owns the numbers and their order. The target of a one-sided write cannot stop it. So a writer that is cut off stops by its own
clock, and the reader waits longer than that before it reuses the pages. Clocks are never compared: the writer counts from when it
*sent* its latest message that the reader has answered, the reader from when the writer's last message arrived, which is later.

    writer   sent ├────── WRITE_LEASE_S ──────┤ posts no slice ── OVERRUN_S ──┤ if a write is still in flight, the process ends
    reader      heard ├────── WRITE_LEASE_S ──────┼─────────── MARGIN_S ───────────┤ the pages come home

A writer whose process is gone needs no lease to end: it posts nothing. That is proven when its host refuses connections to its
inbox, or another life has bound the same address. The kernel closes a process's sockets when the last of its threads has left,
which none does within a system call:

    a copy by the writer's thread (CMA, shared memory)   has ended, for the thread has
    RDMA                                                 the kernel destroys the queue pairs with the process's files; a card
                                                         sends nothing of a queue pair that is gone
    TCP                                                  what the process gave to its kernel still arrives, and our own thread
                                                         writes it to the pages when it reads it

So only TCP brings bytes of the dead. On one host its buffers (megabytes) empty as fast as we read, and were empty 16 ms after
a SIGKILL: the pages come home after ORPHANED_S, if they are in main memory and both inboxes have one address. Otherwise lost
packets are sent again until the connection's timeout of 10 s, or a device may copy a little longer than its process lives: the
pages come home after MARGIN_S. What has arrived by then is taken in first (`Settle`). Only the process of rank 0 is proven to be
gone, so writers of several ranks are fenced by silence. Until then pages of the dead count as in use, not as quarantined, for
they say nothing of this instance. A dead writer's last mail renews nothing: should it be alive after all, its lease runs out.
"""

WRITE_LEASE_S = 5.0
RENEW_S = 1.0
"""How often a writer renews its lease while a handoff is open."""
MARGIN_S = 15.0
"""Longer than a write that was posted under the lease takes to land: a transport gives up a silent link after 10 s."""
ORPHANED_S = 1.0
"""Bytes that a dead process of this host has left in its kernel arrive within this time."""
OVERRUN_S = 12.0
"""Shorter than MARGIN_S. A process that is this late was stopped, and its writes in flight would go on."""
RENEWALS_AFTER = 3
"""Renewals that follow the last handoff of a pair: they make up for a Handoff or Withdraw that was lost."""
