"""The ranges of the numbers that cross process borders: what a field may hold, said by its type.

Owns the ranges. A decoder refuses a message with a number outside of its range. Each range has a bound on both sides, and NaN
compares as within none.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta

MOST_SECONDS = 1e9
"""The longest time limit that a flag can set: thirty years."""
_FINITE = 1e15
"""Seconds and bytes are far below it."""
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""How many, which one, or which version."""
Integer: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Size: TypeAlias = Annotated[int, Meta(ge=1, lt=2**31)]
"""The number of things of which there is at least one: pages, tokens of a page, heads."""
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
"""What `pack_ids` can pack."""
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=_FINITE)]
Number: TypeAlias = Annotated[float, Meta(ge=-_FINITE, le=_FINITE)]
Seconds: TypeAlias = Amount
"""How long something takes, or how old it is."""
Moment: TypeAlias = Number
"""What somebody's clock shows, in seconds."""
Interval: TypeAlias = Annotated[float, Meta(ge=1e-3, le=_FINITE)]
"""Seconds between two that follow each other."""
