"""`launch bench serve`: asks the server what it serves, warms it up, sends the load, and reports what its clients see.

Owns when each request is sent, the definitions of the figures, and the report. `bench/client.py` sends, `bench/workloads.py`
knows what. `measure` is for other instruments: it prints nothing.

The load is open or closed. A session whose time has come is started whatever else is open, or, with --max-concurrency, when one
of the places is free; it keeps its place until its last turn has ended. A later turn is due when the one before it has ended; a
turn that fails ends its session. Times of an open load count from when a request was due, so that requests which a slow server
kept from being sent are not forgotten (coordinated omission).

Keys, names and definitions are those of `vllm bench serve`, with two differences: several tokens in one event are one gap and
zeros, and the times of an open load count from when a request was due. Percentiles are numpy's, linear between neighbours;
standard deviations are those of the population. Only whole answers count, but for `failed` and the kinds of errors."""

import asyncio
import contextlib
import csv
import gc
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray
from tqdm import tqdm

from bench.client import USAGE_FIELDS, HttpClient, TimedAnswer, UsageReports, tls_context
from bench.options import LoadOptions, ResultOptions, ServeOptions
from bench.report import say, text_table, write_figures
from bench.workloads import LoadSession, LoadSessions, RequestBodies, sessions_of
from common.errors import INTERRUPTED, TandemError
from common.host import allow_many_files
from common.processes.local_fleet import local_fleet
from common.processes.router_client import RequestFailed, RouterClient

LIST_S = 60.0
EARLY_S = 0.0005
"""Timers are whole milliseconds, and late rather than early: aimed at a little before, they are closer. A request that is due
within this time is sent with the others."""
SHOWN_EACH_S, SHOWN_ANSWERS = 0.25, 100
"""How often the progress bar is renewed, and how many answers its TTFT is the median of."""
GAPS_PERCENTILE = 99.0
"""An answer keeps a limit on `itl` when this many of its gaps, in percent, do."""
SHOWN_MESSAGES = 5
"""The exit status that shells give to what Ctrl-C ended."""
TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
COLUMNS = (
    *("session", "turn", "due_s", "sent_s", "input_tokens", "cached_tokens", "output_tokens"),
    *("ttft_ms", "tpot_ms", "max_itl_ms", "e2el_ms", "error", "message"),
)

TokenTimes = NDArray[np.float64]
SendRequest = Callable[[LoadSession, list[str], TimedAnswer], Awaitable[None]]
"""Sends the turn of a session that follows these texts, and returns when its answer is over."""


class ServerRefuses(TandemError):
    """The server did not answer the first request as it should; the message says what it said."""


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """What came of a load."""

    model: str
    figures: dict[str, Any]
    """The figures, with the keys of `vllm bench serve`."""
    answers: list[TimedAnswer]
    began_s: float
    cpu_s: float
    """The CPU time of this process."""


def run(bench: ServeOptions, command: str, api_key: str) -> int:
    """Measure, print the report and write the files. Returns the exit status: 1 when no request was answered, 130 after Ctrl-C.

    Raises ConfigError."""
    try:
        result = measure(bench, api_key, log=say, is_shown=bench.results.disable_tqdm == "off" and sys.stderr.isatty())
    except ServerRefuses as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted: there are no figures of a part of the load")
        return INTERRUPTED
    print(report(bench, result.figures, result.answers))
    details = details_of(result.answers, result.began_s) if bench.results.save_detailed == "on" else {}
    write_figures(_head_of_file(bench, result, command) | result.figures | details, bench.results.json)
    if bench.results.csv:
        write_csv(bench.results.csv, result.answers, result.began_s)
    return 0 if result.figures["completed"] else 1


def measure(
    bench: ServeOptions, api_key: str = "", *, log: Callable[[str], object] = lambda line: None, is_shown: bool = False
) -> MeasuredLoad:
    """Send the load to the server and wait until all of it has ended. log: gets a line about each phase. is_shown: whether there
    is a progress bar. Raises ConfigError, and ServerRefuses."""
    allow_many_files()
    headers = ({"Authorization": f"Bearer {api_key}"} if api_key else {}) | bench.target.headers
    model = bench.target.model or _served_model(bench, headers)
    log(f"{bench.target.url}{bench.target.path}: {model}; making prompts")
    sessions = sessions_of(bench, model)
    gc.collect()
    gc.freeze()  # the prompts live to the end: looking at them again would only pause the run
    try:
        result: MeasuredLoad = uvloop.run(_measure(bench, headers, model, sessions, log, is_shown))
    finally:
        gc.unfreeze()
    return result


