"""The measurement of the costs before and behind the instances, on this machine, in a second or two.

Owns the load. The HTTP server, intake, tokenizer, router core and detokenizer are the real ones, in this process, over a loopback
socket; instances answer nothing, and their tokens are made up here.
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterator

import msgspec

from common.config import RouterConfig
from common.ids import AttemptId, InstanceId, RequestId
from common.messages import DetokenizerInbox, ExpectAnswer, Finished, RouterInbox, TextBatch, TextDelta, TokenBatch, TokenDelta
from common.text.detokenizer import Detokenizer, cut
from common.text.tokenizer_manager import TokenizerManager
from router.api.app import Api, build_app
from router.api.intake import Intake
from router.api.server import WaitingConnections, listen, serve_app
from router.metrics import RouterMetrics
from simulation.plan import FleetPlan, FrontCosts
from simulation.planned_fleet import PlannedFleet
from simulation.processes import RouterProcess

ROUNDS, WARM_UP = 40, 10
"""Requests of each length, and how many of them come first and do not count."""
EVENTS, TOKENS = 100, 2000
SHORT_WORDS, LONG_WORDS = 20, 1000
WORD = " the"
DEADLINE_S = 60.0
NAME, HOST = "measured", "127.0.0.1"
_encode = msgspec.msgpack.Encoder().encode
_read_text, _read_tokens = (msgspec.msgpack.Decoder(inbox).decode for inbox in (RouterInbox, DetokenizerInbox))


def measure_front(model: str) -> FrontCosts:
    """model: whose tokenizer and chat template. Raises ConfigError."""
    manager = TokenizerManager(model)
    short_s, long_s, long_tokens, event_s = asyncio.run(asyncio.wait_for(_measure_router(manager), DEADLINE_S))
    return FrontCosts(max(0.0, short_s - event_s), max(0.0, (long_s - short_s) / long_tokens), _token_s(manager), event_s)


async def _measure_router(manager: TokenizerManager) -> tuple[float, float, int, float]:
    """Seconds of a short request until its first event is read, of a long one, how many tokens more that has, and seconds of a
    further event."""
    router = PlannedFleet(FleetPlan(prefill=1, decode=1), RouterConfig()).router_process
    stop, started = asyncio.Event(), asyncio.Event()
    config, metrics = RouterConfig(), RouterMetrics()
    with contextlib.closing(Intake(router.core, manager, NAME, config)) as intake, contextlib.closing(listen(HOST, 0)) as at:
        app = build_app(Api(router, intake, metrics, NAME, config), metrics)
        waiting = WaitingConnections(ROUNDS, metrics.connection_dropped)
        serving = asyncio.create_task(serve_app(app, [at], started.set, stop.wait(), waiting))
        await started.wait()
        short = [await _ask(router, at.getsockname()[1], SHORT_WORDS) for _ in range(ROUNDS)][WARM_UP:]
        long = [await _ask(router, at.getsockname()[1], LONG_WORDS) for _ in range(ROUNDS)][WARM_UP:]
        stop.set()
        await serving
    (short_s, event_s), (long_s, _) = (tuple(map(statistics.median, zip(*asked, strict=True))) for asked in (short, long))
    more = len(manager.encode(WORD * LONG_WORDS)) - len(manager.encode(WORD * SHORT_WORDS))
    return short_s, long_s, more, event_s


async def _ask(router: RouterProcess, port: int, words: int) -> tuple[float, float]:
    """One chat whose answer streams: seconds until its first event is read, and of each further one."""
    asked = {"model": NAME, "messages": [{"role": "user", "content": WORD * words}], "stream": True, "max_tokens": EVENTS + 1}
    body = msgspec.json.encode(asked)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        began_s = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while not router.core.requests.clients:
            await asyncio.sleep(0)
        client = next(iter(router.core.requests.clients))
        while not client.request_ids:
            await asyncio.sleep(0)
        texts = _texts(AttemptId(client.request_ids[0], 0, router.name))
        _tell(router, next(texts))
        await reader.readuntil(b"data: ")
        first_s = time.perf_counter() - began_s
        for text in texts:
            _tell(router, text)
            await reader.readuntil(b"\n\n")
        event_s = (time.perf_counter() - began_s - first_s) / EVENTS
        await reader.readuntil(b"[DONE]")
    finally:
        writer.close()
    while router.core.requests.clients:
        await asyncio.sleep(0)
    return first_s, event_s


def _texts(key: AttemptId) -> Iterator[bytes]:
    for number in range(EVENTS + 1):
        ending = Finished(reason="length") if number == EVENTS else None
        yield _encode(TextBatch(deltas=(TextDelta(key, number, (number,), WORD, ending),)))


def _tell(router: RouterProcess, body: bytes) -> None:
    """A turn of mail, with one message."""
    router.turn += 1
    router.deliver([*router.core.receive(_read_text(body), router.clock.now), *router.core.flush(router.clock.now)])


def _token_s(manager: TokenizerManager) -> float:
    """Seconds of a detokenizer for each token of a stream."""
    detokenizer, key = Detokenizer(manager.backend), AttemptId(RequestId("measured"), 0, InstanceId("router"))
    detokenizer.receive(ExpectAnswer(key=key), 0.0)
    ids = manager.encode(WORD * TOKENS)
    bodies = [_encode(TokenBatch(deltas=(TokenDelta(key, number, (token,)),))) for number, token in enumerate(ids)]
    began_s = time.perf_counter()
    for body in bodies:
        for batch in cut(detokenizer.receive(_read_tokens(body), 0.0)):
            _encode(batch)
    return (time.perf_counter() - began_s) / len(ids)
