"""Tools and thoughts through the `openai` client.

The fleet echoes, so a question holds the text that the model would write; a bar ends the answer.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest
from msgspec.structs import replace

from common.errors import BadRequest
from common.messages import ExpectAnswer, Failed
from tests.router.calls import CALL, SCHEMA, THOUGHT, assert_error, chat, openai_client, post, sent_to_fleet
from tests.router.fakes import MODEL, EchoFleet, Site

pytestmark = pytest.mark.anyio
TEMPLATE = "{{ tools }} <tool_call> <think> {{ enable_thinking }}"
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": SCHEMA}}]
CALLS = CALL + "\n" + CALL.replace("Oslo", "Rome")


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with Site(chat_template=TEMPLATE) as site:
        yield site


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(EchoFleet(context_tokens=2_000), chat_template=TEMPLATE) as client:
        yield client


def asking(text: str, **fields: Any) -> dict[str, Any]:
    """Arguments of a chat whose answer is this text."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text + "|"}], "stop": "|", "max_tokens": 500} | fields


async def test_calls_and_thoughts_whole(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**asking(THOUGHT + "Both.\n" + CALLS, tools=TOOLS))
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Both."
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"] == choice.message.model_extra["reasoning"] == "which city?"
    calls = choice.message.tool_calls or []
    assert [(call.type, call.function.name) for call in calls if call.type == "function"] == [("function", "weather")] * 2
    cities = [json.loads(call.function.arguments)["city"] for call in calls if call.type == "function"]
    assert cities == ["Oslo", "Rome"] and len({call.id for call in calls}) == 2


async def test_calls_and_thoughts_streamed_as_the_client_gathers_them(client: openai.AsyncOpenAI) -> None:
    manager = client.chat.completions.stream(**asking(THOUGHT + CALLS, tools=TOOLS, n=2))
    async with manager as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    for choice in final.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "")
        calls = choice.message.tool_calls or []
        assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Oslo", "Rome"]
        assert all(call.id.startswith("call_") and call.function.name == "weather" for call in calls)
    fragments = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(fragments) > 40, "arguments come as they are written"


def echoing(text: str, **fields: Any) -> dict[str, Any]:
    """As `asking`, where marks hold bars."""
    return asking("", messages=[{"role": "user", "content": text + "§"}], stop="§", **fields)


XML = "{{ tools }} <tool_call><function= <parameter= <think>"
HARMONY = "{{ tools }} <|start|>assistant<|channel|>analysis<|message|>"
KIMI = "{{ tools }} <|tool_call_begin|> <think>"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (XML, THOUGHT + "So.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo"),
        (XML, THOUGHT + "So.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"),
        (
            KIMI,
            THOUGHT + 'So.<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>',
        ),
        (
            HARMONY,
            "<|channel|>analysis<|message|>which city?<|end|><|start|>assistant<|channel|>commentary<|message|>So.<|end|>"
            '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
        ),
    ],
)
async def test_thoughts_content_and_calls_of_other_formats_streamed_up_to_a_stop_string(template: str, text: str) -> None:
    async with openai_client(EchoFleet(context_tokens=2_000), chat_template=template) as client:
        asked = echoing(text, tools=TOOLS)
        async with client.chat.completions.stream(**asked) as stream:
            events = [event async for event in stream]
            streamed = (await stream.get_final_completion()).choices[0]
        whole = (await client.chat.completions.create(**asked)).choices[0]
    for choice in (streamed, whole):
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "So.")
        (call,) = choice.message.tool_calls or []
        assert call.type == "function" and call.function.name == "weather"
        assert (call.function.arguments + '"}').startswith('{"city": "Oslo"}')
        assert call.id.startswith("functions.weather:0" if template is KIMI else "call_")
    chunks = [event.chunk.choices[0].delta.model_extra or {} for event in events if event.type == "chunk"]
    assert "".join(chunk.get("reasoning_content", "") for chunk in chunks) == "which city?"


