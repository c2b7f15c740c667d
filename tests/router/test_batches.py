"""Files and batches, through the `openai` client. The fleet echoes: an answer is its prompt again, from the beginning."""

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from common.access import OPEN, Access, KeyRing
from common.text.embedding import EmbeddingMode
from router.api import batches
from tests.router.calls import ALICE, BOB, completion, keyed, openai_to, sent_to_fleet, until
from tests.router.fakes import MODEL, EchoFleet, Site, listening
from tests.router.test_stored_responses import config, storing

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
ENDINGS = ("completed", "failed", "cancelled", "expired")


def lines(bodies: Sequence[dict[str, Any]], url: str = COMPLETIONS, **more: Any) -> bytes:
    rows = [{"custom_id": f"line-{n}", "method": "POST", "url": url, "body": body} | more for n, body in enumerate(bodies)]
    return "\n".join(map(json.dumps, rows)).encode()


def prompts(count: int) -> list[dict[str, Any]]:
    return [completion(f"prompt {number}") for number in range(count)]


async def begun(client: openai.AsyncOpenAI, content: bytes, endpoint: Any = COMPLETIONS) -> Any:
    file = await client.files.create(file=("asked.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"})


async def ended(client: openai.AsyncOpenAI, batch: Any) -> Any:
    async with asyncio.timeout(30):
        while batch.status not in ENDINGS:
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def rows(client: openai.AsyncOpenAI, name: str | None) -> list[dict[str, Any]]:
    """The lines of a file."""
    return [json.loads(line) for line in (await client.files.content(name)).text.splitlines()] if name else []


def counts(batch: Any) -> tuple[int, int, int]:
    told = batch.request_counts
    return told.total, told.completed, told.failed


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
VARYING = {"id", "created", "created_at"}


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/chat/completions", CHAT),
        (COMPLETIONS, completion("hello")),
        ("/v1/embeddings", {"model": MODEL, "input": "hello"}),
        ("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": 5, "store": False}),
        ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 5}}),
    ],
)
async def test_a_line_gets_the_answer_that_its_body_gets_by_itself(tmp_path: Path, url: str, body: dict[str, Any]) -> None:
    async with (
        Site(config=config(tmp_path), embedding=EmbeddingMode("last", True, 2)) as site,
        listening(site) as port,
        openai_to(port) as client,
    ):
        batch = await begun(client, lines([body, body], url), url)
        assert (batch.status, batch.output_file_id, batch.metadata) == ("validating", None, {"a": "b"})
        batch = await ended(client, batch)
        assert (batch.status, counts(batch), batch.error_file_id) == ("completed", (2, 2, 0), None)
        async with site.client() as direct:
            expected = (await direct.post(url, json=body)).json()
        got = await rows(client, batch.output_file_id)
        assert [row["custom_id"] for row in got] == ["line-0", "line-1"]
        for row in got:
            response = row["response"]
            assert response["status_code"] == 200 and row["error"] is None and response["request_id"]
            assert _stable(response["body"]) == _stable(expected)
        listed = await client.batches.list(limit=1)
        assert [each.id for each in listed.data] == [batch.id] and listed.data[0] == batch
        files = {file.purpose: file async for file in client.files.list()}
        assert files["batch_output"].bytes == len((await client.files.content(batch.output_file_id)).content)


def _stable(value: Any) -> Any:
    """Without what differs from one answer to the next."""
    match value:
        case dict():
            return {name: _stable(each) for name, each in value.items() if name not in VARYING}
        case list():
            return [_stable(each) for each in value]
        case float():
            return None  # how long it took
    return value


