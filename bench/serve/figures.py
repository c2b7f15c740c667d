"""The figures of a run: times, throughput, goodput and errors of its answers, under the names of `vllm bench serve`.

Owns the definitions. Pure. Percentiles are numpy's, linear between neighbours; standard deviations are those of the population.
Only whole answers count, but for `failed` and the kinds of errors. Differences from vLLM: several tokens in one event are one gap
and zeros, and the times of an open load count from when a request was due.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.serve.answers import Answer

Values = NDArray[np.float64]
GAPS_PERCENTILE = 99.0
"""An answer keeps a limit on `itl` when so many of its gaps, in percent, do."""


def figures_of(
    answers: Sequence[Answer],
    duration_s: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    limits_ms: Mapping[str, float],
) -> dict[str, Any]:
    """All that vLLM writes to its JSON of a run, and more: keys as there, times in ms. duration_s: of the whole run.
    limits_ms: of a good answer."""
    whole = [answer for answer in answers if not answer.error]
    inputs, outputs = (sum(getattr(each, name) for each in whole) for name in ("prompt_tokens", "output_tokens"))
    good = sum(is_good(answer, limits_ms) for answer in whole)
    peak_tokens, peak_open = peaks(whole)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(whole),
        "failed": len(answers) - len(whole),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": sum(answer.cached_tokens for answer in whole),
        "request_throughput": len(whole) / duration_s,
        "request_goodput": good / duration_s if limits_ms else None,
        "good_completed": good if limits_ms else None,
        "output_throughput": outputs / duration_s,
        "total_token_throughput": (inputs + outputs) / duration_s,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_open,
        "errors_by_kind": dict(sorted(Counter(answer.error for answer in answers if answer.error).items())),
        "shorter_than_asked": sum(answer.output_tokens < answer.asked_tokens for answer in whole),
    }
    for name, values in times_ms(whole).items():
        if name in metrics:
            figures |= summary(name, values, percentiles)
    figures["turns"] = by_turn(whole)
    return figures | summary("client_queue_time", np.array([1000 * answer.queue_s for answer in answers]), percentiles)


def by_turn(whole: Sequence[Answer]) -> list[dict[str, float]]:
    """The first tokens and the prompts of each turn of all conversations, the first turn first."""
    found = []
    for turn in sorted({answer.turn for answer in whole}):
        its = [answer for answer in whole if answer.turn == turn]
        p50, p99 = np.percentile([1000 * answer.ttft_s for answer in its], (50, 99)).tolist()
        inputs, cached = (sum(getattr(each, name) for each in its) for name in ("prompt_tokens", "cached_tokens"))
        found.append(
            {"completed": len(its), "p50_ttft_ms": p50, "p99_ttft_ms": p99, "input_tokens": inputs, "cached_tokens": cached}
        )
    return found


def times_ms(whole: Sequence[Answer]) -> dict[str, Values]:
    """Every value of each metric. ttft, e2el: of each answer. tpot: of each answer of several tokens. itl: of each gap."""
    gaps = [np.frombuffer(answer.gaps_s, np.float64) for answer in whole if answer.gaps_s]
    tpots = [tpot for answer in whole if (tpot := answer.tpot_s) is not None]
    return {
        "ttft": 1000 * np.array([answer.ttft_s for answer in whole]),
        "tpot": 1000 * np.array(tpots),
        "itl": 1000 * np.concatenate(gaps) if gaps else np.zeros(0),
        "e2el": 1000 * np.array([answer.e2el_s for answer in whole]),
    }


def summary(name: str, values_ms: Values, percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles, under vLLM's keys: mean_ttft_ms, p99_ttft_ms. All are 0 of no values."""
    values = values_ms if len(values_ms) else np.zeros(1)
    found = {"mean": np.mean(values), "median": np.median(values), "std": np.std(values)}
    found |= {f"p{each:g}": np.percentile(values, each) for each in percentiles}
    return {f"{which}_{name}_ms": float(value) for which, value in found.items()}


def is_good(answer: Answer, limits_ms: Mapping[str, float]) -> bool:
    """Whether an answer keeps all limits. An answer of one token keeps those on tpot and itl."""
    gaps = np.frombuffer(answer.gaps_s, np.float64) if answer.gaps_s else np.zeros(1)
    measured = {
        "ttft": answer.ttft_s,
        "tpot": answer.tpot_s or 0.0,
        "itl": float(np.percentile(gaps, GAPS_PERCENTILE)) if "itl" in limits_ms else 0.0,
        "e2el": answer.e2el_s,
    }
    return all(1000 * measured[name] <= limit for name, limit in limits_ms.items())


def peaks(whole: Sequence[Answer]) -> tuple[float, int]:
    """The most tokens in one second, seconds counted from the first sending, and the most requests that were open at once."""
    if not whole:
        return 0.0, 0
    origin_s = min(answer.sent_s for answer in whole)
    times = [answer.first_s + np.cumsum(np.concatenate([np.zeros(1), np.array(answer.gaps_s)])) for answer in whole]
    tokens = np.bincount((np.concatenate(times) - origin_s).astype(np.int64))
    changes = sorted([(answer.sent_s, 1) for answer in whole] + [(answer.last_s, -1) for answer in whole])
    return float(tokens.max()), int(np.cumsum([change for _, change in changes]).max())


def details_of(answers: Sequence[Answer], began_s: float) -> dict[str, list[Any]]:
    """What vLLM writes of each request with --save-detailed: times in seconds, of failed requests too. start_times: from the
    beginning of the run."""
    return {
        "input_lens": [answer.prompt_tokens for answer in answers],
        "output_lens": [0 if answer.error else answer.output_tokens for answer in answers],
        "ttfts": [answer.ttft_s if answer.counted else 0.0 for answer in answers],
        "itls": [answer.gaps_s.tolist() for answer in answers],
        "latencies": [answer.e2el_s if answer.counted else 0.0 for answer in answers],
        "start_times": [answer.sent_s - began_s for answer in answers],
        "queue_times": [answer.queue_s for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [f"{answer.error}: {answer.message}" if answer.error else "" for answer in answers],
    }
