"""The /cluster page: the last report of every instance and detokenizer, the instances that left or were refused, and the
router's open requests; and whether an instance may be deleted.

Owns the shape of these pages. Does not know HTTP.
"""

import asyncio
from collections import Counter
from typing import Any

from msgspec import Raw, Struct
from msgspec.json import encode
from msgspec.structs import asdict

from common.ids import ROLES
from common.messages import WIRE_VERSION
from router.attempts import Phase
from router.core import RouterCore
from router.members import Member
from router.scaling import role_figures


class SafeToDelete(Struct, frozen=True):
    """Whether nothing is lost with an instance."""

    id: str
    safe_to_delete: bool
    reasons: list[str]
    """Why not; empty when it is."""


DEPARTED_SHOWN = 32
"""How many of the latest departures are shown."""
PIECE = 50
"""How many instances are described in one turn of the loop."""


async def cluster_page(core: RouterCore) -> dict[str, Any]:
    """The page as builtins, messages and pieces of JSON, ready for JSON. The loop turns between two pieces."""
    pieces: list[bytes] = []
    members = list(core.fleet.members())
    for first in range(0, len(members), PIECE):
        pieces.append(b",".join([encode(_instance(member)) for member in members[first : first + PIECE]]))
        await asyncio.sleep(0)
    departed = [(each.member.info, each.reason) for each in list(core.fleet.departed.values())[-DEPARTED_SHOWN:]]
    phases = Counter(record.phase for record in core.requests.records())
    return {
        "router": {
            "wire_version": WIRE_VERSION,
            "requests_open": len(core.requests),
            "phases": {phase.value: phases[phase] for phase in Phase},
            "queue_depth": phases[Phase.AWAITING],
            "unread_chars": sum(client.unread_chars for client in core.requests.clients),
            "messages_stale": core.requests.stale + core.requests.retelling.stale_standings + core.fleet.stale,
            "prediction_errors": core.requests.placer.prediction_errors(),
            "unready": core.unready(),
            "settled": core.fleet.peering.settled,
        },
        "roles": {role: role_figures(core.fleet, role) for role in ROLES},
        "kept": core.scaling.kept,
        "detokenizers": [
            {"shard": shard, "silent": watch.silent} | ({} if watch.last is None else asdict(watch.last))
            for shard, watch in enumerate(core.detokenizers)
        ],
        "instances": Raw(b"[" + b",".join(pieces) + b"]"),
        "departed": [
            {"id": info.id, "incarnation": info.incarnation, "role": info.role, "reason": reason} for info, reason in departed
        ],
        "refused": [{"id": name, "reason": refusal.reason} for name, refusal in core.fleet.refused.items()],
    }


def _instance(member: Member) -> dict[str, Any]:
    info, trouble = member.info, member.trouble
    return {
        "id": info.id,
        "incarnation": info.incarnation,
        "wire_version": info.wire_version,
        "role": member.role,
        "state": "live" if trouble is None else trouble.state,
        "reason": None if trouble is None else trouble.reason,
        "inbox": info.inbox,
        "ranks": info.ranks,
        "model": info.model,
        "max_running": info.max_running,
        "page_size": info.page_size,
        "page_bytes": info.page_bytes,
        "transport": info.pools[0].backend,
        "pages_free": member.load.pages_free,
        "pages_total": info.total_pages,
        "load": asdict(member.load),
        "counters": member.counters,
        "assigned_tokens": member.assigned_tokens,
        "peers": len(member.partners),
        "links": Counter(member.links.values()),
        "usable": len(member.usable),
    }