async def test_lines_that_fail_are_in_the_error_file_and_the_others_have_their_answers(tmp_path: Path) -> None:
    async with storing(tmp_path) as (site, client_of):
        client = client_of()
        bodies = [completion("hello"), completion("hello", max_tokens="x"), completion("hello", model="unknown"), *prompts(40)]
        batch = await ended(client, await begun(client, lines(bodies)))
        assert (batch.status, counts(batch)) == ("completed", (43, 41, 2))
        errors = await rows(client, batch.error_file_id)
        assert [(row["custom_id"], row["response"]["status_code"]) for row in errors] == [("line-1", 400), ("line-2", 404)]
        assert errors[0]["response"]["body"]["error"]["param"] == "max_tokens"
        answers = {
            row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in await rows(client, batch.output_file_id)
        }
        assert answers == {"line-0": "hello"} | {f"line-{number + 3}": "promp" for number in range(40)}
        terms = {message.terms.priority for message in sent_to_fleet(site)}
        assert terms == {1000}, "lines come after everything else"
        await until(lambda: not site.core.requests.clients and not len(site.api.admission.places))


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"", "invalid_file", None),
        (b"{}", "invalid_json_line", 1),
        (lines(prompts(2)) + b"\n\nnot json", "invalid_json_line", 4),
        (lines(prompts(1), method="GET"), "invalid_json_line", 1),
        (lines(prompts(1), more=1), "invalid_json_line", 1),
        (lines(prompts(1), "/v1/embeddings"), "mismatched_url", 1),
        (lines(prompts(1)) + b"\n" + lines(prompts(1)), "duplicate_custom_id", 2),
        (lines([completion("a", stream=True)]), "invalid_request", 1),
        (lines(prompts(1)).replace(b"{}", b"").replace(b'"prompt 0"', b"[" * 20_000 + b"]" * 20_000), "invalid_json_line", 1),
    ],
)
async def test_a_file_that_is_no_batch_fails_as_a_whole(tmp_path: Path, content: bytes, code: str, line: int | None) -> None:
    async with storing(tmp_path) as (site, client_of):
        batch = await ended(client_of(), await begun(client_of(), content))
        assert batch.status == "failed" and [(error.code, error.line) for error in batch.errors.data] == [(code, line)]
        assert not sent_to_fleet(site) and batch.output_file_id is None


async def test_a_batch_that_meets_a_bug_fails_and_is_not_tried_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> Any:
        raise LookupError("a bug")

    monkeypatch.setattr(batches, "read_lines", bug)
    async with storing(tmp_path) as (_, client_of):
        batch = await ended(client_of(), await begun(client_of(), lines(prompts(1))))
        assert batch.status == "failed" and [error.code for error in batch.errors.data] == ["internal_error"]
        await client_of().files.delete(batch.input_file_id)


async def test_work_goes_on_when_the_system_refuses_something_for_a_while(tmp_path: Path) -> None:
    async with storing(tmp_path) as (site, client_of):
        store = site.api.batches.store
        unreadable = tmp_path / "store.gone.alive"
        unreadable.mkdir()
        body = b'{"background":true,"output":[]}'
        await store.do(partial(store.add, "alice", "response", "resp_1", body, holder="gone"))
        batch = await begun(client_of(), lines(prompts(1)))
        await asyncio.sleep(0.2)
        unreadable.rmdir()
        assert (await ended(client_of(), batch)).status == "completed"


async def test_a_cancelled_batch_keeps_what_it_had_and_its_open_lines_are_cancelled_everywhere(tmp_path: Path) -> None:
    async with storing(tmp_path, EchoFleet(stall_at=3), batch_requests=4) as (site, client_of):
        client = client_of()
        bodies = [completion("ab", max_tokens=2), *prompts(20)]
        batch = await begun(client, lines(bodies))
        await until(lambda: len(site.core.requests) == 4)
        running = await client.batches.retrieve(batch.id)
        assert (running.status, counts(running), running.output_file_id) == ("in_progress", (21, 1, 0), None)
        with pytest.raises(openai.ConflictError, match="unfinished batch"):
            await client.files.delete(batch.input_file_id)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch)
        assert (batch.status, counts(batch)) == ("cancelled", (21, 1, 0)) and batch.cancelling_at and batch.cancelled_at
        assert [row["custom_id"] for row in await rows(client, batch.output_file_id)] == ["line-0"]
        assert not site.core.requests.clients and not len(site.core.requests.places)
        assert (await client.batches.cancel(batch.id)).status == "cancelled"
        await client.files.delete(batch.input_file_id)