async def test_the_ids_of_kimis_calls_are_counted_through_the_conversation() -> None:
    call = '<|tool_call_begin|>functions.weather:9<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'
    async with openai_client(EchoFleet(context_tokens=2_000), chat_template=KIMI) as client:
        first = (await client.chat.completions.create(**echoing(call + call, tools=TOOLS))).choices[0].message
        assert [each.id for each in first.tool_calls or []] == ["functions.weather:0", "functions.weather:1"]
        talk: list[Any] = [
            {"type": "function_call", "call_id": each.id, "name": "weather", "arguments": "{}"} for each in first.tool_calls or []
        ]
        tools: list[Any] = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
        talk.append({"role": "user", "content": call})
        answer = await client.responses.create(model=MODEL, input=talk, tools=tools, max_output_tokens=len(call))
        assert [item.call_id for item in answer.output if item.type == "function_call"] == ["functions.weather:2"]


async def test_the_channels_of_gpt_oss_are_told_apart_without_tools_and_stay_on_request() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    async with openai_client(EchoFleet(context_tokens=2_000), chat_template=HARMONY) as client:
        message = (await client.chat.completions.create(**echoing(text))).choices[0].message
        assert (message.content, (message.model_extra or {})["reasoning"]) == ("Yes.", "hm")
        kept = await client.chat.completions.create(**echoing(text, extra_body={"separate_reasoning": False}))
        assert kept.choices[0].message.content == "<|channel|>analysis<|message|>hm<|end|>Yes."


async def test_what_the_client_parsed_of_an_answer_may_be_sent_back_with_it(client: openai.AsyncOpenAI) -> None:
    class Weather(pydantic.BaseModel):
        city: str

    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    asked = asking(CALLS, tools=tools)
    async with client.chat.completions.stream(**asked) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    assert [call.function.parsed_arguments for call in message.tool_calls or []] == [Weather(city="Oslo"), Weather(city="Rome")]
    talk = [*asked["messages"], message, message.model_dump() | {"parsed": {"city": "Oslo"}}, {"role": "user", "content": "!"}]
    await client.chat.completions.create(**asked | {"messages": talk, "max_tokens": 1})


async def test_streamed_thoughts_come_before_the_content_that_follows_them(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(**asking(THOUGHT + "Oslo or Rome", stream=True))
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) async for chunk in stream]
    thoughts = [number for number, delta in enumerate(deltas) if "reasoning_content" in delta]
    texts = [number for number, delta in enumerate(deltas) if delta.get("content")]
    assert "".join(deltas[number]["reasoning_content"] for number in thoughts) == "which city?"
    assert "".join(deltas[number]["content"] for number in texts) == "Oslo or Rome"
    assert max(thoughts) < min(texts)


async def test_text_after_thoughts_comes_with_its_own_tokens_white_space_too(client: openai.AsyncOpenAI) -> None:
    asked = asking(THOUGHT + "Oslo \n\nRome ", stream=True, extra_body={"return_token_ids": True})
    stream = await client.chat.completions.create(**asked)
    chunks = [(chunk.choices[0].delta.content, chunk.choices[0].model_extra or {}) async for chunk in stream]
    written = [(text, "".join(map(chr, extra["token_ids"]))) for text, extra in chunks if text and text != "O"]
    assert "".join(text for text, _ in written) == "slo \n\nRome " and all(text == tokens for text, tokens in written)


async def test_a_conversation_goes_on_with_the_results_of_calls(client: openai.AsyncOpenAI) -> None:
    first = await client.chat.completions.create(**asking(CALLS, tools=TOOLS))
    message = first.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain|"} for call in message.tool_calls or []]
    messages: Any = [{"role": "user", "content": ""}, message.model_dump(), *results]
    second = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=4)
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("rain", "length")


async def test_without_tools_or_with_tool_choice_none_calls_are_content(client: openai.AsyncOpenAI) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = await client.chat.completions.create(**asking(CALLS, **fields))
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALLS, "stop")


async def test_a_call_that_is_cut_off_says_so(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**asking(CALLS, tools=TOOLS, max_tokens=58))
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.function.arguments == '{"city": "Osl'


