"""Long texts wait for each other and nobody else waits for them; those that cannot fit are refused after little work.

Also what a large body may hold, and that bodies which wait to be read are few and are not read for nobody.
"""

import asyncio
import gc
import json
import threading
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial
from typing import Any

import pytest

from common.config import RouterConfig
from common.errors import BadRequest, Overloaded
from common.ids import Variant, pack_ids
from common.pages.radix_cache import BlockNames
from common.text.embedding import EmbeddingMode
from common.text.tokenizer_manager import ChatOptions
from router.api import intake
from router.api.bodies import LARGE_BODY_BYTES, MAX_PARTS, MAX_PROMPTS
from router.api.chat import ChatRequest, read_chat
from router.api.completions import CompletionRequest, read_completion
from router.api.intake import ENCODING_THREADS, LONG_ENCODING_THREADS, Intake
from router.api.threads import SharedThreads, Turns
from router.requests import ClientRequest
from tests.router.calls import assert_error, chat, completion, post, sent_to_fleet, until
from tests.router.fakes import CONTEXT, MODEL, CharTokenizer, Site, intake_of
from tests.router.test_disconnects import RawClient

pytestmark = pytest.mark.anyio
LONG_CHARS = 100
ANSWER = ClientRequest("a", unique="0")


class WatchedTokenizer(CharTokenizer):
    """A token for every `chars` characters. Texts of more than LONG_CHARS wait until `go` is set. encoded: characters so far.
    checked_on: the threads on which ids were compared with the vocabulary."""

    def __init__(self, chars: int = 1) -> None:
        super().__init__()
        self.chars = chars
        self.go = threading.Event()
        self.encoded = 0
        self.checked_on: list[threading.Thread] = []

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        self.checked_on.append(threading.current_thread())
        return CharTokenizer.vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        self.encoded += len(text)
        if len(text) > LONG_CHARS:
            self.go.wait(60)
        return [ord(char) for char in text[:: self.chars]]


@pytest.fixture(autouse=True)
def _texts_are_long_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "LONG_CHARS", LONG_CHARS)
    monkeypatch.setattr(intake, "SHORT_CHARS", 3)


@asynccontextmanager
async def accepting(tokenizer: WatchedTokenizer, **flags: Any) -> AsyncIterator[Intake]:
    async with Site(config=RouterConfig(dead_after_s=60.0, **flags)) as site:
        with closing(intake_of(site.core, tokenizer, RouterConfig())) as intake_of_site:
            yield intake_of_site


def chat_of(text: str) -> ChatRequest:
    return read_chat(json.dumps(chat(text)).encode())


def completion_of(*prompts: str) -> CompletionRequest:
    return read_completion(json.dumps(completion(list(prompts))).encode())


async def test_short_texts_overtake_long_ones_however_many_there_are() -> None:
    tokenizer = WatchedTokenizer(chars=10)
    async with accepting(tokenizer) as accepting_intake:
        long = [
            asyncio.create_task(accepting_intake.accept_completion(completion_of(f"{number}" * 2 * LONG_CHARS), ANSWER))
            for number in range(ENCODING_THREADS + LONG_ENCODING_THREADS + 1)
        ]
        for text in ("hello", "again"):
            assert (await asyncio.wait_for(accepting_intake.accept_chat(chat_of(text), ANSWER), 10)).prompt_tokens == 1
        assert not any(task.done() for task in long)
        tokenizer.go.set()
        assert [accepted.prompt_tokens for accepted in await asyncio.gather(*long)] == [20] * len(long)


@pytest.mark.parametrize("texts", [1, 3])
async def test_a_text_that_cannot_fit_is_refused_after_the_work_of_one_that_just_fits(texts: int) -> None:
    tokenizer = WatchedTokenizer()
    async with accepting(tokenizer) as accepting_intake:
        text = "x" * 60_000
        for accepting_it in (
            accepting_intake.accept_chat(chat_of(text), ANSWER),
            accepting_intake.accept_completion(completion_of(*["short"] * (texts - 1), text), ANSWER),
        ):
            tokenizer.encoded = 0
            with pytest.raises(
                BadRequest, match=f"This model's maximum context length is {CONTEXT} tokens: \\w+ has more"
            ) as refused:
                await accepting_it
            assert refused.value.code == "context_length_exceeded"
            assert tokenizer.encoded < 5 * CONTEXT