@contextlib.contextmanager
def served(url: str, *flags: str) -> Iterator[str]:
    """The URL of a server that runs already; without one that of a fleet with these flags, stopped at the end. Raises
    FleetFailed."""
    if url:
        yield url
        return
    say("starting the fleet")
    with local_fleet(*flags) as fleet:
        yield fleet.url


async def _measure(
    bench: ServeOptions,
    headers: dict[str, str],
    model: str,
    sessions: LoadSessions,
    log: Callable[[str], object],
    is_shown: bool,
) -> MeasuredLoad:
    target = bench.target
    keeps_text = bench.results.save_detailed == "on" or any(len(session.turns) > 1 for session in sessions.measured)
    client = HttpClient(
        target.url, target.path, headers, target.request_timeout_s, verify=target.insecure == "off", keeps_text=keeps_text
    )
    try:
        usage = await first_request(bench, model, client, sessions.warmups[0])
        log(f"warmed up by one request; usage: {usage}")
        bodies = RequestBodies(bench, model, usage)

        async def send(session: LoadSession, texts: list[str], answer: TimedAnswer) -> None:
            await client.ask(answer, bodies.body(session, texts))

        others = sessions.warmups[1:]
        await RunningLoad(others, [0.0] * len(others), send, most_open=bench.load.max_concurrency).run()
        due_s = [session.due_s for session in sessions.measured if session.due_s is not None]
        due_s = due_s or due_times(bench.load, len(sessions.measured), bench.workload.seed).tolist()
        load = RunningLoad(sessions.measured, due_s, send, most_open=bench.load.max_concurrency, counts_from_due=bench.is_open)
        cpu_s = time.process_time()
        bar = asyncio.create_task(_show_progress(load)) if is_shown else None
        await load.run()
        cpu_s = time.process_time() - cpu_s
        if bar is not None:
            bar.cancel()
    finally:
        client.close()
    figures = figures_of(load.answers, load.elapsed_s, bench.results)
    return MeasuredLoad(model, figures | {"client_cpu_s": cpu_s}, load.answers, load.began_s, cpu_s)


async def first_request(bench: ServeOptions, model: str, client: HttpClient, session: LoadSession) -> UsageReports:
    """Send the first warm-up, and learn from it what the server can report of tokens: it refuses what it does not know.

    Raises ServerRefuses."""
    message = ""
    for usage in USAGE_FIELDS:
        answer = TimedAnswer(0.0, session.turns[0].output_tokens)
        await client.ask(answer, RequestBodies(bench, model, usage).body(session, []))
        if not answer.error:
            return usage
        message = message or f"{answer.error}: {answer.message}"
        if answer.error != "4xx":
            break
    raise ServerRefuses(f"the first request to {bench.target.url}{bench.target.path} failed: {message}")


def _served_model(bench: ServeOptions, headers: dict[str, str]) -> str:
    """The first model that the server lists. Raises ServerRefuses."""
    url = bench.target.url
    try:
        tls = tls_context(bench.target.insecure == "off") if url.startswith("https:") else None
        server = RouterClient(url, timeout_s=LIST_S, tls=tls, headers=headers)
        return str(server.get("/v1/models")["data"][0]["id"])
    except (RequestFailed, LookupError, TypeError) as error:
        raise ServerRefuses(f"{url}/v1/models names no model ({error}): is the server there?") from error


# ---- when requests are sent ----


