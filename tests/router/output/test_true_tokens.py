"""Answers as models write them, in tokens: every format is read from what a tokenizer like its model's lets through."""

import json
from pathlib import Path
from typing import Any

import pytest

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