async def test_the_tokens_of_a_streamed_answer_come_once_each_also_where_their_text_waits(client: openai.AsyncOpenAI) -> None:
    text = THOUGHT + CALLS
    stream = await client.chat.completions.create(**asking(text, tools=TOOLS, stream=True, extra_body={"return_token_ids": True}))
    ids = [id async for chunk in stream for id in (chunk.choices[0].model_extra or {}).get("token_ids") or ()]
    assert "".join(map(chr, ids)) == text + "|"


async def test_thoughts_stay_in_the_content_on_request(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**asking(THOUGHT + "Yes", extra_body={"separate_reasoning": False}))
    assert answer.choices[0].message.content == THOUGHT + "Yes"


async def test_an_answer_to_a_prompt_that_opens_thoughts_begins_within_them(client: openai.AsyncOpenAI) -> None:
    """The echo repeats the prompt, whose own mark is the answer's end."""
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hm</think>yes<think>\n"}], max_tokens=13
    )
    assert answer.choices[0].message.content == "yes"
    assert (answer.choices[0].message.model_extra or {})["reasoning_content"] == "hm"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_call_that_must_come_is_a_grammar_for_the_instances(site: Site, choice: Any) -> None:
    assert (await post(site, "/v1/chat/completions", chat(tools=TOOLS, tool_choice=choice))).status_code == 200
    await post(site, "/v1/chat/completions", chat(tools=TOOLS))
    demanded, free = (message.sampling.grammar for message in sent_to_fleet(site))
    assert demanded is not None and demanded.kind == "structural_tag" and free is None
    assert '"weather\\", \\"arguments\\": "' in demanded.text and json.dumps(SCHEMA, separators=(",", ":")) in demanded.text


@pytest.mark.parametrize(("field", "value"), [("stop_token_ids", [123]), ("min_tokens", 3), ("ignore_eos", True)])
async def test_what_would_end_a_call_that_must_come_in_its_middle_is_refused(site: Site, field: str, value: Any) -> None:
    asked = chat(tools=TOOLS, max_tokens=20, **{field: value})
    assert (await post(site, "/v1/chat/completions", asked)).status_code == 200
    refused = await post(site, "/v1/chat/completions", asked | {"tool_choice": "required"})
    assert "grammar" in assert_error(refused, 400, "invalid_request_error", field)


