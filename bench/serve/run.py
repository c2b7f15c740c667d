"""`launch bench serve`: asks the server what it serves, warms it up, sends the load, and reports.

Owns the order of these, and the real clock. `measure` is for other benchmarks: it prints nothing.
"""

import asyncio
import gc
import http.client
import json
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvloop

from bench.serve import report
from bench.serve.answers import Answer
from bench.serve.arrivals import due_times
from bench.serve.client import HttpClient, tls_of
from bench.serve.driver import EARLY_S, Driver
from bench.serve.figures import details_of, figures_of
from bench.serve.plan import ServeBench
from bench.serve.progress import RENEWED_S, Progress
from bench.serve.requests import USAGES, Bodies, Usage
from bench.serve.workloads.choose import Asked, sessions_of
from bench.serve.workloads.sessions import Session
from bench.tables import say, write_figures
from common.errors import TandemError
from common.processes.open_files import allow_many_files

LIST_S = 60.0
INTERRUPTED = 130
"""The exit status that shells give to what Ctrl-C ended."""


class ServerRefuses(TandemError):
    """The server did not answer the first request as it should; the message says what it said."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a run. figures: with the keys of `vllm bench serve`, see `figures_of`. cpu_s: of this process."""

    model: str
    figures: dict[str, Any]
    answers: list[Answer]
    began_s: float
    cpu_s: float


def run(bench: ServeBench, command: str, api_key: str) -> int:
    """Measure, print the report and write the files. Returns the exit status: 1 when no request was answered, 130 after Ctrl-C.

    Raises ConfigError."""
    try:
        measured = measure(bench, api_key, tell=say, is_shown=bench.results.disable_tqdm == "off")
    except ServerRefuses as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted: there are no figures of a part of the load")
        return INTERRUPTED
    answers, figures = measured.answers, measured.figures
    print(report.text(bench, figures, answers))
    details = details_of(answers, measured.began_s) if bench.results.save_detailed == "on" else {}
    write_figures(report.contents(bench, measured.model, command, figures, details), bench.results.json)
    if bench.results.csv:
        report.write_csv(bench.results.csv, answers, measured.began_s)
    return 0 if figures["completed"] else 1


def measure(
    bench: ServeBench, api_key: str = "", *, tell: Callable[[str], object] = lambda text: None, is_shown: bool = False
) -> Measured:
    """Send the load to the server and wait until all of it has ended. tell: gets a line about each phase. is_shown: whether there
    is a progress bar. Raises ConfigError, and ServerRefuses."""
    allow_many_files()
    model = bench.target.model or _served_model(bench, api_key)
    tell(f"{bench.target.url}{bench.target.path}: {model}; making prompts")
    asked = sessions_of(bench, model)
    gc.collect()
    gc.freeze()  # the prompts live to the end: looking at them again would only pause the run
    try:
        measured: Measured = uvloop.run(_measure(bench, api_key, model, asked, tell, is_shown))
    finally:
        gc.unfreeze()
    return measured


async def _measure(
    bench: ServeBench, api_key: str, model: str, asked: Asked, tell: Callable[[str], object], is_shown: bool
) -> Measured:
    keeps_text = bench.results.save_detailed == "on" or any(len(session.turns) > 1 for session in asked.sessions)
    client = HttpClient(
        bench.target.url,
        bench.target.path,
        _headers(bench, api_key),
        bench.target.request_timeout_s,
        verify=bench.target.insecure == "off",
        keeps_text=keeps_text,
    )
    try:
        usage = await first_request(bench, model, client, asked.warmups[0])
        tell(f"warmed up by one request; usage: {usage}")
        bodies = Bodies(bench, model, usage)
        if len(asked.warmups) > 1:
            await _drive(client, bodies, asked.warmups[1:], [0.0] * (len(asked.warmups) - 1), bench, is_shown=False)
        due_s = _due_times(bench, asked.sessions)
        cpu_s = time.process_time()
        driver = await _drive(client, bodies, asked.sessions, due_s, bench, is_shown=is_shown)
        cpu_s = time.process_time() - cpu_s
    finally:
        client.close()
    results = bench.results
    figures = figures_of(
        driver.answers,
        driver.elapsed_s,
        metrics=results.metrics,
        percentiles=results.percentiles,
        limits_ms=results.limits_ms,
    )
    return Measured(model, figures | {"client_cpu_s": cpu_s}, driver.answers, driver.began_s, cpu_s)


async def _drive(
    client: HttpClient, bodies: Bodies, sessions: list[Session], due_s: list[float], bench: ServeBench, *, is_shown: bool
) -> Driver:
    """All sessions, to their end."""
    over = asyncio.get_running_loop().create_future()

    def send(session: Session, said: list[str], answer: Answer, ended: Callable[[Answer], object]) -> None:
        client.send(answer, bodies.body(session, said), ended)

    driver = Driver(
        sessions,
        due_s,
        LoopClock(),
        send,
        lambda: over.set_result(None),
        most_open=bench.load.max_concurrency,
        counts_from_due=bench.is_open,
    )
    progress = Progress(driver, len(sessions), is_shown)
    driver.start()
    while not over.done():
        await asyncio.wait((over,), timeout=None if progress.is_off else RENEWED_S)
        progress.renew()
    progress.close()
    return driver


async def first_request(bench: ServeBench, model: str, client: HttpClient, session: Session) -> Usage:
    """Send the first warm-up, and learn from it what the server can be asked to tell of tokens: it refuses what it does not
    know. Raises ServerRefuses."""
    message = ""
    for usage in USAGES:
        over: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        answer = Answer(0, 0, 0.0, session.turns[0].output_tokens)
        client.send(answer, Bodies(bench, model, usage).body(session, []), over.set_result)
        await over
        if not answer.error:
            return usage
        message = message or f"{answer.error}: {answer.message}"
        if answer.error != "4xx":
            break
    raise ServerRefuses(f"the first request to {bench.target.url}{bench.target.path} failed: {message}")


def _due_times(bench: ServeBench, sessions: list[Session]) -> list[float]:
    own = [session.due_s for session in sessions if session.due_s is not None]
    return own or due_times(bench.load, len(sessions), bench.workload.seed).tolist()


def _headers(bench: ServeBench, api_key: str) -> dict[str, str]:
    return ({"Authorization": f"Bearer {api_key}"} if api_key else {}) | bench.target.headers


def _served_model(bench: ServeBench, api_key: str) -> str:
    """The first model that the server lists. Raises ServerRefuses."""
    request = urllib.request.Request(f"{bench.target.url}/v1/models", headers=_headers(bench, api_key))
    carrier = urllib.request.HTTPSHandler(context=tls_of(bench.target.insecure == "off"))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), carrier)  # no proxy, like the load
    try:
        with opener.open(request, timeout=LIST_S) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise ServerRefuses(f"{request.full_url} names no model ({error}): is the server there?") from error


class LoopClock:
    """The real time, by the running loop's timers."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now_s(self) -> float:
        return time.perf_counter()

    def call_at(self, at_s: float, call: Callable[[], object]) -> object:
        # The loop's timers are whole milliseconds, and late rather than early: aimed at a little before, they are closer.
        return self._loop.call_later(max(0.0, at_s - EARLY_S - time.perf_counter()), call)
