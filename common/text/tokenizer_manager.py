"""The tokenizer: chat template, text to tokens, and the limits of the model that a router must know.

Owns the tokenizer's files. Does not know requests, HTTP or devices, and never imports torch: it reads the files with
the tokenizers library through transformers' thin class, not through its AutoTokenizer. Importing this module is cheap: it imports
the libraries when a tokenizer is loaded.
"""

import inspect
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from common.errors import BadRequest, ConfigError
from common.model_path import model_name, read_model_config, resolve_model_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
_RUST_PANICS = "pyo3_runtime"
"""The module of what a panic of the tokenizers library raises, such as a regular expression of the model's that backtracks for
too long. It is no Exception, and its class cannot be imported."""
CONTEXT_NAMES = ("max_position_embeddings", "n_positions")
"""What configs call the longest sequence; the second is GPT-2's name for it."""
_GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
"""Marks in chat templates around what the model has written: they are transformers' own, and only for training."""
_TEMPLATE_BUGS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a chat template raises, besides jinja2's own errors, for messages that it does not expect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a chat template gets besides the messages."""

    tools: Sequence[Mapping[str, Any]] = ()
    """The functions that the model may call, as in OpenAI's API; empty: the template gets none."""
    add_generation_prompt: bool = True
    """The text ends where the assistant's answer begins."""
    continue_final_message: bool = False
    """The text ends within the last message, which the answer continues; not with add_generation_prompt."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further names that the template reads."""


PLAIN_CHAT = ChatOptions()


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a chat template takes the calls of an earlier answer. Templates do not say it, so it is tried."""

    arguments_are_text: bool
    """Whether it gets arguments as JSON text: it adds them to other text. Most write an object, in the model's own way."""
    content: str | None
    """What stands for empty content beside calls: some templates write calls only where it is none, and many fail there."""


_CALL_FORMS = tuple(CallForm(is_text, content) for is_text in (False, True) for content in ("", None))
_TRIED_NAME = "tried_name"
_TRIED_CALL = {"name": _TRIED_NAME, "arguments": '{"tried_key": 1}'}
_TRIED_CHAT: Sequence[Mapping[str, Any]] = (
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "tried1234", "function": _TRIED_CALL}]},
    {"role": "tool", "content": "1", "tool_call_id": "tried1234"},
)
_TOOL_DEFAULTS: Sequence[Mapping[str, Any]] = (
    {},
    {"description": ""},
    {"description": "", "parameters": {"type": "object", "properties": {}}},
)
"""What is filled in where a client leaves it out of a function: the first of these without which the template fails."""


