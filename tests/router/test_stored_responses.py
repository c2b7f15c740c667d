"""Responses that are stored, through the `openai` client. The fleet echoes: an answer is its prompt again, from the beginning."""

import asyncio
import fcntl
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest

from common.access import OPEN, Access
from common.config import RouterConfig
from common.errors import ConfigError
from common.ids import InstanceId
from common.messages import Cancel, Finished, TextBatch, TextDelta
from router.api import store as store_module
from router.api.store import KEY_SHARE, WAITING, Store, StoreFailed
from router.requests import Places
from tests.router.calls import ALICE, BOB, keyed, openai_to, sent_to_fleet, until
from tests.router.fakes import MODEL, EchoFleet, Site, listening

pytestmark = pytest.mark.anyio
ASK: Any = {"model": MODEL, "max_output_tokens": 5}


def config(folder: Path, **fields: Any) -> RouterConfig:
    return replace(RouterConfig(store=str(folder / "store"), dead_after_s=60.0), **fields)


@asynccontextmanager
async def storing(
    folder: Path, fleet: EchoFleet | None = None, life: str = "router-a", access: Access = OPEN, **fields: Any
) -> AsyncIterator[tuple[Site, Callable[..., openai.AsyncOpenAI]]]:
    """A router with a store, and what makes a client of it with a key."""
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(Site(fleet, config(folder, **fields), access=access, life=InstanceId(life)))
        port = await stack.enter_async_context(listening(site))

        def client(key: str = ALICE) -> openai.AsyncOpenAI:
            made = openai_to(port, key)
            stack.push_async_callback(made.close)
            return made

        yield site, client