@pytest.mark.parametrize(
    ("path", "asked", "field"),
    [
        ("chat/completions", chat(response_format={"type": "json_object"}), "response_format"),
        ("chat/completions", chat(tools=TOOLS, tool_choice="required"), "tools"),
        ("completions", {"model": MODEL, "prompt": "a", "guided_json": {}}, "guided_json"),
        ("responses", {"model": MODEL, "input": "a", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ("/generate", {"text": "a", "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
    ],
)
async def test_a_fleet_with_grammar_off_refuses_what_needs_one_by_name(path: str, asked: dict[str, Any], field: str) -> None:
    fleet = EchoFleet(context_tokens=2_000)
    fleet.prefill, fleet.decode = (replace(each, holds_grammars=False) for each in (fleet.prefill, fleet.decode))
    async with Site(fleet, chat_template=TEMPLATE) as site:
        assert (await post(site, "/v1/chat/completions", chat(tools=TOOLS))).status_code == 200
        refused = await post(site, path if path.startswith("/") else f"/v1/{path}", asked)
        assert f"{field}: the instances run with --grammar off" in assert_error(refused, 400, "invalid_request_error", field)


JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TEXT_FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}


@pytest.mark.parametrize("fail_at", [0, 1])
@pytest.mark.parametrize(
    ("path", "asked", "kind", "field"),
    [
        ("/v1/chat/completions", chat(response_format=JSON_FORMAT), "structural_tag", "response_format"),
        ("/v1/chat/completions", chat(tools=TOOLS, tool_choice="required"), "structural_tag", "tools"),
        ("/v1/chat/completions", chat(structured_outputs={"json": SCHEMA}), "structural_tag", "structured_outputs.json"),
        ("/v1/completions", {"model": MODEL, "prompt": "a", "guided_regex": "a"}, "regex", "guided_regex"),
        ("/v1/responses", {"model": MODEL, "input": "a", "text": {"format": TEXT_FORMAT}}, "structural_tag", "text.format"),
    ],
)
async def test_what_an_instance_says_against_a_grammar_names_the_field_that_the_client_sent(
    path: str, asked: dict[str, Any], kind: str, field: str, fail_at: int
) -> None:
    failed = Failed.of(BadRequest(f"{kind}: no text matches it", field=kind))
    async with Site(EchoFleet(fail_at=fail_at, failed=failed, context_tokens=2_000), chat_template=TEMPLATE) as site:
        refused = await post(site, path, asked)
    assert assert_error(refused, 400, "invalid_request_error", field) == f"{field}: no text matches it"


async def test_the_grammar_of_all_choices_is_made_once(site: Site) -> None:
    assert (await post(site, "/v1/chat/completions", chat(tools=TOOLS, tool_choice="required", n=3))).status_code == 200
    first, *others = (message.sampling.grammar for message in sent_to_fleet(site))
    assert first is not None and len(others) == 2 and all(other is first for other in others)


async def test_the_detokenizer_shows_marks_that_are_special_tokens_and_text_that_looks_like_others_stays() -> None:
    template = "{{ tools }} [TOOL_CALLS] [ARGS] </s> <think>"
    text = 'x</s>[TOOL_CALLS]weather[ARGS]{"city": "<s>Oslo</s>"}|'
    async with Site(EchoFleet(context_tokens=2_000), chat_template=template) as site:
        answers = [await post(site, "/v1/chat/completions", asking(text[:-1], **fields)) for fields in ({"tools": TOOLS}, {})]
        opened = [message for _, message in site.fleet.sent if isinstance(message, ExpectAnswer)]
    assert [(one.skip_special_tokens, one.shown) for one in opened] == [(True, (0, 1)), (True, ())]
    message = answers[0].json()["choices"][0]["message"]
    assert message["content"] == "x</s>"
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "<s>Oslo</s>"}'} and len(call["id"]) == 9


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        ("{{ messages }}", {"tools": TOOLS}, "tools"),
        ("{{ messages }}", {"tools": TOOLS, "tool_choice": "none"}, "tools"),
        ("{{ tools }}", {"tools": TOOLS}, "tools"),
        (TEMPLATE, {"chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs.colour"),
        (TEMPLATE, {"reasoning_effort": "low"}, "reasoning_effort"),
        (TEMPLATE, {"verbosity": "low"}, "verbosity"),
    ],
)
async def test_what_the_models_template_does_not_do_is_refused(template: str, fields: dict[str, Any], param: str) -> None:
    async with Site(chat_template=template) as site:
        message = assert_error(await post(site, "/v1/chat/completions", chat(**fields)), 400, "invalid_request_error", param)
    assert "leave" in message


async def test_what_the_models_template_does_is_accepted(site: Site) -> None:
    async with Site(chat_template=TEMPLATE + " reasoning_effort verbosity") as site:
        fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
        assert (await post(site, "/v1/chat/completions", chat(**fields, verbosity="high"))).status_code == 200
    assert (await post(site, "/v1/chat/completions", chat(verbosity="medium"))).status_code == 200


async def test_of_allowed_tools_alone_the_model_is_told_and_a_call_of_another_is_held_off(client: openai.AsyncOpenAI) -> None:
    """tool_choice as https://platform.openai.com/docs/guides/function-calling has it."""
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    asked = asking(CALLS, tools=[*TOOLS, other], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    answer = await client.chat.completions.create(**asked)
    assert len(answer.choices[0].message.tool_calls or []) == 2
    async with Site(EchoFleet(context_tokens=2_000), chat_template=TEMPLATE) as site:
        for mode in ("required", "auto"):
            allowed["mode"] = mode
            assert (await post(site, "/v1/chat/completions", asked)).status_code == 200
        forced, free = (message.sampling.grammar for message in sent_to_fleet(site))
        assert forced is not None and "weather" in forced.text and "other" not in forced.text and free is None
        allowed["tools"][0]["function"]["name"] = "stranger"  # type: ignore[index]
        refused = await post(site, "/v1/chat/completions", asked)
        assert "stranger" in assert_error(refused, 400, "invalid_request_error", "tool_choice.allowed_tools.tools")
