"""The limits of an instance, whatever its role.

Owns their names. The process makes them from its flags.
"""

from dataclasses import dataclass

from common.sampling_params import ANSWER_TOKENS


@dataclass(frozen=True, kw_only=True)
class InstanceLimits:
    """chunk_tokens: most prompt tokens of one forward. max_waiting: most requests that wait. request_timeout_s: longest life of a
    request here. drain_timeout_s: how long a draining instance lets its requests run before it ends them. answer_tokens: how
    long an answer is expected to be, until some have ended. prefix_cache: whether KV is kept for later requests that begin alike.
    """

    chunk_tokens: int
    max_waiting: int
    request_timeout_s: float
    drain_timeout_s: float
    answer_tokens: int = ANSWER_TOKENS
    prefix_cache: bool = True