async def ended(client: openai.AsyncOpenAI, name: str) -> Any:
    async with asyncio.timeout(20):
        while (response := await client.responses.retrieve(name)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    return response


async def test_a_conversation_goes_on_from_stored_answers_as_if_it_were_sent_whole(tmp_path: Path) -> None:
    async with storing(tmp_path) as (site, client_of):
        client = client_of()
        first = await client.responses.create(input="hello", instructions="be brief. ", **ASK)
        own: Any = [{"role": "user", "content": [{"type": "input_text", "text": "and?"}]}]
        second = await client.responses.create(input=own, previous_response_id=first.id, **ASK)
        stream = await client.responses.create(input="so?", previous_response_id=second.id, stream=True, **ASK)
        third = [event async for event in stream][-1].response
        talk: Any = [
            {"role": "user", "content": "hello"},
            *first.output,
            *own,
            *second.output,
            {"role": "user", "content": "so?"},
        ]
        await client.responses.create(input=talk, store=False, **ASK)
        prompts = [message.prompt for message in sent_to_fleet(site) if message.decodes]
        assert prompts[2] == prompts[3], "instructions are those of one request"
        for response in (first, second, third):
            assert (await client.responses.retrieve(response.id)).model_dump() == response.model_dump()
        items = [item async for item in client.responses.input_items.list(third.id, order="asc", limit=2)]
        told = ["".join(part.text for part in item.content) for item in items]
        assert told == ["hello", first.output_text, "and?", second.output_text, "so?"]
        latest = await client.responses.input_items.list(third.id, limit=1)
        assert [item.id for item in latest.data] == [items[-1].id] and latest.has_more
        await client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(second.id)
        with pytest.raises(openai.NotFoundError, match="previous_response_id"):
            await client.responses.create(input="and?", previous_response_id=second.id, **ASK)
        fourth = await client.responses.create(input="go on", previous_response_id=third.id, **ASK)
        assert len((await client.responses.input_items.list(fourth.id)).data) == 7, "a deleted one stays in what came after it"


async def test_without_a_store_what_needs_one_is_refused_with_the_flag(site: Site) -> None:
    async with site.client() as client:
        for fields in ({"store": True}, {"background": True}, {"previous_response_id": "resp_1"}):
            (name,) = fields
            response = await client.post("/v1/responses", json={"input": "hello", **ASK, **fields})
            assert response.status_code == 400 and response.json()["error"]["param"] == name
            assert "--store" in response.json()["error"]["message"]
        plain = await client.post("/v1/responses", json={"input": "hello", **ASK})
        assert plain.json()["store"] is False
        for path in ("/v1/responses/resp_1", "/v1/files", "/v1/batches"):
            assert "--store" in (await client.get(path)).text


async def test_an_answer_in_the_background_is_the_one_that_its_client_would_have_waited_for(tmp_path: Path) -> None:
    async with storing(tmp_path) as (site, client_of):
        client = client_of()
        waited = await client.responses.create(input="hello", **ASK)
        made = await client.responses.create(input="hello", background=True, **ASK)
        assert (made.status, made.output, made.background) == ("queued", [], True)
        polled = await ended(client, made.id)
        assert (polled.output_text, polled.usage, polled.status) == (waited.output_text, waited.usage, waited.status)
        assert (await client.responses.cancel(made.id)).status == "incomplete", "one that has ended stays as it is"
        with pytest.raises(openai.BadRequestError, match="closing its connection"):
            await client.responses.cancel(waited.id)
        with pytest.raises(openai.BadRequestError, match="needs store"):
            await client.responses.create(input="hello", background=True, store=False, **ASK)
        await until(lambda: not len(site.core.requests.places) and not len(site.api.admission.places))


async def test_a_stream_in_the_background_goes_on_where_its_client_was_cut_off(tmp_path: Path) -> None:
    async with storing(tmp_path) as (_, client_of):
        client = client_of()
        stream = await client.responses.create(input="hello", background=True, stream=True, **ASK)
        seen = [await anext(stream) for _ in range(4)]
        await stream.close()
        name = seen[0].response.id
        await ended(client, name)
        whole = [event async for event in await client.responses.retrieve(name, stream=True)]
        rest = [event async for event in await client.responses.retrieve(name, stream=True, starting_after=3)]
        assert [event.sequence_number for event in whole] == list(range(len(whole)))
        assert [event.type for event in whole[:3]] == ["response.created", "response.queued", "response.in_progress"]
        assert whole == [*seen, *rest]
        stored = await client.responses.retrieve(name)
        assert whole[-1].response.model_dump() == stored.model_dump()
        plain = await client.responses.create(input="hello", background=True, **ASK)
        with pytest.raises(openai.BadRequestError, match="no events"):
            await client.responses.retrieve(plain.id, stream=True)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("by", ["itself", "another router"])
async def test_a_cancelled_response_keeps_its_text_and_the_fleet_hears_of_it(tmp_path: Path, by: str, stream: bool) -> None:
    async with storing(tmp_path, EchoFleet(stall_at=3)) as (site, client_of), storing(tmp_path, life="router-b") as (_, other):
        client = client_of()
        made: Any = await client.responses.create(input="hello", background=True, stream=stream, **ASK)
        name = (await anext(made)).response.id if stream else made.id
        await until(lambda: any(len(record.token_ids) == 3 for record in site.core.requests.records()))
        assert (await other().responses.retrieve(name)).status == "in_progress"
        with pytest.raises(openai.ConflictError, match="cancel it first"):
            await client.responses.delete(name)
        cancelled = await (client if by == "itself" else other()).responses.cancel(name)
        assert (cancelled.status, cancelled.output_text) == ("cancelled", "hel")
        assert any(isinstance(message, Cancel) for _, message in site.fleet.sent)
        events = [event async for event in await other().responses.retrieve(name, stream=True)] if stream else []
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "hel" * stream
        await until(lambda: not site.core.requests.clients)


async def test_another_router_of_the_host_streams_what_this_one_computes(tmp_path: Path) -> None:
    async with storing(tmp_path) as (_, client_of), storing(tmp_path, life="router-b") as (_, other):
        stream = await client_of().responses.create(input="hello", background=True, stream=True, **ASK)
        first = await anext(stream)
        elsewhere = [event async for event in await other().responses.retrieve(first.response.id, stream=True)]
        assert elsewhere == [first, *[event async for event in stream]]


async def test_a_stream_of_a_response_that_is_deleted_meanwhile_says_so(tmp_path: Path) -> None:
    async with storing(tmp_path, EchoFleet(stall_at=2)) as (site, client_of), storing(tmp_path, life="router-b") as (_, other):
        begun = await anext(await client_of().responses.create(input="hello", background=True, stream=True, **ASK))
        elsewhere = await other().responses.retrieve(begun.response.id, stream=True)
        await anext(elsewhere)
        store = site.api.stored_responses.store
        await store.do(lambda: store._db.execute("DELETE FROM objects"))  # as if it had ended just before
        with pytest.raises(openai.APIError, match="deleted"):
            [event async for event in elsewhere]


async def test_a_failure_in_the_background_is_told_by_the_response_and_by_its_last_event(tmp_path: Path) -> None:
    async with storing(tmp_path, EchoFleet(fail_at=2)) as (_, client_of):
        client = client_of()
        stream = await client.responses.create(input="hello", background=True, stream=True, **ASK)
        last = [event async for event in stream][-1]
        assert last.type == "response.failed" and "he".startswith(last.response.output_text)
        stored = await client.responses.retrieve(last.response.id)
        assert stored.status == "failed" and stored.error is not None and stored.error.message == "the step failed"
        again = await client.responses.create(input="hello", background=True, **ASK)
        assert (await ended(client, again.id)).model_dump(include={"status", "error"}) == stored.model_dump(
            include={"status", "error"}
        )


async def test_what_was_computed_when_the_router_died_has_failed_when_another_life_begins(tmp_path: Path) -> None:
    async with storing(tmp_path, EchoFleet(stall_at=3)) as (site, client_of):
        made = await client_of().responses.create(input="hello", background=True, **ASK)
        await until(lambda: any(len(record.token_ids) == 3 for record in site.core.requests.records()))
        await asyncio.sleep(0.1)
    async with storing(tmp_path, life="router-b") as (_, client_of):
        found = await ended(client_of(), made.id)
        assert found.status == "failed" and "stopped" in found.error.message


async def test_events_that_a_dead_router_has_left_end_with_its_failure_wherever_they_are_read(tmp_path: Path) -> None:
    async with storing(tmp_path, life="router-b") as (_, other):
        async with storing(tmp_path, EchoFleet(stall_at=3)) as (site, client_of):
            stream = await client_of().responses.create(input="hello", background=True, stream=True, **ASK)
            begun = await anext(stream)
            await until(lambda: any(len(record.token_ids) == 3 for record in site.core.requests.records()))
            waiting = asyncio.create_task(_all_events(other(), begun.response.id))
        waited = await waiting
        read = await _all_events(other(), begun.response.id)
        assert [event.sequence_number for event in read] == list(range(len(read)))
        assert read[-1].type == "response.failed" and "stopped" in read[-1].response.error.message
        assert read[-1].response == await other().responses.retrieve(begun.response.id)
        assert waited == read


async def test_events_end_at_once_with_the_failure_where_the_disk_is_full(tmp_path: Path) -> None:
    async with storing(tmp_path, EchoFleet(stall_at=3)) as (site, client_of):
        client, store = client_of(), site.api.stored_responses.store
        stream = await client.responses.create(input="hello", background=True, stream=True, **ASK)
        begun = await anext(stream)
        await until(lambda: any(len(record.token_ids) == 3 for record in site.core.requests.records()))
        (most_pages,) = await store.do(lambda: store._db.execute("PRAGMA max_page_count").fetchone())
        await store.do(lambda: store._db.execute("PRAGMA max_page_count = 1"))
        (record,) = site.core.requests.records()
        assert record.attempt is not None
        text = "lo" * 5_000  # more than is left of the last page
        ids = tuple(map(ord, text))
        site.fleet.say(TextBatch(deltas=(TextDelta(record.attempt.key, 3, ids, text, Finished(reason="length")),)))
        last = [event async for event in stream][-1]
        assert last.type == "response.failed" and "disk is full" in last.response.error.message
        told = await client.responses.retrieve(begun.response.id)
        assert told.status == "failed" and told.error == last.response.error
        await store.do(lambda: store._db.execute(f"PRAGMA max_page_count = {most_pages}"))
        await until(lambda: not site.api.stored_responses._unstored)
        assert (await client.responses.retrieve(begun.response.id)).model_dump() == told.model_dump()
        assert (await _all_events(client, begun.response.id))[-1] == last


async def _all_events(client: openai.AsyncOpenAI, name: str) -> list[Any]:
    return [event async for event in await client.responses.retrieve(name, stream=True)]


async def test_a_draining_router_tells_readers_of_what_another_one_computes_to_read_on_there(tmp_path: Path) -> None:
    async with storing(tmp_path, EchoFleet(stall_at=3)) as (_, client_of):
        stream = await client_of().responses.create(input="hello", background=True, stream=True, **ASK)
        begun = await anext(stream)
        async with storing(tmp_path, life="router-b") as (site, other):
            reading = await other().responses.retrieve(begun.response.id, stream=True)
            await anext(reading)
            site.core.requests.is_draining = True
            with pytest.raises(openai.APIError, match="read on with starting_after"):
                [event async for event in reading]


async def test_a_client_that_leaves_ends_its_answer_but_not_one_in_the_background(tmp_path: Path) -> None:
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 5, "store": True}
    async with Site(EchoFleet(stall_at=3), config(tmp_path)) as site, listening(site) as port:
        for fields, left in (({}, 0), ({"stream": True}, 0), ({"background": True, "stream": True}, 1)):
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as client:
                asking = asyncio.create_task(
                    client.post("/v1/responses", json=body | fields, headers={"x-request-id": f"r{left}"})
                )
                await until(lambda: any(len(record.token_ids) == 3 for record in site.core.requests.records()))
                asking.cancel()
            await until(partial(_has_open, site, left))
            await asyncio.sleep(0.05)
            assert len(site.core.requests) == left
        async with site.client() as client:
            assert (await client.get("/v1/responses/resp_r0")).status_code == 404
            assert (await client.get("/v1/responses/resp_r1")).json()["status"] == "in_progress"


