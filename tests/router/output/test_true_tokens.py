"""Answers as models write them, in tokens: every format is read from what a tokenizer like its model's lets through."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.messages import Finished
from common.text.tokenizer_manager import TokenizerManager
from router.api.parsing.parser import ParsedAnswer
from tests.router.output.true_tokens import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA4,
    GPT_OSS,
    KIMI_K2,
    LLAMA31,
    MISTRAL,
    QWEN3,
    QWEN3_CODER,
    Chat,
    TokenTable,
    write_stand_in,
)

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": WEATHER}} for name in ("weather", "now")]
CITY = '{"city": "Zürich"}'
CALL = [("weather", {"city": "Zürich"})]
ANALYSIS = "<|channel|>analysis<|message|>Hm 😀.<|end|>"
COMMENTARY = "<|start|>assistant<|channel|>commentary"


def _v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def _v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'
ANSWERS: list[tuple[TokenTable, str, tuple[str, str, list[tuple[str, Any]]]]] = [
    (GPT_OSS, f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Hello! 🎉", ("Hello! 🎉", "Hm 😀.", [])),
    (GPT_OSS, "<|channel|>final<|message|>Hello", ("Hello", "", [])),
    (GPT_OSS, f"{ANALYSIS}{COMMENTARY} to=functions.weather <|constrain|>json<|message|>{CITY}", ("", "Hm 😀.", CALL)),
    (
        GPT_OSS,
        f"{ANALYSIS}<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{CITY}<|call|>",
        ("", "Hm 😀.", CALL),
    ),
    (
        GPT_OSS,
        f"{ANALYSIS}<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{CITY}",
        ("", "Hm 😀.", CALL),
    ),
    (
        GPT_OSS,
        f"{ANALYSIS}{COMMENTARY}<|message|>I look.<|end|>"
        f"{COMMENTARY} to=functions.weather <|constrain|>json<|message|>{CITY}<|call|>",
        ("I look.", "Hm 😀.", CALL),
    ),
    (
        GPT_OSS,
        f"{ANALYSIS}<|start|>assistant<|channel|>analysis<|message|>B.<|end|><|start|>assistant<|channel|>final<|message|>C",
        ("C", "Hm 😀.B.", []),
    ),
    (QWEN3, f"<think>\nHm.\n</think>\n\n{HERMES}", ("", "Hm.", CALL)),
    (QWEN3, f"I look.\n{HERMES}\n{HERMES}", ("I look.", "", CALL * 2)),
    (QWEN3, "<think>\n\n</think>\n\nplain", ("plain", "", [])),
    (
        QWEN3_CODER,
        "<think>\nHm.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n</function>\n</tool_call>",
        ("", "Hm.", CALL),
    ),
    (LLAMA31, f'{{"name": "weather", "parameters": {CITY}}}', ("", "", CALL)),
    (LLAMA31, f'<|python_tag|>{{"name": "weather", "parameters": {CITY}}}', ("", "", CALL)),
    (DEEPSEEK_V3, f"I look.<｜tool▁calls▁begin｜>{_v3('weather', CITY)}<｜tool▁calls▁end｜>", ("I look.", "", CALL)),
    (
        DEEPSEEK_V3,
        f"<｜tool▁calls▁begin｜>{_v3('weather', CITY)}\n{_v3('now', '{}')}<｜tool▁calls▁end｜>",
        ("", "", [*CALL, ("now", {})]),
    ),
    (
        DEEPSEEK_V31,
        f"<think>Hm.</think>\n\n<｜tool▁calls▁begin｜>{_v31('weather', CITY)}<｜tool▁calls▁end｜>",
        ("", "Hm.", CALL),
    ),
    (MISTRAL, f"[THINK]Hm.[/THINK]I look.[TOOL_CALLS]weather[ARGS]{CITY}", ("I look.", "Hm.", CALL)),
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "weather", "arguments": {CITY}}}]', ("", "", CALL)),
    (
        KIMI_K2,
        "<think>Hm.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{CITY}<|tool_call_end|><|tool_calls_section_end|>",
        ("", "Hm.", CALL),
    ),
    (GEMMA4, '<|channel>thought\nHm.<channel|><|tool_call>call:weather{city:<|"|>Zürich<|"|>}<tool_call|>', ("", "Hm.", CALL)),
]


def meant(answer: ParsedAnswer) -> tuple[str, str, list[tuple[str, Any]]]:
    return answer.content, answer.reasoning, [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize(("table", "text", "parts"), ANSWERS)
def test_an_answer_in_tokens_has_the_parts_that_its_model_means_whole_or_streamed(
    table: TokenTable, text: str, parts: tuple[str, str, list[tuple[str, Any]]], tmp_path: Path
) -> None:
    chat = Chat(model=write_stand_in(table, tmp_path), fields={"tools": TOOLS})
    token_ids = chat.ids(text + table.end)
    assert meant(chat.whole(token_ids)) == meant(chat.streamed(token_ids)) == parts


THOUGHTS = "Question: both? STOP\n\nI } see."
ARGUMENTS = '{"city": "STOP } Question:"}'
WITH_THOUGHTS: list[tuple[TokenTable, str, str]] = [
    (GPT_OSS, f"<|channel|>analysis<|message|>{THOUGHTS}<|end|><|start|>assistant<|channel|>final<|message|>", ""),
    (QWEN3, f"<think>\n{THOUGHTS}\n</think>\n\n", ""),
    (QWEN3, f"{THOUGHTS}\n</think>\n\n", "<think>\n"),
    (MISTRAL, f"[THINK]{THOUGHTS}[/THINK]", ""),
    (GEMMA4, f"<|channel>thought{THOUGHTS}<channel|>", ""),
    (DEEPSEEK_V31, f"<think>{THOUGHTS}</think>", ""),
]


@pytest.mark.parametrize(
    ("stop", "content"), [("STOP", "So. "), ("\n\n", "So. STOP { }"), ("Question:", None), ("}", "So. STOP { ")]
)
@pytest.mark.parametrize(("table", "thoughts", "opened"), WITH_THOUGHTS)
@pytest.mark.parametrize("by_token", [False, True])
def test_stops_act_on_the_answer_and_not_on_its_thoughts(
    table: TokenTable, thoughts: str, opened: str, stop: str, content: str | None, by_token: bool, tmp_path: Path
) -> None:
    text = f"{thoughts}So. STOP {{ }}\n\nMore."
    chat = Chat(model=write_stand_in(table, tmp_path), opened=opened, fields={"stop": [stop, "\u2603"]})
    token_ids = chat.ids(text + table.end)
    answer = chat.streamed(token_ids) if by_token else chat.whole(token_ids)
    assert answer.reasoning == THOUGHTS
    assert answer.content == ("So. STOP { }\n\nMore." if content is None else content)
    ending = chat.deltas(token_ids)[-1].ending
    assert isinstance(ending, Finished) and (ending.matched == stop) == (content is not None)


CALLS: list[tuple[TokenTable, str]] = [
    (
        GPT_OSS,
        f"{COMMENTARY[len('<|start|>assistant') :]} to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    ),
    (QWEN3, f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'),
    (LLAMA31, f'{{"name": "weather", "parameters": {ARGUMENTS}}}'),
    (MISTRAL, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"),
    (MISTRAL, f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]'),
    (DEEPSEEK_V3, f"<｜tool▁calls▁begin｜>{_v3('weather', ARGUMENTS)}<｜tool▁calls▁end｜>"),
    (DEEPSEEK_V31, f"<｜tool▁calls▁begin｜>{_v31('weather', ARGUMENTS)}<｜tool▁calls▁end｜>"),
    (
        KIMI_K2,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (GEMMA4, '<|tool_call>call:weather{city:<|"|>STOP } Question:<|"|>}<tool_call|>'),
    (
        QWEN3_CODER,
        "<tool_call>\n<function=weather>\n<parameter=city>\nSTOP } Question:\n</parameter>\n</function>\n</tool_call>",
    ),
]


@pytest.mark.parametrize("stop", ["STOP", "}", '"', "\n", " "])
@pytest.mark.parametrize(("table", "text"), CALLS)
def test_stops_do_not_cut_the_arguments_of_calls(table: TokenTable, text: str, stop: str, tmp_path: Path) -> None:
    chat = Chat(model=write_stand_in(table, tmp_path), fields={"stop": [stop], "tools": TOOLS})
    token_ids = chat.ids(text + table.end)
    for answer in (chat.whole(token_ids), chat.streamed(token_ids)):
        assert meant(answer) == ("", "", [("weather", json.loads(ARGUMENTS))])


@pytest.mark.parametrize("as_token", [False, True])
@pytest.mark.parametrize("stop", ["<tool_call>", "</tool_call>", "</think>"])
def test_a_stop_that_is_a_mark_of_the_format_acts_where_the_mark_stands_as_one(stop: str, as_token: bool, tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "</tool_call>"}}\n</tool_call>'
    model = write_stand_in(QWEN3, tmp_path)
    (token_id,) = Chat(model=model).ids(stop)
    chat = Chat(model=model, fields={"tools": TOOLS} | ({"stop_token_ids": [token_id]} if as_token else {"stop": stop}))
    token_ids = chat.ids(f"<think>Hm.</think>So.{call}{call}<|im_end|>")
    answer = chat.whole(token_ids)
    assert (answer.reasoning, answer.content) == ("Hm.", "" if stop == "</think>" else "So.")
    assert len(answer.calls) == (stop == "</tool_call>")
    assert meant(answer) == meant(chat.streamed(token_ids))
    ending = chat.deltas(token_ids)[-1].ending
    assert isinstance(ending, Finished) and ending.matched == (token_id if as_token else stop)


def test_a_stop_token_ends_the_answer_and_neither_thoughts_nor_calls(tmp_path: Path) -> None:
    model = write_stand_in(QWEN3, tmp_path)
    (letter,) = Chat(model=model).ids("x")
    chat = Chat(model=model, fields={"stop_token_ids": [letter], "tools": TOOLS})
    call = '<tool_call>\n{"name": "weather", "arguments": {"x": "x"}}\n</tool_call>'
    token_ids = chat.ids(f"<think>x x</think>{call}\nSo x and so on<|im_end|>")
    assert meant(chat.whole(token_ids)) == meant(chat.streamed(token_ids)) == ("So ", "x x", [("weather", {"x": "x"})])
    deltas = chat.deltas(token_ids)
    assert deltas[-1].ending == Finished("stop", letter) and deltas[-1].token_ids[-1] == letter
    included = Chat(model=model, fields={**chat.fields, "include_stop_str_in_output": True})
    assert included.whole(token_ids).content == "So x"
    held = Chat(model=model, fields=chat.fields, min_tokens=len(token_ids) - 2)
    assert held.whole(token_ids).content == "So x and so on"
    (spec,) = chat.accepted.specs
    assert spec.sampling.stop_token_ids == (), "an instance would stop within thoughts"


def test_a_stop_token_right_behind_a_call_ends_the_answer(tmp_path: Path) -> None:
    model = write_stand_in(QWEN3, tmp_path)
    (letter,) = Chat(model=model).ids("x")
    chat = Chat(model=model, fields={"stop_token_ids": [letter], "tools": TOOLS})
    call = '<tool_call>\n{"name": "weather", "arguments": {"x": "x"}}\n</tool_call>'
    for text in (f"{call}x and on<|im_end|>", f"Well {call}{call}x and on<|im_end|>"):
        deltas = chat.deltas(chat.ids(text))
        assert deltas[-1].ending == Finished("stop", letter) and "and on" not in "".join(delta.text for delta in deltas)


def test_thoughts_that_stay_in_the_content_are_text_to_stops(tmp_path: Path) -> None:
    chat = Chat(model=write_stand_in(QWEN3, tmp_path), fields={"stop": "STOP", "separate_reasoning": False})
    (delta,) = chat.deltas(chat.ids("<think>I STOP here</think>So.<|im_end|>"))
    assert (delta.text, delta.ending) == ("<think>I ", Finished("stop", "STOP"))


@pytest.mark.parametrize(("table", "thoughts", "opened"), WITH_THOUGHTS)
def test_an_answer_that_is_opened_anew_anywhere_ends_at_the_same_stop(
    table: TokenTable, thoughts: str, opened: str, tmp_path: Path
) -> None:
    model = write_stand_in(table, tmp_path)
    fields = {"stop": ["STOP", "\n\n"], "tools": TOOLS}
    token_ids = Chat(model=model).ids(f"{thoughts}So. STOP and more{table.end}")
    tokenizer = TokenizerManager(model)
    expected = None
    for at in range(len(token_ids)):
        chat = Chat(model=model, opened=opened, fields=fields, breaks=(at, at + 1))
        chat.tokenizer = tokenizer
        deltas = chat.deltas(token_ids, range(len(token_ids)))
        told = "".join(delta.text for delta in deltas), [one for delta in deltas for one in delta.token_ids], deltas[-1].ending
        expected = told if expected is None else expected
        assert told == expected and told[2] == Finished("stop", "STOP")


@pytest.mark.parametrize(("table", "thoughts", "opened"), WITH_THOUGHTS)
def test_the_tokens_of_thoughts_are_counted_with_their_marks(
    table: TokenTable, thoughts: str, opened: str, tmp_path: Path
) -> None:
    chat = Chat(model=write_stand_in(table, tmp_path), opened=opened)
    header = "<|start|>assistant<|channel|>final<|message|>" if table is GPT_OSS else ""
    of_thoughts = len(chat.ids(thoughts.removesuffix(header).rstrip()))
    token_ids = chat.ids(f"{thoughts}é So.{table.end}")
    assert chat.deltas(token_ids)[-1].thought_tokens == of_thoughts
    assert chat.deltas(token_ids, range(len(token_ids)))[-1].thought_tokens == of_thoughts
    assert chat.deltas(chat.ids("plain" + table.end))[-1].thought_tokens == (5 if opened else 0)
