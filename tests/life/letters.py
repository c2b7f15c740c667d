"""What a letter of a simulated fleet is about.

Owns the list of messages. Knows no network.
"""

from typing import assert_never

from common import messages as m
from common.ids import AttemptId
from common.messages import AnyMessage
from common.messages.ranks import Numbered, RankHello, RankRefused, RankWelcome, TransferOrder
from common.messages.transfers import PackedPush, Settle

MEMBERSHIP = frozenset({"Heartbeat", "Register", "Welcome", "Peers", "TellLinks", "LinkReport", "DetokenizerHeartbeat"})
"""Kinds of letters that are sent all the time."""


def keys_of(message: AnyMessage) -> set[AttemptId]:
    """The requests that a message is about."""
    match message:
        case m.TokenBatch() | m.TextBatch():
            return {delta.key for delta in message.deltas}
        case m.Renew():
            return {claim.key for claim in message.claims}
        case m.Renewed():
            return set(message.over)
        case m.Probe():
            return set(message.keys)
        case m.Repeat():
            return {key for key, _ in message.tokens}
        case m.Probed():
            return {standing.key for standing in message.standings}
        case m.Generate() | m.Cancel() | m.Placed() | m.Reserve() | m.Grant() | m.Decline() | m.Handoff() | m.Withdraw():
            return {message.key}
        case m.ExpectAnswer() | m.ForgetAnswer():
            return {message.key}
        case m.Register() | m.Heartbeat() | m.Goodbye() | m.DetokenizerHeartbeat() | m.Welcome() | m.Refused() | m.Peers():
            return set()
        case m.Drain() | m.FlushCache() | m.TellCache() | m.CacheChanges() | m.TellLinks() | m.LinkReport():
            return set()
        case m.Trace() | m.Spans():
            return set()
        case m.StageWeights() | m.WeightsStaged() | m.SwitchWeights() | m.DropWeights() | m.HoldSteps():
            return set()
        case m.DoTask() | m.TaskDone():
            return set()
        case m.SetAdapters() | m.AdaptersHeld() | m.TakeRole() | m.RoleKept():
            return set()
        case TransferOrder(order=PackedPush() | Settle() as order):
            return {order.key}
        case Numbered() | RankHello() | RankWelcome() | RankRefused():
            return set()
        case _:
            assert_never(message)
