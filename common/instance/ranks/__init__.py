"""One instance, many ranks: how the leader's executor and transfers reach over all ranks, and what a follower does.

Owns nothing itself. The messages and what holds between ranks are in `common/messages/ranks.py`; processes are in `launch`.

    rank 0 (leader)                                              rank r (follower)
    InstanceWorker: mail, scheduler                              FollowerLoop: no scheduler, no mail but the leader's
      RankedExecutor ─┬─ its own executor                          its own executor
                      └─ Followers ── Launch, PrepareGrammar ──►
      Transfers ──────┬─ its own                                   its own transfers
                      └─ RemoteTransfers ── TransferOrder ─────►

No class here opens a socket or reads a clock: the simulation of a fleet runs them as processes do.
"""