async def test_a_batch_whose_time_is_over_ends_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "WINDOW_S", 1)
    async with storing(tmp_path, EchoFleet(stall_at=3)) as (_, client_of):
        batch = await ended(client_of(), await begun(client_of(), lines([completion("ab", max_tokens=2), *prompts(2)])))
        assert (batch.status, counts(batch)) == ("expired", (3, 1, 2))
        late = await rows(client_of(), batch.error_file_id)
    assert [(row["custom_id"], row["response"], row["error"]["code"]) for row in late] == [
        ("line-1", None, "batch_expired"),
        ("line-2", None, "batch_expired"),
    ]


async def test_where_there_is_no_room_lines_wait_and_other_requests_are_served(tmp_path: Path) -> None:
    async with storing(tmp_path, max_requests=2, batch_requests=8) as (site, client_of):
        asked = [completion("hello", n=2) for _ in range(12)]
        batch = await ended(client_of(), await begun(client_of(), lines(asked)))
        assert (batch.status, counts(batch)) == ("completed", (12, 12, 0))
        assert b'path="/v1/completions",status="429"' in site.metrics.text()


@pytest.mark.parametrize("access", [OPEN, keyed()])
async def test_more_choices_than_a_router_ever_has_places_for_are_refused_by_name(tmp_path: Path, access: Access) -> None:
    async with storing(tmp_path, access=access, max_requests=16) as (_, client_of):
        batch = await ended(client_of(), await begun(client_of(), lines([completion("hello", n=n) for n in (9, 13)])))
        (error,) = await rows(client_of(), batch.error_file_id)
        assert (batch.status, counts(batch), error["custom_id"]) == ("completed", (2, 1, 1), "line-1")
        assert error["response"]["status_code"] == 400 and error["response"]["body"]["error"]["param"] == "n"
        with pytest.raises(openai.BadRequestError, match="never has 32 choices open"):
            await client_of().completions.create(model=MODEL, prompt=["a", "b"], n=16)


async def test_a_batch_goes_on_in_another_life_and_computes_no_line_twice_that_has_its_answer(tmp_path: Path) -> None:
    async with storing(tmp_path, EchoFleet(stall_at=3), batch_requests=2) as (site, client_of):
        short = [completion(f"{number}{number}", max_tokens=2) for number in range(5)]
        batch = await begun(client_of(), lines([*short, *prompts(5)]))
        await until(lambda: len(site.core.requests) == 2 and len(sent_to_fleet(site)) >= 7)
    async with storing(tmp_path, life="router-b") as (site, client_of):
        batch = await ended(client_of(), batch)
        assert (batch.status, counts(batch)) == ("completed", (10, 10, 0))
        assert len({message.key for message in sent_to_fleet(site)}) == 5, "only what was left is computed"
        assert [row["custom_id"] for row in await rows(client_of(), batch.output_file_id)] == [f"line-{n}" for n in range(10)]


async def test_a_draining_router_leaves_its_batch_to_another_one(tmp_path: Path) -> None:
    async with (
        storing(tmp_path, EchoFleet(stall_at=3), batch_requests=2) as (site, client_of),
        storing(tmp_path, life="router-b") as (_, other),
    ):
        stop, at_once = asyncio.Event(), asyncio.Event()
        batch = await begun(client_of(), lines(prompts(6)))
        async with asyncio.timeout(20):
            while not len(site.core.requests) and (await other().batches.retrieve(batch.id)).status != "completed":
                await asyncio.sleep(0.01)
        stop.set()
        await site.gateway.drain(0.2, stop, at_once)
        batch = await ended(other(), batch)
        assert (batch.status, counts(batch)) == ("completed", (6, 6, 0))


