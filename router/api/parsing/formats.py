"""How models write tool calls and thoughts: a table for each format, and which of them a model has.

Owns the tables: the marks, what a flag calls a format, and how a chat template shows that its model writes so. Names are those of
vLLM and SGLang. Does not know requests, nor how calls are read.

    hermes         <tool_call>{"name": …, "arguments": {…}}</tool_call>, one after the other (Hermes 2, Qwen 2.5 and 3); some
                   models write several objects into one <tool_call>
                   https://github.com/NousResearch/Hermes-Function-Calling
    qwen3_coder    <tool_call><function=name><parameter=key>value</parameter></function></tool_call> (Qwen 3 Coder, 3.5 and later)
    glm45          <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call> (GLM 4.5 and later)
    deepseek_v3    marks around type, name and a block of JSON (V3, R1)
    deepseek_v31   marks around name and JSON (V3.1)
    kimi_k2        marks around functions.name:number and JSON; that is the id of the call, too
                   https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md
    openai         messages in channels, to functions.name (gpt-oss)
                   https://developers.openai.com/cookbook/articles/openai-harmony
    pythonic       [name(key=value, …), …], Python in all of an answer or a line (Llama 3.2 and 4, Gemma 3, by their templates)
    functiongemma  <start_function_call>call:name{key:<escape>text<escape>, …}<end_function_call>
    gemma4         the same with other marks
                   https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4
    llama3         {"name": …, "parameters": {…}} at the beginning of a line or behind <|python_tag|>, several joined by ; or in
                   an array
                   https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md
    mistral        [TOOL_CALLS][{"name": …, "arguments": {…}}, …], the object alone, or [TOOL_CALLS]name[ARGS]{…}, one after the
                   other
                   https://github.com/mistralai/mistral-common

The harmony library of gpt-oss is not used: it reads token ids, which the router does not keep, loads its vocabulary from the
internet, and raises for an answer that is not well formed.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from common.config import ReasoningParserName, ToolParserName
from common.messages import AnswerParts
from common.text.stops import NewReader
from router.api.parsing import readers
from router.api.parsing.parser import AnswerParser, Thoughts, ToolReader
from router.api.parsing.readers import CHANNEL, END, MESSAGE, START, Schemas, ToolFormat
from router.api.parsing.regions import AnswerRegions
from router.api.tools import Function

HERMES = ToolFormat(
    names=("hermes", "qwen", "qwen25"),
    found_by="<tool_call>",
    read=readers.read_objects,
    call='<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>',
    separator="\n",
)
QWEN3_CODER = ToolFormat(
    names=("qwen3_coder", "qwen3_xml"),
    found_by="<function=.*<parameter=",
    call="<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
    argument="<parameter={key}>\n{value}\n</parameter>\n",
    separator="\n",
)
GLM45 = ToolFormat(
    names=("glm45", "glm47", "glm"),
    found_by="<arg_key>",
    call="<tool_call>{name}\n{arguments}</tool_call>",
    argument="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    separator="\n",
)
DEEPSEEK_V31 = ToolFormat(
    names=("deepseek_v31", "deepseekv31"),
    found_by="<｜tool▁call▁begin｜>",
    call="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
    all="<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>",
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V31,
    names=("deepseek_v3", "deepseekv3"),
    found_by="<｜tool▁sep｜>[^<]*```json",
    call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
    separator="\n",
)
KIMI_K2 = ToolFormat(
    names=("kimi_k2",),
    found_by=r"<\|tool_call_begin\|>",
    call="<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
    all="<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>",
)
HARMONY = ToolFormat(
    names=("openai", "gpt-oss"),
    found_by=r"<\|channel\|>.*<\|message\|>",
    call="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
    separator=None,
    stands_alone=True,
)
PYTHONIC = ToolFormat(
    names=("pythonic", "llama4_pythonic"),
    found_by=r"\[func_name1\(",
    call="{name}{arguments}",
    all="[{calls}]",
    separator=", ",
    argument="{key}={value}",
    brackets="()",
    comma=", ",
    bare=("<|python_start|>", "<|python_end|>"),
    stands_alone=True,
)
GEMMA4 = ToolFormat(
    names=("gemma4",),
    found_by=r"<\|tool_call>",
    call="<|tool_call>call:{name}{arguments}<tool_call|>",
    argument="{key}:{value}",
    brackets="{}",
    comma=",",
    quote='<|"|>',
)
FUNCTIONGEMMA = replace(
    GEMMA4,
    names=("functiongemma",),
    found_by="<start_function_call>",
    call="<start_function_call>call:{name}{arguments}<end_function_call>",
    quote="<escape>",
)
LLAMA3 = ToolFormat(
    names=("llama3", "llama3_json", "llama4_json"),
    found_by=r'<\|python_tag\|>|<\|(start_header_id|header_start)\|>.*"parameters": ',
    read=readers.read_objects,
    call='{"name": "{name}", "parameters": {arguments}}',
    separator="; ",
    bare=("<|python_tag|>", ""),
)
MISTRAL = ToolFormat(
    names=("mistral",),
    found_by=r"\[TOOL_CALLS\]",
    read=readers.read_either,
    call='{"name": "{name}", "arguments": {arguments}}',
    all="[TOOL_CALLS][{calls}]",
    separator=", ",
    has_short_ids=True,
)
MISTRAL_ARGS = replace(MISTRAL, found_by=r"\[ARGS\]", call="[TOOL_CALLS]{name}[ARGS]{arguments}", all="{calls}", separator="")
"""The format of newer models, whose templates write [ARGS]."""
_MARKED = (HARMONY, KIMI_K2, DEEPSEEK_V3, DEEPSEEK_V31, MISTRAL_ARGS, MISTRAL, GLM45, QWEN3_CODER, GEMMA4, FUNCTIONGEMMA)
TOOL_FORMATS = (*_MARKED, HERMES, PYTHONIC, LLAMA3)
"""Those with the rarest marks first: that is the order in which they are looked for."""

_THINK_NAMES: tuple[ReasoningParserName, ...] = ("think", "qwen3", "glm45", "glm47", "kimi_k2", "deepseek_v3", "deepseek-v3")
THINK = Thoughts(names=_THINK_NAMES, found_by="</?think>", begin="<think>", end="</think>")
DEEPSEEK_R1 = replace(THINK, names=("deepseek_r1", "deepseek-r1", "qwen3-thinking"), always=True)
ANALYSIS = Thoughts(
    names=("openai_gptoss", "gpt-oss"),
    found_by=HARMONY.found_by,
    begin=f"{CHANNEL}analysis{MESSAGE}",
    end=END,
    then=START + "assistant",
)
MISTRAL_THINK = Thoughts(names=("mistral",), found_by=r"\[/?THINK\]", begin="[THINK]", end="[/THINK]")
GEMMA4_THOUGHT = Thoughts(names=("gemma4",), found_by=r"<\|channel>", begin="<|channel>thought", end="<channel|>")
THOUGHTS = (ANALYSIS, GEMMA4_THOUGHT, MISTRAL_THINK, THINK, DEEPSEEK_R1)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """tools: None when the model's calls cannot be read. thoughts: what its answers may begin with, if they are told apart."""

    tools: ToolFormat | None
    thoughts: Thoughts | None

    @property
    def before_content(self) -> str:
        """What stands before content."""
        return f"{CHANNEL}final{MESSAGE}" if self.has_channels else ""

    @property
    def has_channels(self) -> bool:
        """Whether the whole answer is messages in channels."""
        return self.tools is HARMONY or self.thoughts is ANALYSIS

    def marks(self, *, calls: bool) -> tuple[str, ...]:
        """What a client's answer is parsed by. calls: whether it may have calls."""
        if self.has_channels:
            return (*readers.CHANNEL_MARKS, *HARMONY.texts)
        thoughts = () if self.thoughts is None else (self.thoughts.begin, self.thoughts.end)
        return (*thoughts, *self.tools.texts) if self.tools is not None and calls else thoughts

    def new_parser(self, functions: Sequence[Function], *, separates: bool, opened: bool) -> Callable[[], AnswerParser] | None:
        """Makes parsers of answers that may call these functions; None: all text is content. separates: thoughts are told apart.
        opened: answers begin within them."""
        thoughts, read = self._readers({function.name: function.parameters or {} for function in functions}, separates)
        if thoughts is None and read is None:
            return None
        return partial(AnswerParser, thoughts=thoughts, opened=opened, read_tools=read)

    def new_reader(self, parts: AnswerParts) -> AnswerRegions:
        """A reader of one answer for the detokenizer, which does not know the schemas of functions."""
        thoughts, read = self._readers({name: {} for name in parts.functions}, parts.thoughts)
        marks = [] if self.thoughts is None else [self.thoughts.begin, self.thoughts.end]
        closes: Sequence[str] = ()
        if self.has_channels:
            marks += readers.CHANNEL_MARKS
        elif self.tools is not None and parts.functions:
            closes = tuple(self.tools.closes)
            marks += (*self.tools.opens, *closes)
        named = frozenset(mark for mark in marks if mark.strip())
        return AnswerRegions(named, closes, thoughts=thoughts, opened=parts.opened, read_tools=read)

    def _readers(self, schemas: Schemas, separates: bool) -> tuple[Thoughts | None, ToolReader | None]:
        """What reads the thoughts of answers, and what reads the rest. schemas: of the functions that they may call."""
        thoughts, tools = self.thoughts if separates else None, self.tools if schemas else None
        if self.has_channels:
            return None, partial(readers.read_channels, thinks=thoughts is not None, calls=tools is not None)
        return thoughts, None if tools is None else partial(readers.read_tools, tools, schemas)


def new_reader_for(chat_template: str, tool_parser: ToolParserName, reasoning_parser: ReasoningParserName) -> NewReader:
    """Makes the readers of answers for a detokenizer. See `answer_format`."""
    return answer_format(chat_template, tool_parser, reasoning_parser).new_reader


def answer_format(chat_template: str, tool_parser: ToolParserName, reasoning_parser: ReasoningParserName) -> AnswerFormat:
    """chat_template: its source. A flag may name several formats; then the template shows which it is."""
    named = [format for format in TOOL_FORMATS if tool_parser in ("auto", *format.names)]
    tools = [format for format in named if re.search(format.found_by, chat_template, re.DOTALL)]
    thoughts = [each for each in THOUGHTS if reasoning_parser in ("auto", *each.names)]
    if tool_parser != "auto":
        tools += reversed(named)
    if reasoning_parser == "auto":
        thoughts = [each for each in thoughts if re.search(each.found_by, chat_template, re.DOTALL)]
    return AnswerFormat(next(iter(tools), None), next(iter(thoughts), None))
