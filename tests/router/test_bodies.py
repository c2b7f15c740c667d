"""What the API accepts, and that every refusal names the field and the fix; and the grammars that answers must match, as clients
of OpenAI, vLLM and SGLang ask for them.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import BadRequest
from common.sampling_params import Grammar
from router.api import bodies
from router.api.bodies import MAX_LEVELS
from router.api.chat import CHAT, read_chat
from router.api.completions import COMPLETION, read_completion
from router.api.sglang import read_generate

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER]} | fields).encode()


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | fields}


def called(arguments: str) -> dict[str, Any]:
    """A message of the assistant that called f."""
    return {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "hi"} | fields).encode()


def test_a_chat_request_of_every_field_is_read() -> None:
    request = read_chat(
        chat(
            messages=[
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "annotations": []},
                {"role": "assistant", "content": None},
                {"role": "user", "content": "d", "name": "bob"},
                USER,
            ],
            stream=True,
            stream_options={"include_usage": True},
            max_completion_tokens=5,
            temperature=0,
            top_p=0.5,
            top_k=3,
            min_p=0.1,
            seed=-4,
            n=2,
            stop="x",
            stop_token_ids=[7, 8],
            ignore_eos=True,
            timeout=2,
            priority=-1000,
            user="me",
            metadata={"a": "b"},
        )
    )
    assert request.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "d", "name": "bob"},
        {"role": "user", "content": "hi"},
    )
    asked = request.fields
    assert asked.stream_options is not None and (asked.stream, asked.stream_options.include_usage) == (True, True)
    assert (request.max_tokens, request.max_tokens_field) == (5, "max_completion_tokens")
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p, asked.seed) == (0.0, 0.5, 3, 0.1, -4)
    assert (asked.n, asked.stop, asked.ignore_eos) == (2, "x", True)
    assert asked.stop_token_ids == [7, 8]
    assert (asked.timeout, asked.priority) == (2.0, -1000)


def test_tools_and_calls_are_read_as_chat_templates_want_them() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    request = read_chat(
        chat(
            messages=[
                USER,
                called('{"city": "Oslo"}') | {"content": None, "reasoning_content": "hm", "reasoning": "hm"},
                called(""),
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
            ],
            tools=[function("f", parameters=schema, strict=True, description=None), function("g", description="does it")],
            tool_choice=function("g"),
            parallel_tool_calls=None,
            chat_template_kwargs={"enable_thinking": False},
            add_generation_prompt=True,
        )
    )
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
    assert request.messages[1:] == (
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "assistant", "content": "", "tool_calls": [call | {"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    )
    f, g = function("f", parameters=schema), function("g", description="does it")
    assert list(request.tools.shown) == [f, g], "strict is not for the model"
    assert [one.name for one in request.tools.callable] == ["g"] and request.tools.required and not request.tools.parallel
    assert request.fields.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("choice", "callable", "required"),
    [(None, ["f", "g"], False), ("auto", ["f", "g"], False), ("none", [], False), ("required", ["f", "g"], True)],
)
def test_tool_choice_says_what_may_and_what_must_be_called(choice: Any, callable: list[str], required: bool) -> None:
    tools = read_chat(chat(tools=[function("f"), function("g")], tool_choice=choice)).tools
    assert ([one.name for one in tools.callable], tools.required) == (callable, required)
    assert len(tools.shown) == 2


def test_null_is_as_good_as_absent() -> None:
    nothing = dict.fromkeys(("stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "n", "stop", "user"))
    assert read_chat(chat(**nothing)) == read_chat(chat())


def test_whole_numbers_may_be_written_with_a_fraction_of_zero() -> None:
    asked = read_completion(completion(prompt=[[1.0, 2]], n=2.0, top_k=3.0, temperature=1)).fields
    assert (asked.n, asked.top_k) == (2, 3) and isinstance(asked.n, int)
    with pytest.raises(BadRequest, match="n: expected `int`, got `float`"):
        read_completion(completion(n=1.5))


REPEATS = {
    "top": ('{"model": "m", "n": 1, "n" : 2, "messages": [{"role": "user", "content": "hi"}]}', "n"),
    "message": ('{"model": "m:7", "messages": [{"role": "user", "content": "a: b", "content": "\\"c\\":"}]}', "content"),
    "schema": (
        chat(tools=[function("f", parameters={"x": [1, {"y": 2}]})]).decode().replace('"y": 2', '"y": 2, "\\u0079": 3'),
        "y",
    ),
    "escaped": ('{"model": "m", "user": "\\\\", "user": ":", "messages": [{"role": "user", "content": "hi"}]}', "user"),
}


@pytest.mark.parametrize("repeats", REPEATS)
def test_a_name_that_an_object_has_twice_is_refused_by_name(repeats: str) -> None:
    text, name = REPEATS[repeats]
    with pytest.raises(BadRequest, match="twice in one object") as raised:
        read_chat(text.encode())
    assert raised.value.field == name


TEXT = st.text('a:"\\ {[', max_size=4)
VALUES = st.recursive(
    TEXT | st.integers(0, 9), lambda one: st.lists(one, max_size=5) | st.dictionaries(TEXT, one, max_size=5), max_leaves=20
)


@settings(max_examples=60, deadline=None)
@given(value=VALUES, is_large=st.booleans(), indent=st.sampled_from((None, 1)))
def test_names_are_counted_whatever_stands_in_texts_and_wherever_a_large_body_is_cut(
    value: Any, is_large: bool, indent: int | None
) -> None:
    whole = {"value": value, "long": [1] * 1001, "longer": [*[1] * 1001, {"ids": [[], [{"last": value}]]}]}
    once = json.dumps(whole, indent=indent)
    with pytest.MonkeyPatch.context() as patch:
        if is_large:
            patch.setattr(bodies, "LARGE_BODY_BYTES", 7)
            patch.setattr(bodies, "_require_few_parts", lambda body, most_values: None)
        assert bodies.object_in(once.encode(), None) == whole
        with pytest.raises(BadRequest, match="twice"):
            bodies.object_in(once.replace('"last"', '"last" :7, "last"').encode(), None)


def nested(levels: int) -> Any:
    """Lists and objects within each other."""
    value: Any = '"[{'
    for level in range(levels):
        value = [value, "]"] if level % 2 else {'}\\\\"': value}
    return value


PLACES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "a schema": lambda value: {"response_format": {"type": "json_schema", "json_schema": {"schema": {"x": value}}}},
    "a structure": lambda value: {
        "response_format": {"type": "structural_tag", "structures": [{"begin": "a", "end": "b", "schema": {"x": value}}]}
    },
    "a structure's text": lambda value: {
        "response_format": {"type": "structural_tag", "structures": [{"begin": "a", "end": "b", "schema": json.dumps(value)}]}
    },
    "parameters": lambda value: {"tools": [function("f", parameters={"x": value})], "tool_choice": "required"},
    "the text of arguments": lambda value: {"messages": [called(json.dumps({"x": value}))]},
    "whole numbers with a fraction": lambda value: {"n": 1.0, "chat_template_kwargs": {"x": value}},
}


@pytest.mark.parametrize("place", PLACES)
def test_lists_and_objects_may_be_deep_within_each_other_but_not_too_deep(place: str) -> None:
    asked = PLACES[place]
    outside = {"a schema": 4, "a structure": 5, "a structure's text": 0, "parameters": 5, "the text of arguments": 1}.get(
        place, 2
    )
    with pytest.raises(BadRequest, match="has more than 200 lists and objects within each other"):
        read_chat(chat(**asked(nested(MAX_LEVELS - outside + 1))))
    try:
        read_chat(chat(**asked(nested(MAX_LEVELS - outside))))
    except BadRequest as error:
        assert "200" not in str(error)


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ("", ("",)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", [3]], ("a", (3,))),
    ],
)
def test_a_prompt_is_one_or_several_each_a_text_or_token_ids(prompt: Any, read: Any) -> None:
    assert read_completion(completion(prompt=prompt)).prompts == read


BAD_CHATS: list[tuple[bytes, str | None, str]] = [
    (b"{", None, "not JSON"),
    (b"", None, "not JSON"),
    (b"\xff", None, "not JSON"),
    (b"[" * 100_000, None, "within each other"),
    (b"[]", None, "must be a JSON object"),
    (b"[1,2", None, "not JSON"),
    (b'[{"a":1,"a":2}]', "a", "'a' twice"),
    (b'{"temperature":1e999}', None, "not JSON: Number out of range"),
    (b'{"messages": []}', "model", "model is missing"),
    (b'{"model": "m"}', "messages", "messages is missing"),
    (chat(messages=[]), "messages", "empty"),
    (chat(messages="hi"), "messages", "expected `array`"),
    (chat(messages=["hi"]), "messages[0]", "expected `object`"),
    (chat(messages=[USER, {"role": "robot", "content": "x"}]), "messages[1].role", "use system, developer, user, assistant"),
    (chat(messages=[{"role": "user"}]), "messages[0].content", "missing"),
    (chat(messages=[{"role": "user", "content": 3}]), "messages[0].content", "expected `str | array | null`"),
    (chat(messages=[{"role": "user", "content": "x", "name": 3}]), "messages[0].name", "expected `str | null`"),
    (chat(messages=[{"role": "user", "content": "x", "colour": 1}]), "messages[0].colour", "not a known field"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        "messages[0].content[0].type",
        "use text: only text is supported",
    ),
    (chat(colour="red"), "colour", "not a known field"),
    (chat(colour=None), "colour", "not a known field"),
    (chat(prompt="x"), "prompt", "not a known field"),
    (chat(n="3"), "n", "expected `int`, got `str`"),
    (chat(n=0), "n", "at least 1"),
    (chat(n=17), "n", "at most 16"),
    (chat(stream="yes"), "stream", "expected `bool`"),
    (chat(temperature="hot"), "temperature", "expected `float`"),
    (chat(max_tokens=1.5), "max_tokens", "expected `int | null`"),
    (chat(max_tokens=1, max_completion_tokens=2), "max_tokens", "send one of them"),
    (chat(stop=["a"] * 17), "stop", "at most 16"),
    (chat(stop=["a", ""]), "stop[1]", "at least 1 characters"),
    (chat(stop=3), "stop", "expected `str | array`"),
    (chat(stop_token_ids=["x"]), "stop_token_ids[0]", "expected `int`"),
    (chat(stop_token_ids=[1] * 257), "stop_token_ids", "at most 256"),
    (chat(stream_options={"include_usage": True}), "stream_options", "stream=true"),
    (chat(stream=True, stream_options={"include_obfuscation": True}), "stream_options.include_obfuscation", "leave it out"),
    (chat(stream=True, stream_options={"colour": 1}), "stream_options.colour", "not a known field"),
    (chat(response_format={"type": "xml"}), "response_format.type", "invalid value"),
    (chat(top_logprobs=3), "top_logprobs", "send logprobs=true"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs", "at most 20"),
    (chat(logprobs=3), "logprobs", "expected `bool`"),
    (chat(presence_penalty=2.1), "presence_penalty", "at most 2"),
    (chat(frequency_penalty=-2.1), "frequency_penalty", "at least -2"),
    (chat(repetition_penalty=0), "repetition_penalty", "above 0"),
    (chat(logit_bias={"7": 101}), "logit_bias[...]", "at most 100"),
    (chat(bad_words=[""]), "bad_words[0]", "at least 1 characters"),
    (chat(bad_words=["x"] * 65), "bad_words", "at most 64 items"),
    (chat(min_tokens=-1), "min_tokens", "at least 0"),
    (chat(prompt_logprobs=-1), "prompt_logprobs", "at least 0"),
    (chat(prompt_logprobs=1, stream=True), "prompt_logprobs", "send stream=false"),
    (chat(tools=[{"type": "function"}]), "tools[0].function", "missing"),
    (chat(tools=[{"type": "retrieval"}]), "tools[0].type", "use function:"),
    (chat(tools=[function("a b")]), "tools", "must be 1 to 128 letters"),
    (chat(tools=[function("f")] * 513), "tools", "at most 512"),
    (chat(tool_choice="required"), "tool_choice", "there are no tools"),
    (chat(tool_choice={"type": "custom"}), "tool_choice.type", "use function, or for chats allowed_tools"),
    (chat(return_tokens_as_token_ids=True), "return_tokens_as_token_ids", "send logprobs"),
    (chat(tools=[function("f")], tool_choice="often"), "tool_choice", "invalid enum value 'often'"),
    (chat(tools=[function("f")], tool_choice=function("g")), "tool_choice", "not among the tools"),
    (chat(messages=[called("{")]), "messages[0].tool_calls[0].function.arguments", "is not JSON"),
    (chat(messages=[called("3")]), "messages[0].tool_calls[0].function.arguments", "must be a JSON object"),
    (chat(continue_final_message=True), "continue_final_message", "add_generation_prompt=false"),
    (chat(chat_template="{{ messages }}"), "chat_template", "leave it out"),
]
BAD_COMPLETIONS: list[tuple[bytes, str | None, str]] = [
    (b'{"model": "m"}', "prompt", "missing"),
    (completion(prompt=[]), "prompt", "empty"),
    (completion(prompt=["a", 1]), "prompt", "mixture"),
    (completion(prompt=[[1], 2]), "prompt", "mixture"),
    (completion(prompt=[[1, "a"]]), "prompt[0][1]", "expected `int`"),
    (completion(prompt=[[1]] * 65), "prompt", "at most 64"),
    (completion(prompt=["a"] * 65), "prompt", "at most 64"),
    (completion(max_completion_tokens=3), "max_completion_tokens", "not a known field"),
    (completion(max_tokens=0), "max_tokens", "with echo=true"),
    (completion(max_tokens=-1, echo=True), "max_tokens", "at least 0"),
    (completion(logprobs=21), "logprobs", "at most 20"),
    (completion(logprobs=True), "logprobs", "expected `int | null`"),
    (completion(echo="yes"), "echo", "expected `bool`"),
    (completion(suffix="x"), "suffix", "leave it out"),
    (completion(best_of=2), "best_of", "leave it out or send 1"),
]


@pytest.mark.parametrize(
    ("read", "body", "field", "says"),
    [*((read_chat, *case) for case in BAD_CHATS), *((read_completion, *case) for case in BAD_COMPLETIONS)],
)
def test_a_bad_request_is_refused_by_field_and_fix(
    read: Callable[[bytes], object], body: bytes, field: str | None, says: str
) -> None:
    with pytest.raises(BadRequest) as raised:
        read(body)
    assert (raised.value.field, says in str(raised.value)) == (field, True), str(raised.value)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in CHAT.values.items() for v in (*vs, None)])
def test_a_standard_chat_field_that_asks_for_nothing_is_accepted(name: str, value: object) -> None:
    assert read_chat(chat(**{name: value})) == read_chat(chat())


def test_stream_options_that_ask_for_nothing_are_accepted() -> None:
    nothing = {"include_obfuscation": False, "include_usage": None}
    for options in (nothing, dict.fromkeys(nothing)):
        assert read_chat(chat(stream=True, stream_options=options)) == read_chat(chat(stream=True, stream_options={}))
        assert read_completion(completion(stream=True, stream_options=options)).fields.stream_options is not None


@pytest.mark.parametrize("name", CHAT.values)
def test_a_standard_chat_field_that_asks_for_something_is_refused_by_name(name: str) -> None:
    with pytest.raises(BadRequest) as raised:
        read_chat(chat(**{name: "something"}))
    assert raised.value.field == name


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in COMPLETION.values.items() for v in (*vs, None)])
def test_a_standard_completion_field_that_asks_for_nothing_is_accepted(name: str, value: object) -> None:
    assert read_completion(completion(**{name: value})) == read_completion(completion())


# --- grammars -------------------------------------------------------------------------------------------------------------------


SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
SCHEMA_TEXT = json.dumps(SCHEMA, ensure_ascii=False)
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
OLDER_TAG = {"type": "structural_tag", "triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}]}
TAGS = [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</f>"}]
TRIGGERED = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": TAGS}}


def grammar(**fields: Any) -> Grammar | None:
    return read_completion(json.dumps({"model": "demo", "prompt": "a", **fields}).encode()).grammar


ASKED: list[tuple[dict[str, Any], Grammar | None]] = [
    ({}, None),
    ({"response_format": None, "guided_json": None, "structured_outputs": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type":"object"}')),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        Grammar("json_schema", SCHEMA_TEXT),
    ),
    ({"response_format": TAG}, Grammar("structural_tag", json.dumps(TAG))),
    ({"response_format": OLDER_TAG}, Grammar("structural_tag", json.dumps(TRIGGERED))),
    ({"guided_json": SCHEMA}, Grammar("json_schema", SCHEMA_TEXT)),
    ({"guided_json": SCHEMA_TEXT}, Grammar("json_schema", SCHEMA_TEXT)),
    ({"guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"guided_choice": ['a"b', "é\n"]}, Grammar("ebnf", r'root ::= "a\"b" | "é\n"')),
    ({"guided_grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", SCHEMA_TEXT)),
    ({"structured_outputs": {"choice": ["a"]}}, Grammar("ebnf", 'root ::= "a"')),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_schema", '{"type":"object"}')),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, Grammar("structural_tag", json.dumps(TAG))),
    ({"regex": "a+"}, Grammar("regex", "a+")),
    ({"ebnf": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
    ({"json_schema": SCHEMA_TEXT}, Grammar("json_schema", SCHEMA_TEXT)),
]


@pytest.mark.parametrize(("fields", "read"), ASKED, ids=[",".join(fields) or "nothing" for fields, _ in ASKED])
def test_each_way_to_ask_for_a_grammar_is_read(fields: dict[str, Any], read: Grammar | None) -> None:
    assert grammar(**fields) == read
    chat = read_chat(json.dumps({"model": "demo", "messages": [{"role": "user", "content": "a"}], **fields}).encode())
    assert chat.grammar == read


def test_sglangs_own_endpoint_takes_its_fields_in_the_sampling_parameters() -> None:
    def read(**parameters: Any) -> Grammar | None:
        return read_generate("demo", json.dumps({"text": "a", "sampling_params": parameters}).encode()).grammar

    assert read() is None and read(regex="a+") == Grammar("regex", "a+")
    assert read(structural_tag=json.dumps(TAG)) == Grammar("structural_tag", json.dumps(TAG))
    with pytest.raises(BadRequest, match=r"sampling_params.regex and sampling_params.ebnf both say"):
        read(regex="a", ebnf='root ::= "a"')


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "a", "guided_choice": ["a"]}, "regex and guided_choice both say what the answer must match: send one of them"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.json and structured_outputs.regex both say"),
        ({"structured_outputs": {}}, "structured_outputs is empty: send one of json"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern is not a known field"),
        ({"response_format": {"type": "xml"}}, "response_format.*type: invalid value 'xml'"),
        ({"response_format": {"type": "structural_tag"}}, "response_format of type structural_tag: send either"),
        ({"guided_choice": []}, "guided_choice must have at least 1 items"),
        ({"guided_json": "{"}, "guided_json is not JSON"),
        ({"guided_json": {"not": {}}}, r"guided_json: at \$: not is not supported: leave it out"),
        ({"regex": "x" * 70_000}, "regex has 70000 characters: send at most"),
        ({"ebnf": "(" * 40}, "ebnf has more than 16 brackets"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        grammar(**fields)