async def test_files_and_batches_are_for_the_key_that_made_them_and_keys_share_the_work(tmp_path: Path) -> None:
    access = keyed()
    async with storing(tmp_path, EchoFleet(stall_at=3), access=access, batch_requests=6) as (site, client_of):
        alice, bob = client_of(ALICE), client_of(BOB)
        batch = await begun(alice, lines(prompts(50)))
        await until(lambda: len(site.core.requests) == 5)
        assert {record.spec.owner for record in site.core.requests.records()} == {"alice"}
        asks = (
            bob.files.retrieve(batch.input_file_id),
            bob.files.content(batch.input_file_id),
            bob.files.delete(batch.input_file_id),
            bob.batches.retrieve(batch.id),
            bob.batches.cancel(batch.id),
            bob.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"),
        )
        for ask in asks:
            with pytest.raises(openai.NotFoundError):
                await ask
        assert not (await bob.files.list()).data and not (await bob.batches.list()).data
        short = await begun(bob, lines([completion("ab", max_tokens=2)]))
        assert (await ended(bob, short)).status == "completed", "though none of alice's lines gets on"


async def test_a_key_that_is_taken_away_ends_what_its_batch_may_ask(tmp_path: Path) -> None:
    async with storing(tmp_path, EchoFleet(stall_at=3), access=keyed(), batch_requests=1) as (site, client_of):
        batch = await begun(client_of(), lines(prompts(3)))
        await until(lambda: len(site.core.requests) == 1)
    access = Access(KeyRing({BOB: "bob"}))
    async with storing(tmp_path, life="router-b", access=access) as (site, client_of):
        await until(lambda: b'status="401"' in site.metrics.text())
        assert access.api_keys is not None
        access.api_keys.replace({ALICE: "alice"})
        batch = await ended(client_of(), batch)
        refused = await rows(client_of(), batch.error_file_id)
    assert refused and {row["response"]["status_code"] for row in refused} == {401}


async def test_an_upload_is_checked_part_by_part(tmp_path: Path) -> None:
    async with Site(config=config(tmp_path)) as site, site.client() as client:
        file = {"file": ("a.jsonl", b"{}")}
        authorization = {"authorization": "Bearer none"}
        for data, files, headers, status, says in (
            ({"purpose": "batch"}, file, {}, 415, "with any key"),
            ({"purpose": "vision"}, file, authorization, 400, "purpose must be batch"),
            ({"purpose": "batch"}, {"other": ("a", b"")}, authorization, 400, "other is not a known field"),
            ({"purpose": "batch", "expires_after": "1"}, file, authorization, 400, "expires_after is not a known field"),
            ({}, file, authorization, 400, "purpose"),
        ):
            response = await client.post("/v1/files", data=data, files=files, headers=headers)
            assert response.status_code == status and says in response.text, response.text
        broken = {"content-type": "multipart/form-data; boundary=x", **authorization}
        for content, headers in ((b"--x\r\nnonsense", broken), (b"{}", {"content-type": "application/json"})):
            response = await client.post("/v1/files", content=content, headers=headers)
            assert response.status_code in (400, 415), response.text
        large = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": b"x" * 200_000}, headers=authorization)
        assert large.status_code == 413 and "--max-body" in large.text
        form = b'--x\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\nbatch\r\n'
        upload = form % (b"purpose", b"") + form % (b"file", b'; filename="+2AA-"') + b"--x--\r\n"
        for charset, status in (("undefined", 400), ("utf-7", 200)):
            kind = {"content-type": f"multipart/form-data; boundary=x; charset={charset}"}
            content = upload.replace(b"batch", b"b") if status == 400 else upload
            response = await client.post("/v1/files", content=content, headers=kind | authorization)
            assert response.status_code == status, response.text
            await client.delete(f"/v1/files/{response.json().get('id')}")
        made = (await client.post("/v1/files", data={"purpose": "batch"}, files=file, headers=authorization)).json()
        unknown = {"input_file_id": made["id"], "endpoint": "/v1/models", "completion_window": "24h"}
        long = {
            "endpoint": COMPLETIONS,
            "metadata": {"a": "b" * 513},
        }  # a list of batches repeats it as often as there are batches
        many = {"endpoint": COMPLETIONS, "metadata": {str(number): "" for number in range(17)}}
        short = {"endpoint": COMPLETIONS, "completion_window": "1h"}
        for fields, says in (({}, COMPLETIONS), (short, "completion_window"), (long, "metadata"), (many, "metadata")):
            response = await client.post("/v1/batches", json=unknown | fields)
            assert response.status_code == 400 and says in response.text
        pages = [(await client.get("/v1/files?limit=1")).json(), (await client.get(f"/v1/files?after={made['id']}")).json()]
        assert [len(page["data"]) for page in pages] == [1, 0] and pages[0]["first_id"] == made["id"]
        for query in ("limit=0", "limit=x", "order=up", "after=file-x", "purpose=batch"):
            assert (await client.get(f"/v1/files?{query}")).status_code == 400
        assert (await client.delete(f"/v1/files/{made['id']}")).json() == {"id": made["id"], "object": "file", "deleted": True}
        assert (await client.get(f"/v1/files/{made['id']}/content")).status_code == 404