async def test_a_text_of_few_tokens_is_accepted_whatever_its_length() -> None:
    tokenizer = WatchedTokenizer(chars=200)
    tokenizer.go.set()
    async with accepting(tokenizer) as accepting_intake:
        accepted = await accepting_intake.accept_completion(completion_of("x" * 20_000), ANSWER)
        assert accepted.prompt_tokens == 100


async def test_a_large_body_is_read_and_its_ids_are_checked_on_another_thread() -> None:
    tokenizer, main = WatchedTokenizer(), threading.main_thread()
    read_on: list[threading.Thread] = []

    def reader(body: bytes, context_tokens: int) -> CompletionRequest:
        read_on.append(threading.current_thread())
        return read_completion(body, context_tokens)

    async with accepting(tokenizer) as accepting_intake:
        asked = await accepting_intake.read_large(reader, json.dumps(completion([1] * 100)).encode())
        assert (await accepting_intake.accept_completion(asked, ANSWER)).prompt_tokens == 100
    assert [thread is main for thread in read_on] == [False]
    assert sum(thread is not main for thread in tokenizer.checked_on) == 1, "those of the stop tokens are few"


async def test_template_arguments_and_messages_without_text_count_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "SHORT_CHARS", 50)
    tokenizer, main = WatchedTokenizer(), threading.main_thread()
    tokenizer.chat_template = "{{ note }}{{ reasoning_effort }}"
    tokenizer.go.set()
    one = chat("hi")
    async with accepting(tokenizer) as accepting_intake:
        for fields, is_short in (
            ({}, True),
            ({"chat_template_kwargs": {"note": "x" * 50}}, False),
            ({"chat_template_kwargs": {"note": [1] * 50}}, False),
            ({"reasoning_effort": "x" * 50}, False),
            ({"messages": [{"role": "user", "content": ""}] * 2 + one["messages"]}, False),
        ):
            tokenizer.checked_on.clear()
            await accepting_intake.accept_chat(read_chat(json.dumps(one | fields).encode()), ANSWER)
            checks_of_prompt = sum(thread is not main for thread in tokenizer.checked_on)
            assert (checks_of_prompt == 0) == is_short, fields
        too_long = one | {"chat_template_kwargs": {"note": "x" * 65_000}}
        with pytest.raises(BadRequest, match="messages has more"):
            await accepting_intake.accept_chat(read_chat(json.dumps(too_long).encode()), ANSWER)
    with pytest.raises(BadRequest, match="reasoning_effort must have at most 64 characters"):
        read_chat(json.dumps(one | {"reasoning_effort": "x" * 65}).encode())


def test_ids_beyond_the_context_are_refused_before_there_is_an_object_for_each() -> None:
    body = json.dumps(completion([1000] * 300_000)).encode()
    tracemalloc.start()
    try:
        with pytest.raises(
            BadRequest, match="This model's maximum context length is 131072 tokens: prompt has 300000"
        ) as refused:
            read_completion(body, 131_072)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(body)
    finally:
        tracemalloc.stop()
    assert (refused.value.field, refused.value.code) == ("prompt", "context_length_exceeded")


