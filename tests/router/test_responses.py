"""/v1/responses through the `openai` client. The fleet echoes: the text of the last question is the answer, up to its bar."""

import json
from typing import Any

import openai
import pytest

from router.api.responses import read_response
from tests.router.calls import CALL, SCHEMA, THOUGHT, openai_client, post, sent_to_fleet
from tests.router.fakes import MODEL, EchoFleet, Site

pytestmark = pytest.mark.anyio
TEMPLATE = "{{ tools }} <tool_call> <think>"
TOOLS: Any = [{"type": "function", "name": "weather", "description": "the weather", "parameters": SCHEMA, "strict": False}]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "input": "hi"} | fields).encode()


async def test_a_text_whole_and_streamed() -> None:
    async with openai_client(EchoFleet(context_tokens=2_000), chat_template=TEMPLATE) as client:
        whole = await client.responses.create(model=MODEL, input="hello", max_output_tokens=5, metadata={"a": "b"}, store=False)
        assert (whole.output_text, whole.status, whole.object) == ("hello", "incomplete", "response")
        assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
        assert whole.usage is not None and (whole.usage.input_tokens, whole.usage.output_tokens) == (5, 5)
        assert whole.id.startswith("resp_") and whole.metadata == {"a": "b"}
        stream = await client.responses.create(model=MODEL, input="hello", max_output_tokens=5, stream=True)
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events if not event.type.endswith(".delta")] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == list("hello")
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == "hello" and last.response.usage == whole.usage


async def test_thoughts_texts_and_calls_are_items_whole_and_as_the_client_gathers_a_stream() -> None:
    """A bar ends the answer: /v1/responses has no stop strings, so the answer's length is given."""
    text = THOUGHT + "Let me see.\n" + CALL
    async with openai_client(EchoFleet(context_tokens=2_000), chat_template=TEMPLATE) as client:
        asked: Any = {"model": MODEL, "input": text, "tools": TOOLS, "max_output_tokens": len(text)}
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
    gathered = events[-1]
    assert gathered.type == "response.incomplete"
    responses: list[Any] = [whole, gathered.response]
    for response in responses:
        thought, said, call = response.output
        assert thought.type == "reasoning" and [part.text for part in thought.content or []] == ["which city?"]
        assert said.type == "message" and response.output_text == "Let me see."
        assert call.type == "function_call" and call.call_id.startswith("call_")
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    fragments = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(fragments) > 10 and fragments[-1].snapshot == '{"city": "Oslo"}', "arguments come as they are written"
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in done] == [0, 1, 2]


async def test_a_completed_answer_of_nothing_is_an_empty_message() -> None:
    async with openai_client(EchoFleet(stop_at=0)) as client:
        whole = await client.responses.create(model=MODEL, input="hello")
        async with client.responses.stream(model=MODEL, input="hello") as stream:
            final = await stream.get_final_response()
    responses: list[Any] = [whole, final]
    for response in responses:
        assert (response.status, response.output_text, len(response.output)) == ("completed", "", 1)
        assert response.incomplete_details is None and response.store is False


async def test_a_failure_in_mid_stream_is_raised_after_the_text_before_it() -> None:
    async with openai_client(EchoFleet(fail_at=2)) as client:
        stream = await client.responses.create(model=MODEL, input="hello", max_output_tokens=5, stream=True)
        text = ""
        with pytest.raises(openai.APIError, match="the step failed"):
            async for event in stream:
                text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == "he"


async def test_an_answer_can_be_sent_back_with_the_results_of_its_calls() -> None:
    text = THOUGHT + CALL
    async with openai_client(EchoFleet(context_tokens=2_000), chat_template=TEMPLATE) as client:
        first = await client.responses.create(model=MODEL, input=text, tools=TOOLS, max_output_tokens=len(text))
        call_id = next(item.call_id for item in first.output if item.type == "function_call")
        question, result = {"role": "user", "content": ""}, {"type": "function_call_output", "call_id": call_id, "output": "rain"}
        for output in (first.output, [item.model_dump() for item in first.output]):
            conversation: Any = [question, *output, result]
            second = await client.responses.create(model=MODEL, input=conversation, tools=TOOLS, max_output_tokens=4)
            assert second.output_text == "rain"


async def test_a_schema_for_the_text_is_a_grammar_behind_the_thoughts() -> None:
    async with Site(chat_template=TEMPLATE) as site:
        asked = {"model": MODEL, "input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}
        assert (await post(site, "/v1/responses", asked | {"max_output_tokens": 2})).status_code == 200
        (sent,) = sent_to_fleet(site)
    grammar = sent.sampling.grammar
    assert grammar is not None and grammar.kind == "structural_tag"
    optional_thoughts, answer = json.loads(grammar.text)["format"]["elements"]
    assert optional_thoughts["type"] == "optional" and answer == {"type": "json_schema", "json_schema": SCHEMA}


def test_items_become_the_messages_that_chat_templates_want() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}', "id": "fc_1", "status": "completed"}
    answer = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed"}
    request = read_response(
        body(
            instructions="be brief",
            input=[
                {"role": "developer", "content": "really"},
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                answer | {"content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}]},
                call,
                call | {"call_id": "c2"},
                {"type": "function_call_output", "call_id": "c1", "output": "1"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
                call | {"call_id": "c3", "arguments": "{}"},
            ],
            tools=TOOLS,
            tool_choice={"type": "function", "name": "weather"},
            max_output_tokens=7,
            reasoning={"effort": "low", "summary": None},
        )
    )

    def called(id: str, arguments: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}

    assert request.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": "really"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "c",
            "reasoning_content": "hm",
            "tool_calls": [called("c1", '{"a": 1}'), called("c2", '{"a": 1}')],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "tool", "content": "2", "tool_call_id": "c2"},
        {"role": "assistant", "content": "", "tool_calls": [called("c3", "{}")]},
    )
    assert request.tools.required and [one.name for one in request.tools.callable] == ["weather"]
    assert (request.max_tokens, request.max_tokens_field, request.fields.reasoning_effort) == (7, "max_output_tokens", "low")