def _has_open(site: Site, count: int) -> bool:
    return len(site.core.requests) == count


async def test_a_response_is_for_the_key_that_made_it(tmp_path: Path) -> None:
    async with storing(tmp_path, access=keyed()) as (_, client_of):
        alice, bob = client_of(ALICE), client_of(BOB)
        made = await alice.responses.create(input="hello", background=True, **ASK)
        await ended(alice, made.id)
        asks = (
            bob.responses.retrieve(made.id),
            bob.responses.cancel(made.id),
            bob.responses.delete(made.id),
            bob.responses.input_items.list(made.id),
            bob.responses.create(input="and?", previous_response_id=made.id, **ASK),
        )
        for ask in asks:
            with pytest.raises(openai.NotFoundError):
                await ask
        named = {"x-request-id": made.id.removeprefix("resp_")}
        assert (await bob.responses.create(input="other", extra_headers=named, **ASK)).id == made.id, "each key has its own names"
        assert (await alice.responses.retrieve(made.id)).output_text == "hello"
        with pytest.raises(openai.ConflictError, match="X-Request-Id"):
            await alice.responses.create(input="hello", extra_headers=named, **ASK)


async def test_a_full_store_forgets_the_oldest_of_the_key_that_has_most_and_never_what_is_computed(tmp_path: Path) -> None:
    async with storing(tmp_path, access=keyed(), store_bytes="20KB") as (_, client_of):
        alice, bob = client_of(ALICE), client_of(BOB)
        of_bob = await bob.responses.create(input="hello", **ASK)
        of_alice = [await alice.responses.create(input="hello", **ASK) for _ in range(15)]
        assert await bob.responses.retrieve(of_bob.id) and await alice.responses.retrieve(of_alice[-1].id)
        with pytest.raises(openai.NotFoundError):
            await alice.responses.retrieve(of_alice[0].id)
    async with storing(tmp_path, EchoFleet(stall_at=3), store_bytes="4KB") as (_, client_of):
        made = await client_of().responses.create(input="hello", background=True, **ASK)
        with pytest.raises(openai.InternalServerError, match="--store-bytes"):
            for _ in range(5):
                await client_of().responses.create(input="hello", background=True, **ASK)
        assert (await client_of().responses.retrieve(made.id)).status == "in_progress"


