"""gRPC beside HTTP: SGLang's scheduler service as its clients use it, on a real port.

A client here sends the bytes that SGLang's own generated code makes; the classes are ours, and their numbers are compared with
SGLang's below.
"""

import asyncio
import dataclasses
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

grpc = pytest.importorskip("grpc")

from common.config import ModelConfig, RouterConfig  # noqa: E402
from common.errors import ConfigError  # noqa: E402
from common.ids import ROUTER  # noqa: E402
from common.messages import Finished, TextBatch, TextDelta  # noqa: E402
from common.sampling_params import Grammar  # noqa: E402
from common.text.embedding import EmbeddingMode  # noqa: E402
from router.api import grpc_server  # noqa: E402
from router.api.grpc_server import CLASSES, HEALTH, SCHEDULER, read_generate_message, serving_grpc  # noqa: E402
from router.process import serve  # noqa: E402
from tests.router.calls import ALICE, BOB, CONTROL, certified, keyed, post, sent_to_fleet, until  # noqa: E402
from tests.router.fakes import EchoFleet, Site  # noqa: E402

pytestmark = pytest.mark.anyio
STATUS = grpc.StatusCode
SERVICE = f"{SCHEDULER}.SglangScheduler"
CONFIG = RouterConfig(dead_after_s=60.0, grpc_port="0")


def message(name: str, **fields: Any) -> Any:
    return CLASSES[f"{SCHEDULER}.{name}"](**fields)


def ask(text: str = "hello", tokens: int = 3, sampling: Mapping[str, Any] | None = None, **fields: Any) -> Any:
    """A request to continue this text, greedily."""
    given = {"tokenized": {"input_ids": list(map(ord, text))}, "sampling_params": {"max_new_tokens": tokens, **(sampling or {})}}
    return message("GenerateRequest", **given | fields)


class Client:
    """Calls over one channel, as generated code makes them. key: its API key."""

    def __init__(self, channel: Any, key: str = "") -> None:
        self._channel, self._metadata = channel, (("authorization", f"Bearer {key}"),) if key else ()

    def generate(self, request: Any, *, timeout: float | None = 30, metadata: Any = (), **options: Any) -> Any:
        make = self._channel.unary_stream(
            f"/{SERVICE}/Generate",
            request_serializer=lambda sent: sent.SerializeToString(),
            response_deserializer=CLASSES[f"{SCHEDULER}.GenerateResponse"].FromString,
        )
        return make(request, timeout=timeout, metadata=(*self._metadata, *metadata), **options)

    async def all_of(self, request: Any, **options: Any) -> list[Any]:
        return [part async for part in self.generate(request, **options)]

    async def call(self, name: str, service: str = SERVICE, /, **fields: Any) -> Any:
        package, answer = service.rpartition(".")[0], {"Check": "HealthCheck"}.get(name, name)
        make = self._channel.unary_unary(
            f"/{service}/{name}",
            request_serializer=lambda sent: sent.SerializeToString(),
            response_deserializer=CLASSES[f"{package}.{answer}Response"].FromString,
        )
        return await make(CLASSES[f"{package}.{answer}Request"](**fields), timeout=30, metadata=self._metadata)


@asynccontextmanager
async def served(
    site: Site, config: RouterConfig = CONFIG, stop: asyncio.Event | None = None, **options: Any
) -> AsyncIterator[tuple[Client, str]]:
    """A client without a key, and where it calls."""
    serving = serving_grpc(config, site.api, site.metrics, site.access, "127.0.0.1", stop or asyncio.Event())
    async with serving as url:
        where = url.partition("://")[2]
        async with grpc.aio.insecure_channel(where, **options) as channel:
            yield Client(channel), where


@pytest.fixture
async def client(site: Site) -> AsyncIterator[Client]:
    async with served(site) as (client, _):
        yield client