async def test_a_large_file_comes_back_as_it_went_or_breaks_off_where_it_is_deleted_meanwhile(tmp_path: Path) -> None:
    content = bytes(range(256)) * 60_000  # more than the system holds for a client that does not read
    headers = {"authorization": "x"}
    async with (
        Site(config=config(tmp_path), max_body_bytes=2**25) as site,
        listening(site, send_buffer=2**16) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1", headers=headers, verify=False) as client,
    ):
        made = (await client.post("/files", data={"purpose": "batch"}, files={"file": ("a", content)})).json()
        assert made["bytes"] == len(content) and (await client.get(f"/files/{made['id']}/content")).content == content
        async with (  # the system holds more for a connection on which much has come before
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1", headers=headers, verify=False) as other,
            other.stream("GET", f"/files/{made['id']}/content") as download,
        ):
            assert (await client.delete(f"/files/{made['id']}")).json()["deleted"]
            with pytest.raises(httpx.RemoteProtocolError, match="without sending complete message body"):
                await download.aread()


async def test_a_batch_leaves_room_for_other_requests_counted_in_choices_and_waits_as_long_as_it_may(tmp_path: Path) -> None:
    fleet = EchoFleet(stall_at=1)
    async with storing(tmp_path, fleet, max_requests=16, batch_requests=16, request_timeout_s=0.3) as (site, client_of):
        batch = await begun(client_of(), lines([completion("hello", n=4) for _ in range(8)]))
        await until(lambda: len(site.core.requests) == 12)
        await asyncio.sleep(0.5)
        assert len(site.core.requests) == 12, "a quarter is left to others, and no line meets the limit of interactive requests"
        async with site.client() as direct:
            answer = await direct.post(COMPLETIONS, json=completion("hello", n=4))
        assert answer.status_code == 504
        await client_of().batches.cancel(batch.id)
        batch = await ended(client_of(), batch)
        assert counts(batch) == (8, 0, 0)


async def test_a_full_disk_ends_a_batch_with_what_it_has_and_says_so_and_other_requests_go_on(tmp_path: Path) -> None:
    async with storing(tmp_path, batch_requests=2) as (site, client_of):
        store, full = site.api.batches.store, "PRAGMA max_page_count"
        (before,) = await store.do(lambda: store._db.execute(full).fetchone())
        batch = await begun(
            client_of(), lines([completion("word " * 10, max_tokens=9, echo=True, return_token_ids=True) for _ in range(60)])
        )
        await until(lambda: len(sent_to_fleet(site)) > 8)
        await store.do(lambda: store._db.execute(f"{full} = 1"))  # no more than there are now
        with pytest.raises(openai.InternalServerError, match="database or disk is full") as refused:
            for _ in range(99):
                await client_of().responses.create(model=MODEL, input="hello " * 10, max_output_tokens=5)
        assert refused.value.status_code == 507
        assert (
            await client_of().responses.create(model=MODEL, input="a", max_output_tokens=5, store=False)
        ).output_text == "aaaaa"
        await store.do(lambda: store._db.execute(f"{full} = {before}"))
        batch = await ended(client_of(), batch)
        assert batch.status == "failed" and "disk is full" in batch.errors.data[0].message
        names = [row["custom_id"] for row in await rows(client_of(), batch.output_file_id)]
        assert len(names) == len(set(names)) == batch.request_counts.completed > 0
