"""The rules for joining the fleet: what an instance must be on its own, and what it must have in common with the other members.

Owns the rules and the reasons. Pure functions. Does not know who is a member. The numbers of a description from the wire are in
range, but need not fit each other, so nothing here may raise.
"""

from collections.abc import Hashable

from common.addresses import INSTANCE_NAME, check_address, check_instance_id
from common.errors import ConfigError, TransferError
from common.messages import WIRE_VERSION, InstanceInfo
from common.pages.layout import heads_of

ADVICE = {
    "context": ": give every instance the same --context-tokens",
    "--verify-pages": ": give every instance the same one; it must be off where an instance has several ranks (--tp)",
    "--grammar": ": give every instance the same",
}
"""What to do about a property that differs."""
MAX_WIRE_BYTES = 2**20
"""Limit on the transport's descriptors of an instance, over its pools. One Peers message holds those of all peers and must fit a
frame."""


def malformed(info: InstanceInfo) -> str | None:
    """Why this instance could not be a member of any fleet; None when it could."""
    try:
        check_instance_id(info.id)
        check_address(info.inbox)
    except ConfigError as error:
        return str(error)
    if INSTANCE_NAME.fullmatch(info.incarnation) is None:
        return "its incarnation must be 1 to 64 letters, digits, '.', '_' or '-'"
    if abs(info.wire_version - WIRE_VERSION) > 1:
        return f"wire version {info.wire_version} is not a neighbour of the router's {WIRE_VERSION}"
    if len(info.ranks) != len(info.pools):
        return f"it has {len(info.ranks)} ranks and {len(info.pools)} pools: each rank must have one"
    wire_bytes = sum(len(pool.wire) for pool in info.pools)
    if wire_bytes > MAX_WIRE_BYTES:
        return f"the transport descriptors of its pools have {wire_bytes} bytes, more than {MAX_WIRE_BYTES}"
    wrong = (_malformed_pool(info, rank) for rank in range(len(info.pools)))
    return next((reason for reason in wrong if reason is not None), None)


def _malformed_pool(info: InstanceInfo, rank: int) -> str | None:
    """What is wrong with the pool of this rank, on its own or behind those before it."""
    pool, first = info.pools[rank], info.pools[0]
    if not pool.is_addressable:
        return f"its pool of {pool.pool_bytes} bytes at address {pool.address} is not within 64-bit addresses"
    if not pool.has_known_device:
        return f"its pool's device must be cpu or cuda:N, is {pool.device[:80]!r}"
    if pool.total_pages != first.total_pages:
        return f"its ranks must have equally many pages: rank 0 has {first.total_pages}, rank {rank} has {pool.total_pages}"
    if pool.backend != first.backend:
        return f"its ranks must have one transport: rank 0 has {first.backend[:80]!r}, rank {rank} has {pool.backend[:80]!r}"
    if pool.layout != first.layout:
        return f"its ranks must have one KV layout: rank 0 has {first.layout}, rank {rank} has {pool.layout}"
    try:
        must = heads_of(rank, len(info.pools), _kv_heads(info))
    except TransferError as error:
        return f"its {error}"
    if range(pool.first_head, pool.first_head + pool.layout.kv_heads) != must:
        held = f"{pool.layout.kv_heads} from {pool.first_head} on"
        return f"its rank {rank} must hold {len(must)} KV heads from {must.start} on, holds {held}"
    return None


def _kv_heads(info: InstanceInfo) -> int:
    """KV heads of the whole model."""
    return info.model.kv_heads or info.pools[0].layout.kv_heads


def likeness(info: InstanceInfo, *, by_config: bool = True) -> tuple[tuple[str, Hashable], ...]:
    """The properties that must be equal in all members of a fleet, with their names. by_config: not by a fingerprint of weights,
    because they may change."""
    model, pool = info.model, info.pools[0]
    layout = pool.layout
    return (
        ("model config", model.config) if by_config and model.config else ("model fingerprint", model.fingerprint),
        ("architecture", model.architecture),
        ("dtype", model.dtype),
        ("vocabulary", model.vocab_size),
        ("context", model.context_tokens),
        ("page size", layout.page_size),
        ("KV dtype", layout.dtype),
        ("page order", layout.order),
        ("layout version", layout.version),
        ("KV layout", (layout.layers, _kv_heads(info), layout.head_dim)),
        ("transport", pool.backend),
        ("--verify-pages", "on" if info.verifies_pages else "off"),
        ("--grammar", "on" if info.holds_grammars else "off"),
    )


def difference(info: InstanceInfo, member: InstanceInfo) -> str | None:
    """The first property that must match a member's and does not, with both values; None when all match."""
    by_config = bool(info.model.config and member.model.config)  # older versions do not say
    pairs = zip(likeness(info, by_config=by_config), likeness(member, by_config=by_config), strict=True)
    for (name, asked), (_, expected) in pairs:
        if asked != expected:
            return f"its {name} is {asked}, but that of {member.id} in this fleet is {expected}{ADVICE.get(name, '')}"
    return None