class RunningLoad:
    """Sessions on their way to a server. Does no I/O but by `send`.

    due_s: when each session is due, from the beginning; never falling. most_open: sessions; 0: no limit. counts_from_due: times
    count from when a request was due, also where it was sent later."""

    def __init__(
        self,
        sessions: Sequence[LoadSession],
        due_s: Sequence[float],
        send: SendRequest,
        *,
        most_open: int = 0,
        counts_from_due: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        early_s: float = EARLY_S,
    ) -> None:
        self.sessions, self._due_s, self._send = sessions, due_s, send
        self._clock, self._early_s, self._counts_from_due = clock, early_s, counts_from_due
        self._places = asyncio.Semaphore(most_open or max(1, len(sessions)))
        self.answers: list[TimedAnswer] = []
        """Every request that was sent, in this order."""
        self.open: dict[int, TimedAnswer] = {}
        """For each open session, the answer that it waits for."""
        self.ended = self.failed = self.tokens = 0
        """Sessions that have ended, requests that have failed, and tokens of answers that are over."""
        self.began_s, self._over_s = clock(), 0.0

    @property
    def elapsed_s(self) -> float:
        """The time since the beginning, or that of the whole run when it is over."""
        return (self._over_s or self._clock()) - self.began_s

    async def run(self) -> None:
        """Send everything, and return when all of it has ended."""
        self.began_s = self._clock()
        async with asyncio.TaskGroup() as group:
            for number, due_s in enumerate(self._due_s):
                due_s += self.began_s
                while (left_s := due_s - self._early_s - self._clock()) > 0:
                    await asyncio.sleep(left_s)
                await self._places.acquire()
                group.create_task(self._converse(number, due_s))
        self._over_s = self._clock()

    async def _converse(self, number: int, due_s: float) -> None:
        """Send the turns of a session one after the other, then free its place."""
        texts: list[str] = []
        for turn in self.sessions[number].turns:
            answer = TimedAnswer(due_s, turn.output_tokens, turn.input_tokens, number, len(texts))
            self.answers.append(answer)
            self.open[number] = answer
            answer.begin(self._clock(), counts_from_due=self._counts_from_due)
            await self._send(self.sessions[number], texts, answer)
            self.tokens += answer.counted
            if answer.error:
                self.failed += 1
                break
            texts.append(answer.text)
            due_s = answer.ended_s
        del self.open[number]
        self.ended += 1
        self._places.release()


def due_times(load: LoadOptions, requests: int, seed: int) -> TokenTimes:
    """When each request is due: seconds from the beginning, [requests] float64, never falling.

    Gaps are drawn from a gamma distribution with the shape `burstiness`. Without a ramp the times are then stretched so that the
    last one is due at requests / rate: runs with different seeds have the same rate.
    """
    rates = _rates(load, requests)
    if not requests or np.isinf(rates).any():
        return np.zeros(requests)
    if math.isinf(load.burstiness):
        return np.cumsum(1 / rates)
    gaps = np.random.default_rng(seed).gamma(load.burstiness, 1 / (rates * load.burstiness))
    times: TokenTimes = np.cumsum(gaps)
    if load.ramp_up_strategy == "none":
        times *= requests / load.request_rate / times[-1]
    return times


def _rates(load: LoadOptions, requests: int) -> TokenTimes:
    """Requests a second when each request comes, [requests]."""
    progress = np.arange(requests) / max(requests - 1, 1)
    start, end = load.ramp_up_start_rps, load.ramp_up_end_rps
    match load.ramp_up_strategy:
        case "none":
            return np.full(requests, load.request_rate)
        case "linear":
            return start + (end - start) * progress
        case "exponential":
            ramp: TokenTimes = start * (end / start) ** progress
            return ramp


async def _show_progress(load: RunningLoad) -> None:
    """A bar of all sessions, until this task is cancelled."""
    with tqdm(total=len(load.sessions), unit="req", file=sys.stderr, mininterval=SHOWN_EACH_S) as bar:
        try:
            while True:
                await asyncio.sleep(SHOWN_EACH_S)
                bar.set_postfix_str(_progress(load), refresh=False)
                bar.update(load.ended - bar.n)
        finally:
            bar.update(load.ended - bar.n)


def _progress(load: RunningLoad) -> str:
    tokens = load.tokens + sum(answer.counted for answer in load.open.values())
    ttfts_s = [answer.ttft_s for answer in load.answers[-SHOWN_ANSWERS:] if answer.counted]
    parts = [f"{len(load.open)} open", f"{tokens / max(load.elapsed_s, SHOWN_EACH_S):,.0f} tok/s"]
    if ttfts_s:
        parts.append(f"TTFT {1000 * statistics.median(ttfts_s):.0f} ms")
    if load.failed:
        parts.append(f"{load.failed} failed")
    return ", ".join(parts)