async def test_the_blocks_of_a_long_prompt_are_named_where_it_is_tokenized_once_for_all_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []

    class Watched(BlockNames):
        def extended(self, packed: bytes) -> BlockNames:
            threads.append(threading.current_thread())
            return BlockNames.extended(self, packed)

    monkeypatch.setattr(intake, "BlockNames", Watched)
    tokenizer = WatchedTokenizer()
    async with accepting(tokenizer, prefill_policy="cache_aware") as accepting_intake:
        asked = read_completion(json.dumps(completion("x" * 90, n=2, cache_salt="salt")).encode())
        accepted = await accepting_intake.accept_completion(asked, ANSWER)
    names = BlockNames.of(pack_ids([ord("x")] * 90), accepting_intake._core.fleet.caches.page_size, Variant(), "salt").names
    assert names and [spec.blocks.names for spec in accepted.specs if spec.blocks] == [names, names]
    assert len(threads) == 1 and threads != [threading.current_thread()]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": ["ok", "bad"]}, "prompt"),
        ("/v1/completions", {"prompt": "bad " * 1000}, "prompt"),
        ("/v1/completions", {"prompt": "ok", "bad_words": ["bad"]}, "bad_words"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "bad"}]}, "messages"),
        ("/v1/responses", {"input": "bad"}, "input"),
        ("/v1/embeddings", {"input": ["ok", "bad"]}, "input"),
        ("/generate", {"text": "bad"}, "text"),
        ("/tokenize", {"prompt": "bad"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "bad"}]}, "messages"),
    ],
)
async def test_a_text_that_cannot_be_tokenized_is_refused_by_the_field_that_held_it(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], field: str
) -> None:
    def encode(_: CharTokenizer, text: str, *, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        if "bad" in text:
            raise BadRequest(f"{field}: it panics", field=field)
        return [ord(char) for char in text]

    def encode_chat(tokenizer: CharTokenizer, messages: Any, options: ChatOptions, field: str = "messages") -> list[int]:
        return encode(tokenizer, messages[-1]["content"], field=field)

    monkeypatch.setattr(CharTokenizer, "encode", encode)
    monkeypatch.setattr(CharTokenizer, "encode_chat", encode_chat)
    async with Site(embedding=EmbeddingMode("last", normalize=False, size=2)) as site:
        refused = await post(site, path, body if path == "/generate" else {"model": MODEL} | body)
        assert_error(refused, 400, "invalid_request_error", field)


async def test_an_owner_waits_for_one_piece_of_work_of_each_other_owner() -> None:
    free, done = threading.Event(), list[str]()
    with closing(SharedThreads(1, "test")) as threads:

        async def work(owner: str, name: str) -> None:
            def job() -> None:
                free.wait(60)
                done.append(name)

            await threads.run(owner, job)

        waiting = [asyncio.create_task(work("alice", f"a{number}")) for number in range(4)]
        await asyncio.sleep(0)
        waiting += [asyncio.create_task(work("bob", "b0")), asyncio.create_task(work("carol", "c0"))]
        waiting.append(asyncio.create_task(work("bob", "b1")))
        await asyncio.sleep(0)
        free.set()
        await asyncio.gather(*waiting)
    assert done == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


async def test_who_is_cancelled_gives_the_turn_to_the_next_one_but_no_thread_that_works() -> None:
    free, working, done = threading.Event(), threading.Semaphore(0), list[str]()
    with closing(SharedThreads(1, "test")) as threads:

        def work(name: str) -> None:
            working.release()
            free.wait(60)
            done.append(name)

        first, second, third = (asyncio.create_task(threads.run("", partial(work, name))) for name in "abc")
        await asyncio.sleep(0)
        first.cancel()
        second.cancel()
        await asyncio.wait((first, second))
        assert working.acquire() and not working.acquire(blocking=False), "the first one still has the thread"
        free.set()
        await third
    assert done == ["a", "c"]


async def test_an_error_of_work_whose_caller_has_left_is_not_logged_as_lost() -> None:
    logged, free = list[str](), threading.Event()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))
    with closing(SharedThreads(1, "test")) as threads:

        def work() -> None:
            free.wait(60)
            raise ValueError

        left = asyncio.create_task(threads.run("", work))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait((left,))
        del left
        free.set()
        await threads.run("", int)
        gc.collect()
    assert not logged


async def test_of_many_turns_one_key_leaves_some_for_the_next_one_however_slow_its_work_is() -> None:
    turns, has_turn = Turns(16), Counter[str]()

    async def slow(owner: str) -> None:
        async with turns.held(owner):
            has_turn[owner] += 1
            await asyncio.sleep(60)

    works = [asyncio.create_task(slow(owner)) for owner in ("alice",) * 40 + ("bob",) * 2]
    await asyncio.sleep(0.01)
    assert has_turn == {"alice": 13, "bob": 2}
    works[0].cancel()
    await asyncio.sleep(0.01)
    assert has_turn == {"alice": 13, "bob": 2}, "alice has 12, and 2 are free"
    works[-1].cancel()
    works[-2].cancel()
    await asyncio.sleep(0.01)
    assert has_turn["alice"] == 14
    for work in works:
        work.cancel()
    await asyncio.gather(*works, return_exceptions=True)
    assert turns._free == 16


# --- large bodies ---------------------------------------------------------------------------------------------------------------


LONG_CONTEXT = 1000
LARGE = "x" * LARGE_BODY_BYTES