async def refusal(calling: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await calling
    return refused.value


# --- answers -----------------------------------------------------------------------------------------------------------------

SAME = {
    "ids": (ask(), {}),
    "text": (ask(tokenized={"original_text": "hello"}), {}),
    "ids beside text": (ask(tokenized={"original_text": "for people", "input_ids": [104, 105]}), {"input_ids": [104, 105]}),
    "n": (ask("ab", 5, {"n": 3}), {"text": "ab", "sampling_params": {"max_new_tokens": 5, "n": 3}}),
    "stop": (ask(sampling={"stop": ["l"]}), {"sampling_params": {"max_new_tokens": 3, "stop": ["l"]}}),
    "no limit": (ask(sampling_params={"top_p": 0.5}, tokenized={"input_ids": [97]}), {"text": "a", "sampling_params": {}}),
    "logprobs": (
        ask(return_logprob=True, top_logprobs_num=2, logprob_start_len=-1),
        {"return_logprob": True, "top_logprobs_num": 2},
    ),
    "of the prompt": (
        ask(return_logprob=True, top_logprobs_num=1, logprob_start_len=2),
        {"return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 2},
    ),
    "from its beginning": (ask(return_logprob=True), {"return_logprob": True, "logprob_start_len": 0}),
    "only the prompt": (
        ask(tokens=0, return_logprob=True),
        {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}},
    ),
}


def as_generated(completes: list[Any]) -> list[dict[str, Any]]:
    """Whole answers of gRPC, in the form of those of POST /generate."""
    answers = []
    for part in completes:
        finish: dict[str, Any] = {"type": part.finish_reason}
        if part.WhichOneof("matched_stop"):
            finish["matched"] = getattr(part, part.WhichOneof("matched_stop"))
        if part.finish_reason == "length":
            finish["length"] = part.completion_tokens
        counts = {name: getattr(part, name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")}
        meta = {"finish_reason": finish, **counts}
        if part.HasField("output_logprobs"):
            meta |= tokens_and_tops("output", part.output_logprobs, list(part.output_logprobs.token_logprobs))
            of_prompt = [one.value if one.HasField("value") else None for one in part.input_logprobs.token_logprobs]
            meta |= tokens_and_tops("input", part.input_logprobs, of_prompt)
        answers.append({"output_ids": list(part.output_ids), "meta_info": meta})
    return answers


def tokens_and_tops(of: str, given: Any, numbers: list[float | None]) -> dict[str, Any]:
    tops = [[[value, token, None] for value, token in zip(top.values, top.token_ids, strict=True)] for top in given.top_logprobs]
    tokens = [[number, token, None] for number, token in zip(numbers, given.token_ids, strict=True)]
    return {f"{of}_token_logprobs": tokens} | ({f"{of}_top_logprobs": [top or None for top in tops]} if tops else {})


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what only HTTP tells."""
    meta = {name: value for name, value in answer["meta_info"].items() if name not in ("id", "weight_version", "weight_versions")}
    return {"output_ids": answer["output_ids"], "meta_info": {name: value for name, value in meta.items() if value != []}}


@pytest.mark.parametrize(("request_", "fields"), SAME.values(), ids=SAME.keys())
async def test_an_answer_is_that_of_post_generate_streamed_or_whole(
    site: Site, client: Client, request_: Any, fields: dict[str, Any]
) -> None:
    text = {} if "input_ids" in fields else {"text": "hello"}
    over_http = (await post(site, "/generate", {**text, "sampling_params": {"max_new_tokens": 3}, **fields})).json()
    expected = [comparable(one) for one in (over_http if isinstance(over_http, list) else [over_http])]
    whole = await client.all_of(request_)
    assert [part.complete.index for part in whole] == list(range(len(expected)))
    assert [comparable(one) for one in as_generated([part.complete for part in whole])] == expected
    request_.stream = True
    parts = await client.all_of(request_)
    by_choice = sorted((part.complete for part in parts if part.HasField("complete")), key=lambda complete: complete.index)
    for index, (ends, answer) in enumerate(zip(by_choice, expected, strict=True)):
        chunks = [part.chunk for part in parts if part.HasField("chunk") and part.chunk.index == index]
        assert [token for chunk in chunks for token in chunk.token_ids] == list(ends.output_ids) == answer["output_ids"]
        assert [chunk.completion_tokens for chunk in chunks] == list(accumulate(len(chunk.token_ids) for chunk in chunks))
        numbers = [number for chunk in chunks for number in chunk.output_logprobs.token_logprobs]
        assert numbers == list(ends.output_logprobs.token_logprobs)
        if chunks:  # those of the prompt come once, with the first
            assert not ends.HasField("input_logprobs") and not any(chunk.HasField("input_logprobs") for chunk in chunks[1:])
            ends.input_logprobs.CopyFrom(chunks[0].input_logprobs)
        (written,) = as_generated([ends])
        assert comparable(written) == answer
    request_.stream = False


async def test_what_is_sent_reaches_the_fleet_and_zero_means_what_leaving_out_means(site: Site, client: Client) -> None:
    params = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 7,
        "min_new_tokens": 2,
        "frequency_penalty": 0.1,
        "logit_bias": {"7": -1},
    }
    grammar = {"ebnf_grammar": 'root ::= "a"', "skip_special_tokens": True}
    await client.all_of(ask(sampling=params, stream=True))
    await client.all_of(ask(sampling=grammar))
    await client.all_of(ask())
    await client.all_of(message("GenerateRequest", tokenized={"input_ids": [97]}))
    given, held, zeros, without = (sent.sampling for sent in sent_to_fleet(site))
    assert (given.temperature, given.top_p, given.top_k, given.min_tokens) == (0.7, 0.9, 7, 2)
    assert (given.frequency_penalty, given.logit_bias) == (0.1, ((7, -1.0),))
    assert held.grammar == Grammar("ebnf", 'root ::= "a"')
    assert (zeros.temperature, zeros.top_p, zeros.repetition_penalty, zeros.max_new_tokens) == (0, 1, 1, 3)
    assert (without.temperature, without.max_new_tokens) == (1, min(128, site.fleet.context_tokens - 1))


REFUSED = {
    "tokenized": ask(tokenized={}),
    "mm_inputs": ask(mm_inputs={}),
    "disaggregated_params": ask(disaggregated_params={}),
    "token_ids_logprob": ask(token_ids_logprob=[1]),
    "return_hidden_states": ask(return_hidden_states=True),
    "custom_logit_processor": ask(custom_logit_processor="x"),
    "input_embeds": ask(input_embeds=[0.5]),
    "data_parallel_rank": ask(data_parallel_rank=1),
    "require_reasoning": ask(require_reasoning=True),
    "logprob_start_len": ask(logprob_start_len=1),
    "top_logprobs_num": ask(top_logprobs_num=1),
    "request_id": ask(request_id="a b"),
    "no-such-adapter": ask(lora_id="no-such-adapter"),
    "sampling_params.temperature": ask(sampling={"temperature": 3}),
    "sampling_params.min_p": ask(sampling={"min_p": float("nan")}),
    "sampling_params.logit_bias": ask(sampling={"logit_bias": {"7": float("-inf")}}),
    "sampling_params.custom_params": ask(sampling={"custom_params": {"fields": {"x": {"number_value": 1}}}}),
    "sampling_params.stream_interval": ask(sampling={"stream_interval": 2}),
    "sampling_params.max_new_tokens": ask(tokens=9_999),
    "input_ids": ask("x" * 3),
}
REFUSED["input_ids"].tokenized.input_ids.append(2**31)


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_honoured_is_refused_by_name(site: Site, client: Client, name: str) -> None:
    refused = await refusal(client.all_of(REFUSED[name]))
    assert refused.code() == (STATUS.NOT_FOUND if "adapter" in name else STATUS.INVALID_ARGUMENT)
    assert name in refused.details() and not sent_to_fleet(site)


async def test_fields_of_later_versions_long_lists_and_other_bytes_are_refused(client: Client) -> None:
    newer = message("GenerateRequest")
    newer.ParseFromString(ask().SerializeToString() + bytes([0xF8, 0x07, 1]))  # field 127
    assert "127" in (await refusal(client.all_of(newer))).details()
    long = await refusal(client.all_of(ask("x" * 10_000)))
    assert (long.code(), "maximum context length" in long.details()) == (STATUS.INVALID_ARGUMENT, True)

    class Garbage:
        def SerializeToString(self) -> bytes:
            return b"\xff" * 9

    assert (await refusal(client.all_of(Garbage()))).code() == STATUS.INVALID_ARGUMENT


# --- one call's life ---------------------------------------------------------------------------------------------------------


async def test_a_request_ends_by_abort_by_its_deadline_and_when_its_client_leaves() -> None:
    async with Site(EchoFleet(stall_at=1)) as site, served(site) as (client, _):
        answer = asyncio.create_task(client.all_of(ask(request_id="mine", tokens=5)))
        await until(lambda: len(site.core.requests) == 1)
        assert (await client.call("Abort", request_id="mine")).success
        (part,) = await answer
        assert (part.request_id, part.complete.finish_reason, list(part.complete.output_ids)) == ("mine", "abort", [104])
        assert not (await client.call("Abort", request_id="mine")).success

        late = asyncio.create_task(refusal(client.all_of(ask(stream=True), timeout=0.5)))
        await until(lambda: len(site.core.requests) == 1)
        assert [0 < record.timeout_s < 1 for record in site.core.requests.records()] == [True]
        assert (await late).code() == STATUS.DEADLINE_EXCEEDED
        await until(lambda: not site.core.requests.clients)

        stream = client.generate(ask(stream=True))
        assert list((await stream.read()).chunk.token_ids) == [104]
        stream.cancel()
        await until(lambda: not site.core.requests.clients)
        assert len(site.fleet.cancelled()) == 3 and not len(site.api.admission.places)


async def test_a_failure_has_grpcs_status_with_the_id_of_its_request_and_says_when_to_try_again() -> None:
    async with Site(EchoFleet(fail_at=1)) as site, served(site) as (client, _):
        stream = client.generate(ask(stream=True), metadata=(("x-request-id", "mine"),))
        assert list((await stream.read()).chunk.token_ids) == [104]
        failed = await refusal(stream.read())
        assert (failed.code(), failed.details()) == (STATUS.INTERNAL, "the step failed")
        assert dict(failed.trailing_metadata())["x-request-id"] == "mine"
    async with Site(EchoFleet(joins=False)) as site, served(site) as (client, _):
        nobody = await refusal(client.all_of(ask()))
        assert nobody.code() == STATUS.UNAVAILABLE and dict(nobody.trailing_metadata())["grpc-retry-pushback-ms"] == "2000"
        assert (await client.call("HealthCheck")).healthy is False
        assert (await client.call("Check", f"{HEALTH}.Health")).status == 2


async def test_a_draining_router_ends_what_is_open_and_takes_no_more() -> None:
    stop = asyncio.Event()
    async with Site(EchoFleet(stall_at=3)) as site, served(site, stop=stop) as (client, where):
        over = asyncio.create_task(site.gateway.drain(600.0, stop, asyncio.Event()))
        stream = client.generate(ask(tokens=5, stream=True))
        await until(lambda: any(len(record.token_ids) == 3 for record in site.core.requests.records()))
        stop.set()
        await asyncio.sleep(0.1)
        async with grpc.aio.insecure_channel(where) as channel:
            assert (await refusal(Client(channel).all_of(ask()))).code() == STATUS.UNAVAILABLE
        (record,) = site.core.requests.records()
        assert record.attempt is not None
        ends = TextDelta(record.attempt.key, 3, (108, 111), "lo", Finished(reason="length"))
        site.fleet.say(TextBatch(deltas=(ends,)))
        *_, last = [part async for part in stream]
        assert bytes(last.complete.output_ids) == b"hello"
        await asyncio.wait_for(over, 5)


# --- who may call, and how much ----------------------------------------------------------------------------------------------


async def test_keys_share_the_router_and_a_flood_of_streams_leaves_room_for_another_key() -> None:
    config = dataclasses.replace(CONFIG, max_requests=10)
    async with (
        Site(EchoFleet(stall_at=1), config, access=keyed()) as site,
        served(site, config) as (nobody, where),
        grpc.aio.insecure_channel(where) as channel,
    ):
        alice, bob = Client(channel, ALICE), Client(channel, BOB)
        for stranger in (nobody, Client(channel, "d" * 20), Client(channel, CONTROL)):
            assert (await refusal(stranger.all_of(ask()))).code() == STATUS.UNAUTHENTICATED
            assert (await refusal(stranger.call("Abort", request_id="x"))).code() == STATUS.UNAUTHENTICATED
        assert (await nobody.call("HealthCheck")).healthy
        flood = [asyncio.create_task(alice.all_of(ask(request_id="hers", stream=True))) for _ in range(200)]
        await until(lambda: sum(task.done() for task in flood) == 200 - len(site.core.requests) > 0)
        codes = {task.exception().code() for task in flood if task.done()}  # type: ignore[union-attr]
        # UNAVAILABLE: before the client knows the connection's bound
        assert codes <= {STATUS.RESOURCE_EXHAUSTED, STATUS.UNAVAILABLE}
        assert 0 < len(site.core.requests) < 10
        of_bob = asyncio.create_task(bob.all_of(ask(request_id="his"), metadata=(("x-api-key", BOB),)))
        await until(lambda: any(record.spec.owner == "bob" for record in site.core.requests.records()))
        assert not (await bob.call("Abort", request_id="hers")).success
        assert (await bob.call("Abort", request_id="his")).success and len(await of_bob) == 1
        assert (await alice.call("Abort", request_id="hers")).success
        await asyncio.gather(*flood, return_exceptions=True)
        await until(lambda: not len(site.api.admission.places))


async def test_strangers_who_connect_or_begin_health_checks_delay_no_key() -> None:
    config = dataclasses.replace(CONFIG, max_requests=10)
    async with (
        Site(config=config, access=keyed(), max_body_bytes=2**24) as site,
        served(site, config) as (_, where),
        grpc.aio.insecure_channel(where) as channel,
        grpc.aio.insecure_channel(where, (("a", 1),)) as other,
    ):
        silent = [other.stream_stream(f"/{SERVICE}/HealthCheck")(timeout=30) for _ in range(60)]
        reads = [asyncio.create_task(call.read()) for call in silent]
        connections = [await asyncio.open_connection(*where.split(":")) for _ in range(300)]
        await asyncio.sleep(0.3)
        async with asyncio.timeout(5):
            assert len(await Client(channel, ALICE).all_of(ask())) == 1
        for call in silent:
            call.cancel()
        for _, writer in connections:
            writer.close()
        await asyncio.gather(*reads, return_exceptions=True)


async def test_tls_is_that_of_http(tmp_path: Path) -> None:
    async with Site(access=certified(tmp_path)) as site, served(site) as (plain, where):
        trusting = grpc.ssl_channel_credentials((tmp_path / "cert").read_bytes())
        async with grpc.aio.secure_channel(where, trusting) as channel:
            *_, last = await Client(channel).all_of(ask(stream=True))
            assert bytes(last.complete.output_ids) == b"hel"
        assert (await refusal(plain.all_of(ask()))).code() == STATUS.UNAVAILABLE


async def test_messages_are_bounded_in_length_time_and_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MESSAGE_S", 0.2)
    async with Site(max_body_bytes=10_000) as site, served(site) as (client, where):
        large = await refusal(client.all_of(ask(custom_logit_processor="x" * 10_000)))
        assert large.code() == STATUS.RESOURCE_EXHAUSTED
        packed = await refusal(client.all_of(ask(), compression=grpc.Compression.Gzip))
        assert packed.code() == STATUS.UNIMPLEMENTED
        async with grpc.aio.insecure_channel(where) as channel:
            silent = channel.stream_stream(f"/{SERVICE}/Generate")(timeout=30)
            assert (await refusal(silent.read())).code() == STATUS.DEADLINE_EXCEEDED
            none = channel.stream_stream(f"/{SERVICE}/Generate")(timeout=30)
            await none.done_writing()
            assert (await refusal(none.read())).code() == STATUS.INVALID_ARGUMENT
        await until(lambda: not len(site.api.admission.places))


async def test_a_client_that_does_not_read_loses_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "SEND_TIMEOUT_S", 0.2)
    small = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))
    async with Site(EchoFleet()) as site, served(site, options=small) as (client, _):
        unread = client.generate(ask(tokens=100, stream=True, return_logprob=True, logprob_start_len=-1, top_logprobs_num=20))
        await until(lambda: sent_to_fleet(site))
        await until(lambda: not site.core.requests.clients)
        unread.cancel()
        await until(lambda: not len(site.api.admission.places))


# --- the rest ----------------------------------------------------------------------------------------------------------------


async def test_embeddings_are_those_of_http_and_other_models_refuse_them() -> None:
    async with Site(embedding=EmbeddingMode("last", True, 2)) as site, served(site) as (client, _):
        over_http = (await post(site, "/v1/embeddings", {"model": "echo", "input": "hello"})).json()["data"][0]["embedding"]
        ids = {"input_ids": list(map(ord, "hello"))}
        answer = await client.call("Embed", tokenized=ids, request_id="mine")
        assert list(answer.embedding) == pytest.approx(over_http) and (answer.embedding_dim, answer.prompt_tokens) == (2, 5)
        for name, value in {"texts": ["x"], "token_type_ids": [1], "is_cross_encoder": True, "mm_inputs": {}}.items():
            refused = await refusal(client.call("Embed", tokenized=ids, **{name: value}))
            assert refused.code() == STATUS.INVALID_ARGUMENT and name in refused.details()
    async with Site() as site, served(site) as (client, _):
        assert "--pooling" in (await refusal(client.call("Embed", tokenized=ids))).details()


async def test_a_client_learns_what_is_served_and_how_it_is(client: Client) -> None:
    assert (await client.call("HealthCheck")).healthy
    assert (await client.call("Check", f"{HEALTH}.Health", service=SERVICE)).status == 1
    assert (await refusal(client.call("Check", f"{HEALTH}.Health", service="x"))).code() == STATUS.NOT_FOUND
    model, server = await client.call("GetModelInfo"), await client.call("GetServerInfo")
    assert (model.served_model_name, model.is_generation, model.max_context_length) == ("echo", True, model.max_req_input_len + 1)
    assert (server.server_type, server.active_requests, server.is_paused, server.server_args["num_gpus"]) == ("grpc", 0, False, 2)


async def test_without_grpcio_the_flag_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "router.api.grpc_server", None)
    with pytest.raises(ConfigError, match=r"--grpc-port needs grpcio.*\.\[grpc\]"):
        event = asyncio.Event()
        event.set()
        config = dataclasses.replace(CONFIG, port=0, control_port=0)
        await serve(config, ModelConfig(), ROUTER, ["tcp://127.0.0.1:1"], lambda _: None, event, event)
    for port in ("x", "65536", "-1"):
        with pytest.raises(ConfigError, match="--grpc-port"):
            RouterConfig(grpc_port=port)


RECORDED = bytes.fromhex(
    "0a046d696e6512080a0268691202686922530d3333333f156666663f18ffffffffffffffffff0125cdcccc3d2dcdcc4c3e359a99993e3dcdcc8c3f40"
    "084a01785201095801600172027b7d880102900101980101a00101a80101b201080a013715000080bf280130ffffffffffffffffff01380268017a01"
    "61880101"
)
"""A request with most of its fields, as the code wrote it that protoc made of SGLang's own proto (2026-11-26)."""


def test_a_request_from_sglangs_own_code_is_read_field_by_field() -> None:
    asked = read_generate_message("echo", 2.5, RECORDED, 128)
    given = asked.fields
    assert (asked.rids, asked.prompts, asked.max_tokens, asked.adapters) == (("mine",), ((104, 105),), 8, ("a",))
    assert (asked.logprobs, asked.prompt_logprobs, asked.grammar, given.stream) == (2, None, Grammar("json_schema", "{}"), True)
    assert (given.temperature, given.top_p, given.top_k, given.min_p, given.repetition_penalty) == (0.7, 0.9, -1, 0.1, 1.1)
    assert (given.frequency_penalty, given.presence_penalty, given.logit_bias) == (0.2, 0.3, {"7": -1.0})
    assert (given.stop, given.stop_token_ids, given.n, given.min_tokens, given.timeout) == (["x"], [9], 2, 1, 2.5)
    assert given.skip_special_tokens and given.ignore_eos and given.include_stop_str_in_output


PROTO = Path(grpc_server.__file__).parent / "sglang_scheduler.proto"


def test_the_descriptors_are_those_of_the_proto() -> None:
    fields = {
        f"{SCHEDULER}.{name}": dict(re.findall(r"(\w+) = (\d+);", body))
        for name, body in re.findall(r"^message (\w+) \{(.*?)(?:^|(?<=\{))\}$", PROTO.read_text(), re.MULTILINE | re.DOTALL)
    }
    made = {name: {field.name: str(field.number) for field in one.DESCRIPTOR.fields} for name, one in CLASSES.items()}
    assert len(fields) == 22 and fields == {name: made[name] for name in fields}