# ---- figures ----


def figures_of(answers: Sequence[TimedAnswer], duration_s: float, results: ResultOptions) -> dict[str, Any]:
    """All that vLLM writes to its JSON of a run, and more: keys as there, times in ms. duration_s: of the whole run."""
    whole, limits_ms = [answer for answer in answers if not answer.error], results.limits_ms
    inputs, outputs = sum(each.prompt_tokens for each in whole), sum(each.output_tokens for each in whole)
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
        "shorter_than_asked": sum(answer.output_tokens < answer.requested_tokens for answer in whole),
    }
    for name, values in times_ms(whole).items():
        if name in results.metrics:
            figures |= summary(name, values, results.percentiles)
    figures["turns"] = _by_turn(whole)
    return figures | summary("client_queue_time", np.array([1000 * answer.queue_s for answer in answers]), results.percentiles)


def times_ms(whole: Sequence[TimedAnswer]) -> dict[str, TokenTimes]:
    """Every value of each metric: ttft and e2el of each answer, tpot of each answer of several tokens, itl of each gap."""
    gaps = [np.frombuffer(answer.gaps_s, np.float64) for answer in whole if answer.gaps_s]
    tpots = [tpot for answer in whole if (tpot := answer.tpot_s) is not None]
    return {
        "ttft": 1000 * np.array([answer.ttft_s for answer in whole]),
        "tpot": 1000 * np.array(tpots),
        "itl": 1000 * np.concatenate(gaps) if gaps else np.zeros(0),
        "e2el": 1000 * np.array([answer.e2el_s for answer in whole]),
    }