def test_work_of_one_key_never_fills_the_store_for_others(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"), 20_000, 3600, "router-a")
    for number in range(7):
        store._transact(partial(store.add, "alice", "file", f"file_{number}", b"x" * 1_500, holder=WAITING))
    with pytest.raises(StoreFailed, match="your key may have 16000 bytes"):
        store._transact(partial(store.add, "alice", "file", "file_7", b"x" * 1_500, holder=WAITING))
    store._transact(partial(store.add, "bob", "file", "file_0", b"x" * 1_500, holder=WAITING))
    store._transact(partial(store.add, "", "file", "file_0", b"x" * 1_500, holder=WAITING))


async def test_a_conversation_that_grows_beyond_the_longest_body_is_refused(tmp_path: Path) -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 60_000}]}
    async with storing(tmp_path) as (_, client_of):
        said: Any = [thought, {"role": "user", "content": "hello"}]
        made = await client_of().responses.create(input=said, **ASK)
        more = await client_of().responses.create(input=said, previous_response_id=made.id, **ASK)
        with pytest.raises(openai.BadRequestError, match="previous_response_id: the conversation has"):
            await client_of().responses.create(input="hello", previous_response_id=more.id, **ASK)


async def test_what_is_too_old_goes(tmp_path: Path) -> None:
    async with storing(tmp_path, store_age_s=0.5) as (_, client_of):
        made = await client_of().responses.create(input="hello", **ASK)
        with pytest.raises(openai.NotFoundError):
            async with asyncio.timeout(20):
                while await client_of().responses.retrieve(made.id):
                    await asyncio.sleep(0.1)


