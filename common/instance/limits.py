"""What bounds an instance, whatever its role.

Owns the numbers' names. Made from flags by whoever composes the process.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class InstanceLimits:
    """chunk_tokens: of one forward. max_waiting: requests that wait. request_timeout_s: longest life of a request here.

    drain_timeout_s: how long a draining instance lets its requests run before it hands them off.
    """

    chunk_tokens: int
    max_waiting: int
    request_timeout_s: float
    drain_timeout_s: float
