"""The router's process with real sockets: a detokenizer and a decode instance that echoes, each on a thread of its own.

The first test imports the tokenizer library, which takes a second. Each test starts and stops an HTTP server, which takes half a
second.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from common.config import ModelConfig, RouterConfig
from common.errors import ConfigError
from common.ids import DETOKENIZER, ROUTER, AttemptId, InstanceId, unpack_ids
from common.mail import Mailbox
from common.messages import (
    Cancel,
    DecodeInbox,
    Finished,
    Generate,
    Goodbye,
    InstanceInfo,
    Peers,
    Probe,
    Register,
    Repeat,
    TokenBatch,
    TokenDelta,
    Welcome,
)
from common.text.detokenizer_manager import DetokenizerManager
from common.text.tokenizer_manager import TokenizerManager
from router.process import Serving, serve
from tests.builders import instance
from tests.common.text.tiny import write_checkpoint
from tests.router.calls import usage
from tests.router.fakes import beat

pytestmark = pytest.mark.anyio
ANYWHERE = "tcp://127.0.0.1:0"


class EchoInstance:
    """A decode instance whose answer is the prompt again and again. It falls silent at the prompt's end, and goes on when it is
    asked to tell tokens again. Run by a thread until it is told to stop."""

    def __init__(self, router: str, checkpoint: Path) -> None:
        tokenizer = TokenizerManager(str(checkpoint))
        self._mailbox: Mailbox[DecodeInbox] = Mailbox(InstanceId("d0"), DecodeInbox, ANYWHERE)
        self._mailbox.route(ROUTER, router)
        plain = instance("d0", "decode")
        model = msgspec.structs.replace(plain.model, vocab_size=tokenizer.vocab_size, context_tokens=tokenizer.context_tokens)
        self.info: InstanceInfo = msgspec.structs.replace(plain, inbox=self._mailbox.address, model=model)
        self.stopping = threading.Event()
        self.cancelled: list[str] = []
        self._asked: dict[AttemptId, Generate] = {}

    def run(self) -> None:
        joined = False
        while not self.stopping.is_set():
            self._mailbox.send(ROUTER, beat(self.info) if joined else Register(instance=self.info))
            self._mailbox.wait(0.05)
            for _, message in self._mailbox.receive():
                joined = self._receive(message) or joined
        self._mailbox.send(ROUTER, Goodbye(id=self.info.id, incarnation=self.info.incarnation))
        self._mailbox.close()

    def _receive(self, message: DecodeInbox) -> bool:
        match message:
            case Welcome():
                self._mailbox.route(DETOKENIZER, message.detokenizers[0])
                return True
            case Generate():
                self._asked[message.key] = message
                self._echo(message, message.first, len(message.prompt) // 4)
            case Repeat():
                for key, first in message.tokens:
                    self._echo(self._asked[key], first, first + self._asked[key].sampling.max_new_tokens)
            case Cancel():
                self.cancelled.append(message.key.request_id)
            case _:
                assert isinstance(message, Peers | Probe)
        return False

    def _echo(self, message: Generate, first: int, until: int) -> None:
        """The tokens from number `first` up to `until`, or to the end of the answer."""
        prompt, end = unpack_ids(message.prompt).tolist(), message.sampling.max_new_tokens
        for number in range(first, min(end, until)):
            ending = Finished(reason="length") if number + 1 == end else None
            delta = TokenDelta(message.key, number, (prompt[number % len(prompt)],), ending)
            self._mailbox.send(DETOKENIZER, TokenBatch(deltas=(delta,)))


@contextmanager
def on_thread(thread: threading.Thread) -> Iterator[None]:
    thread.start()
    try:
        yield
    finally:
        thread.join(5)
        assert not thread.is_alive()


@asynccontextmanager
async def running(checkpoint: Path) -> AsyncIterator[tuple[httpx.AsyncClient, EchoInstance, Serving]]:
    """The router with one instance, ready; and a client of it."""
    detokenizer = DetokenizerManager(ANYWHERE, str(checkpoint))
    stop = asyncio.Event()
    ready: asyncio.Queue[Serving] = asyncio.Queue()
    config = RouterConfig(port=0, control_port=0)
    model = ModelConfig(model=str(checkpoint), served_name="tiny")
    with on_thread(threading.Thread(target=detokenizer.run)):
        router = asyncio.create_task(serve(config, model, ROUTER, [detokenizer.address], ready.put_nowait, stop, asyncio.Event()))
        try:
            serving = await asyncio.wait_for(ready.get(), 20)
            detokenizer.meet_router(serving.control)
            echo = EchoInstance(serving.control, checkpoint)
            async with httpx.AsyncClient(base_url=serving.url, timeout=10) as client:
                with on_thread(threading.Thread(target=echo.run)):
                    try:
                        await until_ready(client, 200)
                        yield client, echo, serving
                    finally:
                        echo.stopping.set()
                await until_ready(client, 503)
        finally:
            detokenizer.stop()
            stop.set()
            await asyncio.wait_for(router, 10)


async def until_ready(client: httpx.AsyncClient, status: int) -> None:
    deadline = time.monotonic() + 10
    while (response := await client.get("/ready")).status_code != status:
        assert time.monotonic() < deadline, response.text
        await asyncio.sleep(0.02)


async def test_text_goes_in_over_http_and_comes_back_through_instance_and_detokenizer(tmp_path: Path) -> None:
    prompt = "hello 日本語 🙂 there"
    tokens = len(TokenizerManager(str(write_checkpoint(tmp_path))).encode(prompt))
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens}
    async with running(tmp_path) as (client, _, _):
        whole = (await client.post("/v1/completions", json=body)).json()
        stream = await client.post("/v1/completions", json=body | {"stream": True, "n": 2})
        stopped = (await client.post("/v1/completions", json=body | {"stop": " there"})).json()
    assert whole["choices"] == [{"index": 0, "text": prompt, "finish_reason": "length", "logprobs": None}]
    assert whole["usage"] == usage(tokens, tokens)
    chunks = [msgspec.json.decode(part.removeprefix("data: ")) for part in stream.text.split("\n\n")[:-2]]
    for index in range(2):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in choices) == prompt
    assert (stopped["choices"][0]["text"], stopped["choices"][0]["finish_reason"]) == ("hello 日本語 🙂", "stop")


async def test_an_instance_that_falls_silent_on_a_request_is_told_when_the_client_leaves(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    async with running(tmp_path) as (client, echo, _):
        with pytest.raises(httpx.ReadTimeout):
            # One token more than the instance has in its first attempt: it echoes the prompt and never ends.
            await client.post("/v1/completions", json={"model": "tiny", "prompt": [3, 4], "max_tokens": 3}, timeout=0.3)
        deadline = time.monotonic() + 10
        while not echo.cancelled:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert (await client.get("/cluster")).json()["router"]["requests_open"] == 0


async def test_when_another_detokenizer_takes_over_an_open_answer_goes_on_through_it(tmp_path: Path) -> None:
    prompt = "hello 日本語 there"
    tokens = len(TokenizerManager(str(write_checkpoint(tmp_path))).encode(prompt))
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2 * tokens, "stream": True}
    texts: list[str] = []
    async with running(tmp_path) as (client, _, serving), client.stream("POST", "/v1/completions", json=body) as response:
        other = DetokenizerManager(ANYWHERE, str(tmp_path))
        with on_thread(threading.Thread(target=other.run)):
            try:
                async for line in response.aiter_lines():
                    if not line or line == "data: [DONE]":
                        continue
                    texts.append(msgspec.json.decode(line.removeprefix("data: "))["choices"][0]["text"])
                    if "".join(texts) == prompt:
                        other.meet_router(serving.control)
                        serving.detokenizer_moved(0, other.address)
            finally:
                other.stop()
    assert "".join(texts) == prompt + prompt


async def test_a_host_name_of_another_host_is_refused_by_name(tmp_path: Path) -> None:
    model = ModelConfig(model=str(write_checkpoint(tmp_path)))
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        config = RouterConfig(host="192.0.2.1")
        await serve(config, model, ROUTER, [ANYWHERE], lambda serving: None, asyncio.Event(), asyncio.Event())