def test_a_file_that_is_no_store_is_refused_by_the_flag(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database" * 100)
    for path in (tmp_path / "text", tmp_path / "nowhere" / "store", tmp_path):
        with pytest.raises(ConfigError, match="--store"):
            Store(str(path), 1000, 10, "router-a")
    with pytest.raises(ConfigError, match="without --store"):
        RouterConfig(batch_requests=4)


def test_what_the_store_does_costs_no_more_when_it_holds_more(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"), 2**30, 3600, "router-a")

    def fill() -> None:
        for number in range(2_000):
            store.add("alice", "response", f"resp_{number}", b"x")

    store._transact(fill)
    store._most_bytes = math.ceil(2_000 * 513 / KEY_SHARE)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1

    store._db.set_progress_handler(step, 1)
    for work in (
        partial(store.add, "alice", "response", "resp_new", b"x"),  # the oldest goes
        store.sweep,
        partial(store.work, "response"),
        partial(store.claim, "batch", ["bob"]),
        partial(store.remove, 1_000),
        partial(store.page, "alice", "response", "", 3, False),
    ):
        steps = 0
        store._transact(work)
        assert steps < 1_000, work
    assert store._transact(partial(store.find, "alice", "response", "resp_0")) is None


def test_of_routers_that_start_together_one_makes_the_store_and_the_others_wait(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with ThreadPoolExecutor() as pool:
        opening = pool.submit(Store, str(tmp_path / "store"), 1000, 10, "router-a")
        with pytest.raises(TimeoutError):
            opening.result(0.2)
        os.close(folder)
        assert opening.result(10).life == "router-a"


async def test_whoever_waits_for_what_is_stored_has_a_place_meanwhile(tmp_path: Path) -> None:
    async with storing(tmp_path, EchoFleet(stall_at=1), max_requests=8) as (site, client_of):
        places = site.api.admission.places
        client = client_of()
        async with client.with_streaming_response.responses.create(input="hi", background=True, stream=True, **ASK):
            await until(lambda: len(places) == 2)  # the work, and who reads its events
            (name,) = [each.id for each in site.core.requests.clients]
            async with client.responses.with_streaming_response.retrieve(name, stream=True):
                await until(lambda: len(places) == 3)
                site.api.admission.places = Places(3, "HTTP requests")
                site.api.admission.places.take("", 3)
                for ask in (client.responses.retrieve(name, stream=True), client.responses.cancel(name)):
                    with pytest.raises(openai.RateLimitError):
                        await ask
                site.api.admission.places = places
        await until(lambda: len(places) == 1)
        assert (await client.responses.cancel(name)).status == "cancelled"
        await until(lambda: not len(places))


async def test_an_id_that_its_client_chose_may_hold_slashes(tmp_path: Path) -> None:
    async with storing(tmp_path) as (site, client_of):
        named: Any = {"extra_headers": {"X-Request-Id": "team/7"}}
        made = await client_of().responses.create(input="hello", **ASK, **named)
        async with site.client() as client:
            for id in (made.id, quote(made.id, safe="")):
                assert (await client.get(f"/v1/responses/{id}")).json()["id"] == made.id
                assert len((await client.get(f"/v1/responses/{id}/input_items")).json()["data"]) == 1
            assert (await client.delete(f"/v1/responses/{made.id}")).json()["deleted"]


async def test_an_id_is_refused_that_looks_like_the_url_of_a_conversation(tmp_path: Path) -> None:
    async with storing(tmp_path) as (_, client_of):
        named: Any = {"extra_headers": {"X-Request-Id": "mine/input_items"}}
        with pytest.raises(openai.BadRequestError, match="X-Request-Id may not end with /input_items"):
            await client_of().responses.create(input="hello", **ASK, **named)
        assert (await client_of().responses.create(input="hello", store=False, **ASK, **named)).output_text == "hello"


async def test_a_store_that_gets_nothing_done_is_named_by_health_and_refuses_calls_until_it_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "STALLED_S", 0.2)
    may_end, is_busy = threading.Event(), threading.Event()
    try:
        async with Site(None, config(tmp_path)) as site, site.client() as client:
            store = site.api.stored_responses.store

            def work() -> bool:
                is_busy.set()
                return may_end.wait()

            with pytest.raises(StoreFailed, match="nothing done"):
                await store.do(work)
            assert is_busy.is_set(), "its caller has its answer while the thread is still at it"
            body = {"model": MODEL, "input": "hello", "max_output_tokens": 5}
            for call in (client.get("/v1/batches"), client.post("/v1/responses", json=body)):
                refused = await call
                assert refused.status_code == 507 and "nothing done" in refused.text
            sick = await client.get("/health")
            assert sick.status_code == 503 and str(tmp_path / "store") in sick.json()["reasons"][0]
            assert "tandem_store_stalled_seconds 0.0\n" not in (await client.get("/metrics")).text
            assert (await client.post("/v1/responses", json=body | {"store": False})).status_code == 200
            may_end.set()
            await until(lambda: store.trouble() is None)
            assert (await client.post("/v1/responses", json=body)).status_code == 200
            assert (await client.get("/health")).status_code == 200
            may_end.clear()
            with pytest.raises(StoreFailed):
                await store.do(work)
            stopping = time.monotonic()
        assert time.monotonic() - stopping < 60, "the router ends in order, whatever the store does"
    finally:
        may_end.set()


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_store_whose_file_was_removed_says_so_at_once_and_keeps_nothing_that_nobody_would_find(
    tmp_path: Path, replaced: bool
) -> None:
    async with storing(tmp_path) as (_, client_of):
        client = client_of()
        made = await client.responses.create(input="hello", **ASK)
        (tmp_path / "store").unlink()
        if replaced:
            (tmp_path / "store").touch()
        for call in (client.responses.retrieve(made.id), client.responses.create(input="hello", **ASK)):
            with pytest.raises(openai.InternalServerError, match="was removed or replaced") as refused:
                await call
            assert refused.value.status_code == 507
        with pytest.raises(openai.APIError, match="was removed or replaced"):
            [event async for event in await client.responses.create(input="hello", stream=True, **ASK)]
        assert (await client.responses.create(input="hello", store=False, **ASK)).output_text == "hello"
    async with storing(tmp_path, life="router-b") as (_, client_of):
        again = await client_of().responses.create(input="hello", **ASK)
        assert (await client_of().responses.retrieve(again.id)).id == again.id
