"""`launch bench streams`: starts each layout in its turn, lets answers be written, and sends prompts all the while.

Owns the order and the fleets. `bench.serve` is the client. Prints its progress on stderr.
"""

import asyncio
import json
import random
import shlex
import time
from collections.abc import Callable

from bench.hardware import this_hardware
from bench.serve.answers import Answer
from bench.serve.client import HttpClient
from bench.serve.requests import COUNTED_STREAM, completion_of_ids
from bench.streams.figures import StreamsOutcome, StreamsRun, report, run_of
from bench.streams.plan import StreamsBench
from bench.tables import publish, say
from common.processes.local_fleet import FleetFailed, connected, local_fleet
from common.text.tokenizer_manager import TokenizerManager

PATH = "/v1/completions"
STREAM_TOKENS = 3000
"""An answer that is longer than any run."""
ANSWER_TOKENS = 2
"""Of prompts: the second one is the first that a decode instance computes, so the KV moves."""
TIMEOUT_S = 600.0
LOOK_S = 0.05


def run(bench: StreamsBench, command: str, markdown: bool) -> int:
    """Measure, print the report and write the file. Returns the exit status: 1 when a layout failed."""
    hardware, layouts = this_hardware(), bench.layouts()
    words = TokenizerManager(bench.model).vocab_size
    runs: list[StreamsRun] = []
    failed = False
    for number, name in bench.turns():
        say(f"round {number} of {bench.rounds}, {name}")
        try:
            with local_fleet(*layouts[name]) as fleet:
                runs.append(asyncio.run(_Load(bench, fleet.url, words, number).measure(name)))
        except FleetFailed as error:
            say(f"{name} failed: {error}")
            failed = True
    outcome = StreamsOutcome(
        command=command,
        hardware=hardware,
        goals=[],
        layouts={name: shlex.join(flags) for name, flags in layouts.items()},
        seconds=bench.seconds,
        streams=bench.streams,
        prompt_tokens=bench.prompt_tokens,
        runs=runs,
    )
    publish(outcome, report(outcome, markdown), bench.json)
    return int(failed)


class _Load:
    """Streams and prompts for one fleet. Make it in the loop's thread."""

    def __init__(self, bench: StreamsBench, url: str, words: int, number: int) -> None:
        self._bench, self._number, self._words = bench, number, words
        self._random = random.Random(number)  # all layouts of a round get the same prompts
        self._client_of: Callable[[], HttpClient] = lambda: HttpClient(url, PATH, {}, TIMEOUT_S)
        with connected(url) as connection:
            connection.request("GET", "/v1/models")
            self._model = str(json.loads(connection.getresponse().read())["data"][0]["id"])
        self._failure = ""

    async def measure(self, layout: str) -> StreamsRun:
        """Raises FleetFailed when an answer fails or a stream ends."""
        bench, client = self._bench, self._client_of()
        try:
            warm = await self._answered(client, bench.prompt_tokens)
            if warm.error:
                raise FleetFailed(f"the first prompt failed: {warm.error}: {warm.message}")
            streams = [self._ask(client, bench.stream_tokens, STREAM_TOKENS, self._stream_ended) for _ in range(bench.streams)]
            while not all(stream.counted > 1 for stream in streams):
                self._check()
                await asyncio.sleep(LOOK_S)
            began_s = time.perf_counter()
            until_s = began_s + bench.seconds
            sent: list[Answer] = []
            lines = [asyncio.create_task(self._one_after_the_other(client, until_s, sent)) for _ in range(bench.prompts)]
            await asyncio.sleep(max(0.0, until_s - time.perf_counter()))
            for line in lines:
                line.cancel()
            self._check()
            return run_of(layout, self._number, streams, sent, began_s, until_s)
        finally:
            client.close()

    async def _one_after_the_other(self, client: HttpClient, until_s: float, sent: list[Answer]) -> None:
        while time.perf_counter() < until_s:
            over: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            sent.append(self._ask(client, self._bench.prompt_tokens, ANSWER_TOKENS, over.set_result))
            answer = await over
            if answer.error:
                self._failure = f"a prompt failed: {answer.error}: {answer.message}"
                return

    async def _answered(self, client: HttpClient, tokens: int) -> Answer:
        over: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._ask(client, tokens, ANSWER_TOKENS, over.set_result)
        return await over

    def _ask(self, client: HttpClient, tokens: int, answer_tokens: int, ended: Callable[[Answer], object]) -> Answer:
        now_s = time.perf_counter()
        answer = Answer(0, 0, now_s, answer_tokens, tokens)
        answer.sent(now_s, counts_from_due=False)
        prompt = self._random.choices(range(self._words // 8, self._words), k=tokens)
        client.send(answer, completion_of_ids(self._model, prompt, answer_tokens, **COUNTED_STREAM), ended)
        return answer

    def _stream_ended(self, answer: Answer) -> None:
        self._failure = f"a stream ended: {answer.error or 'its answer was whole'} {answer.message}"

    def _check(self) -> None:
        if self._failure:
            raise FleetFailed(self._failure)
