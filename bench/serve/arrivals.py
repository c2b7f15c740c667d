"""When each request is due: all at once, evenly, at random, in bursts, or at a rate that grows.

Owns the drawing of times. Pure: the same seed makes the same times. The definitions are those of `vllm bench serve`.
"""

import math

import numpy as np
from numpy.typing import NDArray

from bench.serve.plan import Load


def due_times(load: Load, requests: int, seed: int) -> NDArray[np.float64]:
    """Seconds from the beginning, [requests] float64, never falling.

    Gaps are drawn from a gamma distribution with the shape `burstiness`. Without a ramp the times are then stretched so that the
    last one is due at requests / rate: runs with different seeds have the same rate.
    """
    rates = rates_of(load, requests)
    if not requests or np.isinf(rates).any():
        return np.zeros(requests)
    if math.isinf(load.burstiness):
        return np.cumsum(1 / rates)
    gaps = np.random.default_rng(seed).gamma(load.burstiness, 1 / (rates * load.burstiness))
    times: NDArray[np.float64] = np.cumsum(gaps)
    if load.ramp_up_strategy == "none":
        times *= requests / load.request_rate / times[-1]
    return times


def rates_of(load: Load, requests: int) -> NDArray[np.float64]:
    """Requests a second when each request comes, [requests]."""
    progress = np.arange(requests) / max(requests - 1, 1)
    start, end = load.ramp_up_start_rps, load.ramp_up_end_rps
    match load.ramp_up_strategy:
        case "none":
            return np.full(requests, load.request_rate)
        case "linear":
            return start + (end - start) * progress
        case "exponential":
            ramp: NDArray[np.float64] = start * (end / start) ** progress
            return ramp