def body(fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    "field",
    [
        {"user": [[]] * MAX_PARTS},
        {"user": [{}] * MAX_PARTS},
        {"user": [""] * MAX_PARTS},
        {"metadata": {str(key): "" for key in range(MAX_PARTS // 3)}},
        {"messages": [{"role": "user", "content": ""}] * (MAX_PARTS // 7 + 1)},
        {"user": [1] * (MAX_PARTS + MAX_PROMPTS * LONG_CONTEXT + 2)},
    ],
)
async def test_a_body_that_holds_too_much_is_refused_before_it_is_read(field: dict[str, Any]) -> None:
    for read, fields in ((read_chat, chat()), (read_completion, completion())):
        with pytest.raises(BadRequest, match=r"^the body has more than \d+ \D+: send fewer$"):
            read(body(fields | field), LONG_CONTEXT)


@pytest.mark.parametrize("text", ['{"a": [", :', "[" * 50, "\\", '\\"', 'x\\\\"'])
async def test_a_text_may_hold_any_number_of_brackets_quotes_and_commas(text: str) -> None:
    long = text * (2 * MAX_PARTS // len(text) + 1)
    assert read_completion(body(completion(long)), LONG_CONTEXT).prompts == (long,)


async def test_many_long_prompts_of_token_ids_are_read_one_by_one_as_they_are() -> None:
    prompts = [list(range(100_000 + number)) for number in range(3)]
    sent = body(completion(prompts, user="me"))
    assert list(read_completion(sent, 2**17).prompts) == [tuple(prompt) for prompt in prompts]
    with pytest.raises(BadRequest) as raised:
        read_completion(body(completion([*prompts, [1, "x"]])), 2**17)
    assert raised.value.field == "prompt[3][1]"
    with pytest.raises(BadRequest, match="holds 65 prompts"):
        read_completion(body(completion([[1] * 5000] * (MAX_PROMPTS + 1))), 2**17)
    with pytest.raises(BadRequest, match="must be a JSON object"):
        read_completion(body(prompts[0]), 2**17)


@pytest.mark.parametrize(
    "fields",
    [
        completion() | {LARGE: 1},
        completion(metadata={"a": [LARGE]}),
        completion(model=LARGE),
        completion(stream_options={LARGE: 1}, stream=True),
        chat() | {"messages": [{"role": LARGE, "content": ""}]},
        chat(chat_template_kwargs={LARGE: 1}),
        chat(tools=[{"type": "function", "function": {"name": LARGE}}]),
        chat(tool_choice={"type": "function", "function": {"name": LARGE}}),
    ],
)
async def test_an_error_repeats_little_of_what_the_client_sent(fields: dict[str, Any]) -> None:
    async with Site(max_body_bytes=10 * len(LARGE)) as site:
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        response = await post(site, path, fields)
        assert response.status_code in (400, 404)
        assert len(response.content) < 1000, response.text[:2000]


@contextmanager
def busy(site: Site) -> Iterator[list["asyncio.Task[bytes]"]]:
    """Both threads that read large bodies are kept from it."""
    free = threading.Event()

    def read(body: bytes, context_tokens: int) -> bytes:
        free.wait()
        return body

    reading = [
        asyncio.create_task(site.intake.read_large(read, LARGE.encode() + b"x")) for _ in range(intake.LONG_ENCODING_THREADS)
    ]
    try:
        yield reading
    finally:
        free.set()


async def test_beyond_a_limit_large_bodies_do_not_wait_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_WAITING_BODY_BYTES", 3 * len(LARGE))
    async with Site(max_body_bytes=10 * len(LARGE)) as site:
        with busy(site) as reading:
            await asyncio.sleep(0)
            refused = await post(site, "/v1/completions", completion(user=LARGE))
            assert_error(refused, Overloaded.status, Overloaded.kind, None)
            assert (await post(site, "/v1/completions", completion())).status_code == 200, "small ones do not wait there"
        await asyncio.gather(*reading)
        assert (await post(site, "/v1/completions", completion(user=LARGE))).status_code == 200


async def test_a_large_body_is_not_read_for_a_client_that_has_left() -> None:
    async with Site(max_body_bytes=10 * len(LARGE)) as site:
        with busy(site) as reading:
            client = RawClient(site, user=LARGE)
            await until(lambda: len(site.intake._waiting_body_bytes) > (len(reading) + 1) * len(LARGE))
            client.leave()
            await client.gone()
        await asyncio.gather(*reading)
        assert (len(site.intake._waiting_body_bytes), client.sent[0]["status"], sent_to_fleet(site)) == (0, 499, [])
