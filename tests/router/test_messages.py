"""/v1/messages through the `anthropic` client, and the bodies that Claude Code sends. The fleet echoes: the text of the last
question is the answer, up to its bar."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import anthropic
import pydantic
import pytest

from common.config import RouterConfig
from common.errors import BadRequest
from common.messages import ExpectAnswer, Finished
from router.api.answers import Accepted
from router.api.messages import MessageShape, read_count, read_message
from router.api.parsing.formats import HERMES, THINK, AnswerFormat
from router.api.parsing.parser import AnswerReading
from router.api.tools import Function
from router.requests import ChoiceDelta
from tests.router.calls import ALICE, CALL, SCHEMA, THOUGHT, anthropic_client, keyed, message, post, sent_to_fleet, until
from tests.router.fakes import MODEL, CharTokenizer, EchoFleet, Site
from tests.router.test_disconnects import RawClient

pytestmark = pytest.mark.anyio
THINKS = "{{ tools }} <tool_call> <think>"
SWITCHES = THINKS + " {{ enable_thinking }} {{ reasoning_effort }}"
TOOLS: Any = [{"name": "weather", "description": "the weather", "input_schema": SCHEMA}]
ANSWER = THOUGHT + "Let me see.\n" + CALL + "\n" + CALL.replace("Oslo", "Rome")


def asking(text: str, **fields: Any) -> Any:
    """Arguments of a message whose answer is this text."""
    return message(text + "|", stop_sequences=["|"], max_tokens=500, tools=TOOLS) | fields


def long_fleet(**options: Any) -> EchoFleet:
    return EchoFleet(context_tokens=3_000, **options)


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream. Each says its type twice."""
    found = []
    for part in text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def gathered(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that these events make."""
    whole: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                whole = event["message"]
            case "content_block_start":
                assert event["index"] == len(whole["content"])
                whole["content"].append(event["content_block"] | {"pieces": []})
            case "content_block_delta":
                kind = event["delta"].pop("type")
                ((name, text),) = event["delta"].items()
                block = whole["content"][-1]
                if kind == "input_json_delta":
                    block["pieces"].append(text)
                else:
                    block[name] = block.get(name, "") + text
            case "content_block_stop":
                pieces = whole["content"][-1].pop("pieces")
                if pieces:
                    whole["content"][-1]["input"] = json.loads("".join(pieces))
            case "message_delta":
                whole |= event["delta"] | {"usage": event["usage"]}
    return whole


async def test_a_text_whole_and_streamed() -> None:
    fleet = EchoFleet()
    fleet.cached_tokens = 2
    async with anthropic_client(fleet) as client:
        whole = await client.messages.create(**message())
        assert whole.to_dict() | {"id": ""} == {
            "id": "",
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": [{"type": "text", "text": "hello"}],
            "stop_reason": "max_tokens",
            "stop_sequence": None,
            "usage": {"input_tokens": 3, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 0, "output_tokens": 5},
        }
        assert whole.id == f"msg_{whole._request_id}"
        stream = await client.messages.create(**message(), stream=True)
        kinds = [event.type async for event in stream]
        async with client.messages.stream(**message()) as managed:
            pieces = [text async for text in managed.text_stream]
            final = await managed.get_final_message()
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 5,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert pieces == list("hello")
    assert (final.content[0].to_dict(), final.usage.to_dict()) == (whole.content[0].to_dict(), whole.usage.to_dict())


async def test_thoughts_texts_and_calls_are_blocks_whole_and_as_the_client_gathers_a_stream() -> None:
    async with anthropic_client(long_fleet(), chat_template=THINKS) as client:
        whole = await client.messages.create(**asking(ANSWER, stop_sequences=[], max_tokens=len(ANSWER)))
        async with client.messages.stream(**asking(ANSWER)) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_message()
    answers: list[Any] = [whole, final]
    for answer in answers:
        thought, said, oslo, rome = answer.content
        assert thought.type == "thinking" and thought.thinking == "which city?" and thought.signature
        assert said.type == "text" and said.text == "Let me see."
        assert oslo.type == rome.type == "tool_use" and oslo.name == "weather" and oslo.id != rome.id
        assert (oslo.input, rome.input) == ({"city": "Oslo"}, {"city": "Rome"})
    assert (whole.stop_reason, final.stop_reason, final.stop_sequence) == ("max_tokens", "stop_sequence", "|")
    assert len([event for event in events if event.type == "input_json"]) > 20, "arguments come as they are written"


@pytest.mark.parametrize("omitted", [False, True])
@pytest.mark.parametrize("text", [ANSWER, THOUGHT + "Yes.", CALL + "\nand " + CALL, "", "plain", CALL + CALL[:-30]])
def test_a_stream_makes_the_same_message_as_a_whole_answer_however_it_is_cut(text: str, omitted: bool) -> None:
    def shape() -> MessageShape:
        new_parser = AnswerFormat(HERMES, THINK).new_parser([Function("weather")], separates=True, opened=False)
        reading = AnswerReading(new_parser, lambda name, number: "call_1")
        asked = read_message(
            json.dumps(message(thinking={"type": "adaptive", "display": "omitted" if omitted else None})).encode()
        )
        accepted = Accepted((), 5, reading=reading)
        return MessageShape(
            id="msg_1", created=0, model=MODEL, request=asked, accepted=accepted, token_texts=CharTokenizer.token_text
        )

    def streamed(pieces: Sequence[str]) -> dict[str, Any]:
        one, sent = shape(), b""
        for number, piece in enumerate(pieces):
            ending = Finished("stop") if number == len(pieces) - 1 else None
            sent += one.events(ChoiceDelta(0, piece, (1,), ending), opens=number == 0)
        return gathered(events_of((sent + one.last_events()).decode()))

    whole = json.loads(shape().whole([ChoiceDelta(0, text, (1, 1), Finished("stop"))]))
    cut_off = whole["content"][-1].get("input", {}).pop("INVALID_JSON", None)
    assert (cut_off is not None) == text.endswith('"arg')
    if cut_off is None:
        for place in range(len(text) + 1):
            assert streamed([text[:place], text[place:]]) == whole
        assert streamed([*text, ""])["content"] == whole["content"]
    calls = [block for block in whole["content"] if block["type"] == "tool_use"]
    assert whole["stop_reason"] == ("tool_use" if calls else "end_turn")


def test_a_call_costs_as_much_behind_many_as_behind_none() -> None:
    class Unread(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("the blocks before the last one are looked at")

    new_parser = AnswerFormat(HERMES, None).new_parser([Function("weather")], separates=True, opened=False)
    reading = AnswerReading(new_parser, lambda name, number: f"{name}:{number}")
    one = MessageShape(
        id="msg_1",
        created=0,
        model=MODEL,
        request=read_message(json.dumps(message()).encode()),
        accepted=Accepted((), 5, reading=reading),
        token_texts=CharTokenizer.token_text,
    )
    one.blocks = Unread()
    sent = one.events(ChoiceDelta(0, "First: " + CALL * 3, (1,), Finished("stop")), opens=True)
    assert [sent.count(f'"weather:{number}"'.encode()) for number in range(4)] == [1, 1, 1, 0]


async def test_an_answer_can_be_sent_back_with_the_results_of_its_calls() -> None:
    async with anthropic_client(long_fleet(), chat_template=THINKS) as client:
        first = await client.messages.create(**asking(THOUGHT + CALL))
        call = first.content[-1]
        assert call.type == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain|"}]}
        for content in (first.content, [block.model_dump() for block in first.content]):
            talk: Any = [
                {"role": "user", "content": ""},
                {"role": "assistant", "content": content},
                {"role": "user", "content": [result]},
            ]
            second = await client.messages.create(**asking("", messages=talk))
            assert second.content[0].type == "text" and second.content[0].text == "rain"
            assert (second.stop_reason, second.stop_sequence) == ("stop_sequence", "|")


async def test_a_call_that_must_come_a_stop_sequence_and_a_stream_go_together() -> None:
    async with Site(long_fleet(), chat_template=THINKS) as site:
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}):
            events = events_of((await post(site, "/v1/messages", asking(CALL, tool_choice=choice, stream=True))).text)
            answer = gathered(events)
            assert [block["type"] for block in answer["content"]] == ["tool_use"]
            assert (answer["content"][0]["input"], answer["stop_reason"], answer["stop_sequence"]) == (
                {"city": "Oslo"},
                "stop_sequence",
                "|",
            )
        grammars = [sent.sampling.grammar.text for sent in sent_to_fleet(site) if sent.sampling.grammar is not None]
        stops = [one.stop for _, one in site.fleet.sent if isinstance(one, ExpectAnswer)]
    assert stops == [("|",)] * 2
    assert [('"stop_after_first":true' in text, json.dumps(SCHEMA, separators=(",", ":")) in text) for text in grammars] == [
        (False, True),
        (True, True),
    ]


async def test_a_pydantic_model_is_a_grammar_for_the_answer() -> None:
    class Weather(pydantic.BaseModel):
        city: str

    async with Site(long_fleet()) as site:
        fields = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
        assert (await post(site, "/v1/messages", message() | fields)).status_code == 200
        (sent,) = sent_to_fleet(site)
        assert sent.sampling.grammar is not None and json.loads(sent.sampling.grammar.text) == SCHEMA
    async with anthropic_client(long_fleet()) as client:
        text = '{"city": "Oslo"}'
        parsed = await client.messages.parse(**message(text, max_tokens=len(text)), output_format=Weather)
    assert parsed.parsed_output == Weather(city="Oslo")


async def test_tokens_are_counted_as_a_message_has_them() -> None:
    asked: Any = message("hello", system="be brief")
    async with anthropic_client() as client:
        count = await client.messages.count_tokens(**{name: asked[name] for name in ("model", "messages", "system")})
        whole = await client.messages.create(**asked)
        assert count.input_tokens == whole.usage.input_tokens == len("be briefhello")
        with pytest.raises(anthropic.NotFoundError, match="model 'other' is not served"):
            await client.messages.count_tokens(model="other", messages=asked["messages"])


HIGH = {"output_config": {"effort": "high"}}


@pytest.mark.parametrize(
    ("template", "fields", "expected"),
    [
        ("plain", {"thinking": {"type": "adaptive"}}, {}),
        ("plain", {"thinking": {"type": "disabled"}}, {}),
        ("plain", {"thinking": {"type": "enabled", "budget_tokens": 2000}}, "does not let the model think"),
        (THINKS, {"thinking": {"type": "enabled"}}, {}),
        (THINKS, {"thinking": {"type": "adaptive", "budget_tokens": 0}}, {}),
        (THINKS, {"thinking": {"type": "disabled"}}, "always lets the model think"),
        (SWITCHES, {"thinking": {"type": "enabled"}}, {"enable_thinking": True}),
        (SWITCHES, {"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        (SWITCHES, {"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        (SWITCHES, {"thinking": None}, {}),
        (THINKS, HIGH, {}),
        (SWITCHES, HIGH, {"reasoning_effort": "high"}),
    ],
)
async def test_thinking_and_effort_are_what_the_chat_template_can_do_or_refused(
    template: str, fields: dict[str, Any], expected: Any
) -> None:
    async with Site(chat_template=template) as site:
        if isinstance(expected, str):
            refused = await post(site, "/v1/messages", message() | fields)
            assert refused.status_code == 400 and expected in refused.json()["error"]["message"]
        else:
            asked = read_message(json.dumps(message() | fields).encode())
            assert site.intake._chats.options(asked).arguments == expected


async def test_thoughts_that_are_omitted_come_back_with_their_signature() -> None:
    async with anthropic_client(long_fleet(), chat_template=THINKS) as client:
        asked = asking(THOUGHT + "Oslo", thinking={"type": "adaptive", "display": "omitted"})
        async with client.messages.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            answer = await stream.get_final_message()
    assert "thinking" not in kinds and answer.content[0].to_dict()["thinking"] == ""
    talk = [*asked["messages"], {"role": "assistant", "content": answer.to_dict()["content"]}, {"role": "user", "content": "?"}]
    read = read_message(json.dumps(message() | {"messages": talk}).encode())
    assert read.messages[1] == {"role": "assistant", "content": "Oslo", "reasoning_content": "which city?"}


async def test_a_stream_whose_thoughts_are_omitted_gets_pings_while_it_says_nothing() -> None:
    async with Site(EchoFleet(stall_at=9), RouterConfig(keep_alive_s=0.02), chat_template=THINKS) as site:
        thinking = {"type": "adaptive", "display": "omitted"}
        asked = message("<think>hm") | {"max_tokens": 50}
        client = RawClient(site, path="/v1/messages", stream=True, thinking=thinking, **asked)
        await until(lambda: client.answered.count('event: ping\ndata: {"type":"ping"}\n\n') >= 2)
        client.leave()
        await client.gone()
    kinds = [event["type"] for event in events_of(client.answered)]
    assert [kind for kind in kinds if kind != "ping"] == ["message_start", "content_block_start"]


async def test_an_answer_ends_with_the_context_when_max_tokens_is_more_and_says_so() -> None:
    async with anthropic_client(EchoFleet(context_tokens=2_000)) as client:
        cut = await client.messages.create(**message("x" * 1_990, max_tokens=32_000))
        assert (cut.stop_reason, cut.usage.output_tokens) == ("model_context_window_exceeded", 10)
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* 2000 tokens"):
            await client.messages.create(**message("x" * 2_000))


async def test_an_answer_that_is_aborted_pauses() -> None:
    async with Site(EchoFleet(stall_at=3)) as site:
        client = RawClient(site, path="/v1/messages", stream=True)
        await until(
            lambda: "".join(e["delta"]["text"] for e in events_of(client.answered) if "index" in e and "delta" in e) == "hel"
        )
        assert (await post(site, "/abort_request", {"rid": "msg_mine"})).json()["aborted"] == 1
        await client.gone()
    assert gathered(events_of(client.answered))["stop_reason"] == "pause_turn"


async def test_a_failure_in_mid_stream_is_raised_after_the_text_before_it() -> None:
    async with anthropic_client(EchoFleet(fail_at=2)) as client:
        text = ""
        with pytest.raises(anthropic.APIStatusError, match="the step failed"):
            async with client.messages.stream(**message()) as stream:
                async for piece in stream.text_stream:
                    text += piece
        with pytest.raises(anthropic.InternalServerError, match="the step failed") as raised:
            await client.messages.create(**message())
    assert text == "he" and raised.value.type == "api_error"


async def test_errors_have_the_names_that_anthropic_gives_their_statuses() -> None:
    """With keys, and with as many requests open as may be."""
    config = RouterConfig(max_requests=1, dead_after_s=60.0)
    async with Site(EchoFleet(stall_at=1), config, access=keyed()) as site, site.client() as client:
        key = {"x-api-key": ALICE, "anthropic-version": "2023-06-01", "anthropic-beta": "some-beta"}

        async def error(status: int, path: str = "/v1/messages", headers: dict[str, str] = key, **fields: Any) -> Any:
            response = await client.post(path, json=message() | fields, headers=headers)
            body = response.json()
            assert (response.status_code, body["type"], body.keys()) == (status, "error", {"type", "error", "request_id"})
            assert response.headers["request-id"] == response.headers["x-request-id"] == body["request_id"]
            return body["error"]

        assert (await error(401, headers={}))["type"] == "authentication_error"
        assert (await error(401, headers={"x-api-key": "wrong"}))["type"] == "authentication_error"
        assert (await error(404, model="other"))["type"] == "not_found_error"
        assert (await error(404, path="/v1/messages/batches"))["type"] == "not_found_error"
        wrong = await error(400, max_tokens=0)
        assert (wrong["type"], wrong["param"]) == ("invalid_request_error", "max_tokens")
        assert (await error(413, system="x" * 200_000))["type"] == "request_too_large"
        open_one = asyncio.create_task(client.post("/v1/messages", json=message(), headers=key))
        await until(lambda: len(site.core.requests) == 1)
        assert (await error(429))["type"] == "rate_limit_error"
        site.core.requests.is_draining = True
        assert (await error(503))["type"] == "overloaded_error"
        open_one.cancel()


SYSTEM = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
CLAUDE_CODE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 32_000,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.150.a1b; cc_entrypoint=cli; cch=1f2e3;"},
        {"type": "text", "text": "You help with code.", "cache_control": SYSTEM},
        {"type": "text", "text": "\nUse the tools.", "cache_control": SYSTEM},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nThe date is known.\n</system-reminder>\n"},
                {"type": "text", "text": "What is in a.txt?"},
            ],
        },
        {"role": "system", "content": "Agents: none."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "", "signature": "EqQBCkYIBRgCKkA"},
                {"type": "redacted_thinking", "data": "EmwKAhgBEgy3"},
                {"type": "thinking", "thinking": "I read it.", "signature": "tandem."},
                {"type": "text", "text": "I read it.\n\n"},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a.txt"}, "caller": {"type": "direct"}},
                {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {"path": "b.txt"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "1: a"}]},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": "no such file",
                    "is_error": True,
                    "cache_control": {"type": "ephemeral"},
                },
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": "9000 tokens left", "cache_control": SYSTEM}]},
    ],
    "tools": [
        {"name": "Read", "description": "Reads a file.", "input_schema": SCHEMA | {"additionalProperties": False}},
        {"name": "mcp__a__b", "description": "", "input_schema": SCHEMA, "eager_input_streaming": True, "cache_control": SYSTEM},
    ],
    "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "diagnostics": {"previous_message_id": "msg_1"},
}
"""The form of a turn of Claude Code 2.1: fields, blocks and their order; with texts that are shorter."""
TITLE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 32_000,
    "stream": True,
    "temperature": 1,
    "system": [{"type": "text", "text": "Make a title."}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    "tools": [],
    "thinking": {"type": "disabled"},
    "metadata": {"user_id": "user_1_account__session_2"},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA | {"additionalProperties": False}}},
}
QUOTA: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 1,
    "messages": [{"role": "user", "content": "quota"}],
    "metadata": {"user_id": "user_1_account__session_2"},
}
HEADERS = {
    "accept": "application/json",
    "accept-language": "*",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "anthropic-version": "2023-06-01",
    "content-type": "application/json",
    "sec-fetch-mode": "cors",
    "user-agent": "claude-cli/2.1.150 (external, cli)",
    "x-api-key": ALICE,
    "x-app": "cli",
    "x-stainless-lang": "js",
}


@pytest.mark.parametrize("template", [THINKS + " {{ enable_thinking }}", "{{ tools }} <tool_call>"])
@pytest.mark.parametrize("body", [CLAUDE_CODE, TITLE, QUOTA], ids=["turn", "title", "quota"])
async def test_what_claude_code_sends_is_served(body: dict[str, Any], template: str) -> None:
    async with Site(long_fleet(stop_at=20), chat_template=template, access=keyed()) as site, site.client() as client:
        answer = await client.post("/v1/messages?beta=true", json=body, headers=HEADERS)
        assert answer.status_code == 200, answer.text
        message = gathered(events_of(answer.text)) if "stream" in body else answer.json()
        assert message["stop_reason"] == ("end_turn" if "stream" in body else "max_tokens")
        counted = {name: body[name] for name in ("model", "messages", "system", "tools", "thinking") if name in body}
        count = await client.post("/v1/messages/count_tokens?beta=true", json=counted, headers=HEADERS)
        assert count.json() == {"input_tokens": message["usage"]["input_tokens"]}


def called(id: str, path: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "Read", "arguments": json.dumps({"path": path})}}


CONVERSATION = (
    {"role": "system", "content": "You help with code.\n\n\nUse the tools."},
    {
        "role": "user",
        "content": "<system-reminder>\nThe date is known.\n</system-reminder>\n\n\nWhat is in a.txt?\n\nAgents: none.",
    },
    {
        "role": "assistant",
        "content": "I read it.\n\n",
        "reasoning_content": "I read it.",
        "tool_calls": [called("toolu_1", "a.txt"), called("toolu_2", "b.txt")],
    },
    {"role": "tool", "content": "1: a", "tool_call_id": "toolu_1"},
    {"role": "tool", "content": "Error: no such file\n\n9000 tokens left", "tool_call_id": "toolu_2"},
)


def test_blocks_become_the_messages_that_chat_templates_want() -> None:
    read = read_message(json.dumps(CLAUDE_CODE).encode())
    assert read.messages == CONVERSATION
    assert [tool["function"]["name"] for tool in read.tools.shown] == ["Read", "mcp__a__b"]
    assert read.tools.shown[0]["function"]["parameters"] == SCHEMA | {"additionalProperties": False}
    counted = {name: CLAUDE_CODE[name] for name in ("model", "messages", "system", "tools")}
    prompt = read_count(json.dumps(counted).encode()).prompt
    assert not isinstance(prompt, str) and prompt.messages == CONVERSATION


def test_each_request_of_a_conversation_begins_with_the_one_before() -> None:
    """So its KV is found again, wherever notes to the model stand."""
    talk: list[dict[str, Any]] = CLAUDE_CODE["messages"]

    def rendered(turns: int, header: str) -> str:
        system = [{"type": "text", "text": f"x-anthropic-billing-header: cch={header};"}, *CLAUDE_CODE["system"][1:]]
        read = read_message(json.dumps(CLAUDE_CODE | {"messages": talk[:turns], "system": system}).encode())
        return "".join(f"<{one['role']}>{one['content']}" for one in read.messages)

    asked = [rendered(turns, str(turns)) for turns in (2, 5)]
    assert asked[1].startswith(asked[0])


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([("system", "a"), ("user", "b")], [("system", "s\n\na"), ("user", "b")]),
        ([("user", "a"), ("user", "b")], [("system", "s"), ("user", "a\n\nb")]),
        ([("user", "a"), ("assistant", "b"), ("assistant", "c")], [("system", "s"), ("user", "a"), ("assistant", "bc")]),
        (
            [("user", "a"), ("assistant", "b"), ("system", "c")],
            [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")],
        ),
    ],
)
def test_turns_of_one_side_are_one_message(turns: list[tuple[str, str]], expected: list[tuple[str, str]]) -> None:
    talk = [{"role": role, "content": text} for role, text in turns]
    read = read_message(json.dumps(message(system="s") | {"messages": talk}).encode())
    assert [(one["role"], one["content"]) for one in read.messages] == expected
    assert read.fields.continue_final_message == (turns[-1][0] == "assistant") != read.fields.add_generation_prompt


QUESTION_AND_ANSWER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "user", "content": []}]}, "messages", "empty"),
        ({"messages": [*QUESTION_AND_ANSWER, {"role": "user", "content": []}]}, "messages", "without content"),
        ({"messages": [*QUESTION_AND_ANSWER, {"role": "system", "content": []}]}, "messages", "without content"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role", "use user, assistant or system"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type", "image"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}]},
            "messages[0].content[0].content[0].type",
            "texts, thoughts and calls",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type", "document"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
            "messages",
            "send the results",
        ),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "use custom"),
        ({"tools": [TOOLS[0] | {"defer_loading": True}]}, "tools[0].defer_loading", "false"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type", "use auto, any, tool or none"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice", "'f'"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management", "leave it out"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "leave it out or send []"),
        ({"container": "c"}, "container", "leave it out"),
        ({"service_tier": "priority"}, "service_tier", "standard_only"),
        ({"thinking": {"type": "auto"}}, "thinking.type", "auto"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", "text"),
        ({"n": 2}, "n", "not a known field"),
    ],
)
def test_a_bad_request_is_refused_by_field_and_fix(fields: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(BadRequest) as raised:
        read_message(json.dumps(message() | fields).encode())
    assert (raised.value.field, says in str(raised.value)) == (field, True), str(raised.value)
