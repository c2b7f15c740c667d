"""The report of a run: a table for a terminal, the JSON file, and the CSV file.

Owns how they look. Measures nothing.
"""

import csv
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.serve.answers import Answer
from bench.serve.plan import ServeBench
from bench.tables import text_table

NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
SHOWN_MESSAGES = 5
COLUMNS = (
    *("session", "turn", "due_s", "sent_s", "input_tokens", "cached_tokens", "output_tokens"),
    *("ttft_ms", "tpot_ms", "max_itl_ms", "e2el_ms", "error", "message"),
)


def text(bench: ServeBench, figures: dict[str, Any], answers: Sequence[Answer]) -> str:
    """For a terminal."""
    lines = [
        ("requests", f"{figures['completed']:,} whole, {figures['failed']:,} failed in {figures['duration']:.2f} s"),
        ("requests/s", f"{figures['request_throughput']:.2f}"),
        ("input tokens", f"{figures['total_input_tokens']:,}, {figures['total_cached_tokens']:,} of them cached"),
        ("output tokens", f"{figures['total_output_tokens']:,}"),
        ("output tokens/s", f"{figures['output_throughput']:.2f}, {figures['max_output_tokens_per_s']:,.0f} in the best second"),
        ("all tokens/s", f"{figures['total_token_throughput']:.2f}"),
        ("most requests at once", f"{figures['max_concurrent_requests']:,}"),
    ]
    if figures["request_goodput"] is not None:
        limits = ", ".join(f"{NAMES[name]} {limit:g} ms" for name, limit in bench.results.limits_ms.items())
        share = figures["good_completed"] / max(1, len(answers))
        lines.append(("goodput", f"{figures['request_goodput']:.2f} requests/s, {share:.1%} of the requests, within {limits}"))
    if bench.is_open:
        late = figures["mean_client_queue_time_ms"]
        lines.append(("sent after it was due", f"{late:.2f} ms on average; TTFT and E2E count from when it was due"))
    if figures["shorter_than_asked"]:
        lines.append(("shorter than asked", f"{figures['shorter_than_asked']:,} answers"))
    width = max(len(name) for name, _ in lines)
    body = [f"{name.rjust(width)}  {value}" for name, value in lines]
    turns = ["", text_table(_turns(figures["turns"]))] if len(figures["turns"]) > 1 else []
    return "\n".join([*body, "", text_table(_times(bench, figures)), *turns, *_errors(figures, answers)])


def contents(
    bench: ServeBench, model: str, command: str, figures: dict[str, Any], details: dict[str, list[Any]]
) -> dict[str, Any]:
    """Of the JSON file. details: of each request; empty to leave them out."""
    load, ramp = bench.load, {}
    if load.ramp_up_strategy != "none":
        names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        ramp = {name: getattr(load, name) for name in names}
    head = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": bench.target.backend,
        "backend": bench.target.backend,
        "label": None,
        "model_id": model,
        "tokenizer_id": bench.workload.tokenizer or model,
        "num_prompts": bench.workload.num_prompts or figures["completed"] + figures["failed"],
        "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
        "burstiness": "inf" if math.isinf(load.burstiness) else load.burstiness,
        "max_concurrency": load.max_concurrency or None,
        "dataset_name": bench.workload.dataset_name,
        "seed": bench.workload.seed,
        "command": command,
    }
    return head | ramp | figures | details


def write_csv(path: str, answers: Sequence[Answer], began_s: float) -> None:
    """A line for each request, times in seconds from the beginning of the run. Times that there are not are empty."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(COLUMNS)
        for answer in answers:
            lines.writerow(_line(answer, began_s))


def _line(answer: Answer, began_s: float) -> list[object]:
    times: list[object] = [""] * 4
    if answer.counted:
        tpot, gap = answer.tpot_s, max(answer.gaps_s, default=None)
        values = (answer.ttft_s, tpot, gap, answer.e2el_s)
        times = ["" if value is None else f"{1000 * value:.3f}" for value in values]
    counts = (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens)
    when = (f"{answer.due_s - began_s:.6f}", f"{answer.sent_s - began_s:.6f}")
    return [answer.session, answer.turn, *when, *counts, *times, answer.error, answer.message]


def _times(bench: ServeBench, figures: dict[str, Any]) -> list[tuple[str, ...]]:
    which = ["mean", "std", *(f"p{each:g}" for each in bench.results.percentiles)]
    lines: list[tuple[str, ...]] = [("ms", *which)]
    for name in bench.results.metrics:
        lines.append((NAMES[name], *(f"{figures[f'{each}_{name}_ms']:.2f}" for each in which)))
    return lines


def _turns(turns: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("turn", "answers", "TTFT, ms: p50", "p99", "input tokens", "cached")]
    for number, its in enumerate(turns, start=1):
        times, inputs = (f"{its[f'{which}_ttft_ms']:.2f}" for which in ("p50", "p99")), its["input_tokens"]
        counts = (f"{inputs / its['completed']:.0f}", f"{its['cached_tokens'] / max(1, inputs):.1%}")
        lines.append((str(number), str(its["completed"]), *times, *counts))
    return lines


def _errors(figures: dict[str, Any], answers: Sequence[Answer]) -> list[str]:
    if not figures["failed"]:
        return []
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in figures["errors_by_kind"].items())
    messages = Counter(f"{answer.error}: {answer.message}" for answer in answers if answer.error)
    shown = [f"  {count:,} × {message}" for message, count in messages.most_common(SHOWN_MESSAGES)]
    return ["", f"failed: {kinds}", *shown]