def summary(name: str, values_ms: TokenTimes, percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles, under vLLM's keys: mean_ttft_ms, p99_ttft_ms. All are 0 without
    values."""
    values = values_ms if len(values_ms) else np.zeros(1)
    found = {"mean": np.mean(values), "median": np.median(values), "std": np.std(values)}
    found |= {f"p{each:g}": np.percentile(values, each) for each in percentiles}
    return {f"{which}_{name}_ms": float(value) for which, value in found.items()}


def is_good(answer: TimedAnswer, limits_ms: dict[str, float]) -> bool:
    """Whether an answer keeps all limits. An answer of one token keeps those on tpot and itl."""
    gaps = np.frombuffer(answer.gaps_s, np.float64) if answer.gaps_s else np.zeros(1)
    measured = {
        "ttft": answer.ttft_s,
        "tpot": answer.tpot_s or 0.0,
        "itl": float(np.percentile(gaps, GAPS_PERCENTILE)) if "itl" in limits_ms else 0.0,
        "e2el": answer.e2el_s,
    }
    return all(1000 * measured[name] <= limit for name, limit in limits_ms.items())


def peaks(whole: Sequence[TimedAnswer]) -> tuple[float, int]:
    """The most tokens in one second, seconds counted from the first sending, and the most requests that were open at once."""
    if not whole:
        return 0.0, 0
    origin_s = min(answer.sent_s for answer in whole)
    times = [answer.first_s + np.cumsum(np.concatenate([np.zeros(1), np.array(answer.gaps_s)])) for answer in whole]
    tokens = np.bincount((np.concatenate(times) - origin_s).astype(np.int64))
    changes = sorted([(answer.sent_s, 1) for answer in whole] + [(answer.last_s, -1) for answer in whole])
    return float(tokens.max()), int(np.cumsum([change for _, change in changes]).max())


def _by_turn(whole: Sequence[TimedAnswer]) -> list[dict[str, float]]:
    """The first tokens and the prompts of each turn of all conversations, the first turn first."""
    turns = []
    for turn in sorted({answer.turn for answer in whole}):
        answers = [answer for answer in whole if answer.turn == turn]
        p50, p99 = np.percentile([1000 * answer.ttft_s for answer in answers], (50, 99)).tolist()
        turns.append(
            {
                "completed": len(answers),
                "p50_ttft_ms": p50,
                "p99_ttft_ms": p99,
                "input_tokens": sum(answer.prompt_tokens for answer in answers),
                "cached_tokens": sum(answer.cached_tokens for answer in answers),
            }
        )
    return turns


# ---- the report and the files ----


def report(bench: ServeOptions, figures: dict[str, Any], answers: Sequence[TimedAnswer]) -> str:
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
        limits = ", ".join(f"{TITLES[name]} {limit:g} ms" for name, limit in bench.results.limits_ms.items())
        share = figures["good_completed"] / max(1, len(answers))
        lines.append(("goodput", f"{figures['request_goodput']:.2f} requests/s, {share:.1%} of the requests, within {limits}"))
    if bench.is_open:
        late = figures["mean_client_queue_time_ms"]
        lines.append(("sent after it was due", f"{late:.2f} ms on average; TTFT and E2E count from when it was due"))
    if figures["shorter_than_asked"]:
        lines.append(("shorter than asked", f"{figures['shorter_than_asked']:,} answers"))
    width = max(len(name) for name, _ in lines)
    body = [f"{name.rjust(width)}  {value}" for name, value in lines]
    which = ["mean", "std", *(f"p{each:g}" for each in bench.results.percentiles)]
    times = [(TITLES[name], *(f"{figures[f'{each}_{name}_ms']:.2f}" for each in which)) for name in bench.results.metrics]
    turns = ["", text_table(_turns(figures["turns"]))] if len(figures["turns"]) > 1 else []
    return "\n".join([*body, "", text_table([("ms", *which), *times]), *turns, *_errors(figures, answers)])


def _turns(turns: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("turn", "answers", "TTFT, ms: p50", "p99", "input tokens", "cached")]
    for number, turn in enumerate(turns, start=1):
        answers, inputs = turn["completed"], turn["input_tokens"]
        times = (f"{turn['p50_ttft_ms']:.2f}", f"{turn['p99_ttft_ms']:.2f}")
        cached = f"{turn['cached_tokens'] / max(1, inputs):.1%}"
        lines.append((str(number), str(answers), *times, f"{inputs / answers:.0f}", cached))
    return lines


def _errors(figures: dict[str, Any], answers: Sequence[TimedAnswer]) -> list[str]:
    if not figures["failed"]:
        return []
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in figures["errors_by_kind"].items())
    messages = Counter(f"{answer.error}: {answer.message}" for answer in answers if answer.error)
    shown = [f"  {count:,} × {message}" for message, count in messages.most_common(SHOWN_MESSAGES)]
    return ["", f"failed: {kinds}", *shown]


def _head_of_file(bench: ServeOptions, result: MeasuredLoad, command: str) -> dict[str, Any]:
    """What the JSON file says of the run, before its figures."""
    load, workload = bench.load, bench.workload
    head = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": bench.target.backend,
        "backend": bench.target.backend,
        "label": None,
        "model_id": result.model,
        "tokenizer_id": workload.tokenizer or result.model,
        "num_prompts": workload.num_prompts or len(result.answers),
        "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
        "burstiness": "inf" if math.isinf(load.burstiness) else load.burstiness,
        "max_concurrency": load.max_concurrency or None,
        "dataset_name": workload.dataset_name,
        "seed": workload.seed,
        "command": command,
    }
    if load.ramp_up_strategy != "none":
        head |= {name: vars(load)[name] for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")}
    return head


def details_of(answers: Sequence[TimedAnswer], began_s: float) -> dict[str, list[Any]]:
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


def write_csv(path: str, answers: Sequence[TimedAnswer], began_s: float) -> None:
    """A line for each request, times in seconds from the beginning of the run. Times that there are not are empty."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(COLUMNS)
        for answer in answers:
            times: list[float | None] = [None] * 4
            if answer.counted:
                times = [answer.ttft_s, answer.tpot_s, max(answer.gaps_s, default=None), answer.e2el_s]
            lines.writerow(
                (
                    *(answer.session, answer.turn, f"{answer.due_s - began_s:.6f}", f"{answer.sent_s - began_s:.6f}"),
                    *(answer.prompt_tokens, answer.cached_tokens, answer.output_tokens),
                    *("" if value is None else f"{1000 * value:.3f}" for value in times),
                    *(answer.error, answer.message),
                )
            )