class TokenizerManager:
    """The tokenizer of a model: a folder, a Hugging Face name, or "demo". chat_template: a jinja file, or the template itself, in
    place of the model's; "": the model's. Raises ConfigError when it cannot be loaded.

    `encode`, `encode_chat` and `decode` change nothing, so several threads may call them at once.
    """

    def __init__(self, model: str, chat_template: str = "") -> None:
        from common.text.spellings import Spellings
        from common.text.token_text import TokenText

        path = resolve_model_path(model, weights=False)
        config = read_model_config(path)
        text_config = config.get("text_config", config)
        self.model_name: str = model_name(model)
        named = next((name for name in CONTEXT_NAMES if name in text_config), CONTEXT_NAMES[0])
        self.context_tokens: int = _positive(text_config, named, path)
        self.vocab_size: int = _positive(text_config, "vocab_size", path)
        """Rows of the model's embedding: every id below it can be computed, even one that the tokenizer lacks."""
        self._transformers = _load(path)
        self.backend: Tokenizer = self._transformers.backend_tokenizer
        self.token_text = TokenText(self.backend)
        self._spellings = Spellings(self.backend, self.token_text)
        if chat_template:
            self._use_template(chat_template)
        templates = self._transformers.chat_template or ""
        self.chat_template: str = templates if isinstance(templates, str) else "\n".join(templates.values())
        """The source of the chat template; of all, one after the other, if there are several; "" if there is none."""
        self._names = names_read(self.chat_template)
        added = self.backend.get_added_tokens_decoder().items()
        self.special_tokens: Mapping[str, int] = {token.content: id for id, token in added if token.special}
        """The tokens that `skip_special_tokens` skips: their ids by their texts."""
        self.marks: Mapping[str, str] = self._transformers.special_tokens_map
        """The tokens that have a part to play, by its name, such as eos_token."""
        apply_arguments = inspect.signature(self._transformers.apply_chat_template).parameters
        self._reserved = frozenset(apply_arguments) | frozenset(self.marks) | {"messages"}

    def encode(self, text: str, *, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        """Token ids of a plain prompt. add_special_tokens: with those that the model begins with. field: which held the text.
        Raises BadRequest."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"{field} contains half of a surrogate pair, which is not text", field=field) from error
        # A batch of one: `encode` holds the interpreter's lock until it is done, so that no other thread runs meanwhile.
        with self._refusing_panics(field):
            (encoded,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def spellings(self, word: str, field: str) -> Sequence[tuple[int, ...]]:
        """Token ids of each way in which the tokenizer writes this word in a text. field: which held it. Raises BadRequest."""
        self.encode(word, field=field)  # it may be no text
        with self._refusing_panics(field):
            return self._spellings.of(word)

    @contextmanager
    def _refusing_panics(self, field: str) -> Iterator[None]:
        """Raises BadRequest when the tokenizers library panics. field: which held the text."""
        try:
            yield
        except BaseException as error:
            if type(error).__module__ != _RUST_PANICS:
                raise
            problem = f"the tokenizer of {self.model_name} fails at this text, so shorten or change it: {error}"
            raise BadRequest(f"{field}: {problem}", field=field) from None  # a traceback says nothing more

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these tokens; incomplete characters are U+FFFD. Ids that the tokenizer lacks have no text."""
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The tokens as the tokenizer's vocabulary spells them; "" for ids that it lacks."""
        return [self.backend.id_to_token(token_id) or "" for token_id in ids]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = PLAIN_CHAT, field: str = "messages"
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer goes on. field: which held it. Raises BadRequest."""
        return self.encode(self.render_chat(messages, options), field=field, add_special_tokens=False)

    def reads(self, name: str) -> bool:
        """Whether the chat template reads an argument of this name."""
        return name not in self._reserved and name in self._names

    @property
    def reads_tools(self) -> bool:
        """Whether the chat template shows the model its tools."""
        return "tools" in self._names

    def render_chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = PLAIN_CHAT) -> str:
        """The chat template applied to the messages. Raises BadRequest, also for what the template itself refuses."""
        if self._transformers.chat_template is None:
            reason = f"{self.model_name} has no chat template: use /v1/completions with a prompt, or start with --chat-template"
            raise BadRequest(reason, field="messages")
        if any(message.get("tool_calls") for message in messages):
            messages = [self._with_calls(message, self._call_form) for message in messages]
        tools = [{**tool, "function": {**self._tool_defaults, **tool["function"]}} for tool in options.tools]
        try:
            return self._render(messages, replace(options, tools=tools))
        except self._template_errors as error:
            raise BadRequest(f"the chat template of {self.model_name} refuses messages: {error}", field="messages") from error

    @cached_property
    def _template_errors(self) -> tuple[type[Exception], ...]:
        """What a chat template raises for what it does not take."""
        import jinja2

        return (jinja2.TemplateError, *_TEMPLATE_BUGS)

    @cached_property
    def _call_form(self) -> CallForm | None:
        """The form in which the chat template shows calls; None: it shows none."""
        takes_calls = False
        for form in _CALL_FORMS:
            try:
                text = self._render([self._with_calls(message, form) for message in _TRIED_CHAT], PLAIN_CHAT)
            except self._template_errors:
                continue
            takes_calls = True
            if _TRIED_NAME in text and "None" not in text:
                return form
        return None if takes_calls else _CALL_FORMS[0]  # it may refuse the tried chat, and take others

    @cached_property
    def _tool_defaults(self) -> Mapping[str, Any]:
        """What a function gets that the client left out."""
        for defaults in _TOOL_DEFAULTS:
            tool = {"type": "function", "function": {"name": _TRIED_NAME, **defaults}}
            try:
                self._render(_TRIED_CHAT[:1], ChatOptions(tools=[tool]))
            except self._template_errors:
                continue
            return defaults
        return {}

    def _with_calls(self, message: Mapping[str, Any], form: CallForm | None) -> Mapping[str, Any]:
        """The message in this form, if it has calls. Raises BadRequest when the template would leave them out."""
        if not message.get("tool_calls"):
            return message
        if form is None or (form.content is None and message["content"]):
            where = "" if form is None else " in messages with content"
            fix = "leave tool_calls out" if form is None else "send one of them"
            reason = f"the chat template of {self.model_name} does not show calls{where}: {fix}, or use another --chat-template"
            raise BadRequest(reason, field="messages")
        calls = message["tool_calls"]
        if not form.arguments_are_text:
            functions = ({**call["function"], "arguments": msgspec.json.decode(call["function"]["arguments"])} for call in calls)
            calls = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
        return {**message, "content": message["content"] or form.content, "tool_calls": calls}

    def _render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        """Raises what the chat template raises. transformers' `apply_chat_template` takes out keys that are None, which some
        templates look for."""
        from transformers.utils.chat_template_utils import render_jinja_template

        if not messages:
            raise ValueError("there is no message")
        tools = [dict(tool) for tool in options.tools] or None
        (text,), _ = render_jinja_template(
            [[dict(message) for message in messages]],
            tools=tools,
            chat_template=self._transformers.get_chat_template(None, tools),
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            **{**self.marks, **options.arguments},
        )
        return str(text)

    def _use_template(self, chat_template: str) -> None:
        """Raises ConfigError when it is no template."""
        import jinja2

        self._transformers.chat_template = template_text(chat_template)
        try:
            self._transformers.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"--chat-template: line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, *_TEMPLATE_BUGS):
            pass  # a template may refuse this chat, and take others


def names_read(chat_template: str) -> Collection[str]:
    """The names whose values the template gets from outside; none for one that jinja cannot read."""
    import jinja2
    import jinja2.meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return jinja2.meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", chat_template)))
    except (jinja2.TemplateError, RecursionError):
        return ()


def template_text(given: str) -> str:
    """The chat template that --chat-template gives: the text of a file, or what was given if it cannot be a file's name. Raises
    ConfigError."""
    if any(mark in given for mark in "{}\n"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {given}: the file cannot be read: {error}") from error


def _load(path: Path) -> Any:
    """A transformers.PreTrainedTokenizerFast."""
    if not (path / TOKENIZER_FILE).is_file():
        raise ConfigError(
            f"{path} has no {TOKENIZER_FILE}: convert the checkpoint's tokenizer to the tokenizers library's format"
        )
    # The library's own threads are as many as the processors: a short text would wait for one while long texts have them all.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["RUST_BACKTRACE"] = "0"  # whoever sends a text at which the library panics would fill the log with its stack
    from transformers import PreTrainedTokenizerFast

    try:
        loaded = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"the tokenizer in {path} cannot be loaded: {error}") from error
    loaded.backend_tokenizer.no_truncation()
    loaded.backend_tokenizer.no_padding()
    return loaded


def _positive(config: Mapping[str, Any], name: str, path: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{path / 'config.json'}: {name} must be a positive number; it is {value!r}")
    return value
