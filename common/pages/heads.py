"""Which KV heads a rank holds.

Owns that division, which the model and the planner of transfers share. Knows numbers only.
"""

from common.errors import TransferError


def heads_of(rank: int, ranks: int, kv_heads: int) -> range:
    """The KV heads that a tensor-parallel rank holds: a share of them, or one head that several ranks hold.

    A latent cache (MLA) is one head that every rank holds. Raises TransferError unless one number divides the other.
    """
    if ranks <= kv_heads and kv_heads % ranks == 0:
        share = kv_heads // ranks
        return range(rank * share, (rank + 1) * share)
    if ranks % kv_heads == 0:
        head = rank * kv_heads // ranks
        return range(head, head + 1)
    raise TransferError(f"{kv_heads} KV heads cannot be divided among {ranks} ranks")
