"""The tokenizer, compared with transformers."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from common.errors import BadRequest, ConfigError
from common.text.tokenizer_manager import ChatOptions, TokenizerManager
from tests.common.text.tiny import TEXTS, write_checkpoint

CHAT: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "日本 🙂 <|im_end|> hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny-model")


@pytest.fixture(scope="module")
def manager(folder: Path) -> TokenizerManager:
    return TokenizerManager(str(folder))


def changed(folder: Path, name: str, text: str | None) -> str:
    """The checkpoint with one of its files replaced or, with None, removed."""
    write_checkpoint(folder)
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    return str(folder)


@pytest.mark.parametrize("model_class", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_text_and_chats_have_the_tokens_that_transformers_gives(tmp_path: Path, model_class: str) -> None:
    """The file decides alone. A class of transformers may know better than a file that it did not write, so it writes it here."""
    folder = write_checkpoint(tmp_path / "model", tokenizer_class=model_class)
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    manager = TokenizerManager(str(folder))
    reference = AutoTokenizer.from_pretrained(folder)
    for text in (*TEXTS, "", "a long text " * 50):
        ids = manager.encode(text)
        assert ids == reference(text, truncation=False)["input_ids"]
        assert manager.backend.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    expected = reference.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert manager.encode_chat(CHAT) == expected


def test_a_text_at_which_the_tokenizer_panics_is_refused_by_field_and_others_are_encoded(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its regular expression backtracks until the library gives up, and that is no Exception."""
    changed = json.loads((folder / "tokenizer.json").read_text())
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    changed["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [pattern, changed["pre_tokenizer"]]}
    write_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(changed))
    manager, hostile = TokenizerManager(str(tmp_path / "model")), "a" * 26 + "b"
    with pytest.raises(BadRequest, match="bad_words: the tokenizer of model fails at this text") as raised:
        manager.encode(hostile, field="bad_words")
    assert raised.value.field == "bad_words" and raised.value.__suppress_context__
    with pytest.raises(BadRequest, match="messages: the tokenizer"):
        manager.encode_chat([{"role": "user", "content": hostile}])
    assert manager.decode(manager.encode("hello")) == "hello"
    assert len(capfd.readouterr().err.splitlines()) < 10, "no stack in the log"


def test_others_run_while_a_long_text_is_encoded(manager: TokenizerManager) -> None:
    """With the interpreter's lock held, this thread would first run again when the text is encoded."""

    def encode(text: str, begun: threading.Event) -> None:
        begun.set()
        manager.encode(text)

    with ThreadPoolExecutor(1) as threads:
        for chars in (2**number for number in range(16, 23)):
            begun = threading.Event()
            encoding = threads.submit(encode, "hello " * (chars // 6), begun)
            begun.wait()
            for _ in range(3):
                time.sleep(0.001)
            if not encoding.done():
                return
    pytest.fail("nobody runs meanwhile")


def test_it_knows_the_limits_of_the_model(manager: TokenizerManager) -> None:
    assert manager.context_tokens == 2048
    assert manager.vocab_size == 384
    assert manager.model_name == "tiny-model"


def test_a_conversation_ends_where_the_assistant_begins(manager: TokenizerManager) -> None:
    assert manager.render_chat(CHAT[:1]) == "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>assistant\n"


def test_special_tokens_show_only_when_asked(manager: TokenizerManager) -> None:
    ids = manager.encode("<|im_start|>hello")
    assert manager.backend.decode(ids) == "hello"
    assert manager.backend.decode(ids, skip_special_tokens=False) == "<|im_start|>hello"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "tool", "content": "x"}], "unknown role tool"),
        ([{"role": "user", "content": None}], "refuses messages"),
        ([{"role": "user"}], "refuses messages"),
        ([{"content": "x"}], "refuses messages"),
        ([{"role": "user", "content": ["x"]}], "refuses messages"),
        ([], "refuses messages"),
        ([{"role": "user", "content": "\ud83d"}], "surrogate"),
    ],
    ids=[
        "template refuses",
        "content null",
        "no content",
        "no role",
        "content of another type",
        "none at all",
        "half a character",
    ],
)
def test_messages_that_the_template_cannot_take_are_bad_requests(
    manager: TokenizerManager, messages: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(BadRequest, match=reason) as caught:
        manager.encode_chat(messages)
    assert caught.value.field == "messages"


def test_a_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    manager = TokenizerManager(str(write_checkpoint(tmp_path / "base", chat_template=None)))
    with pytest.raises(BadRequest, match="no chat template") as caught:
        manager.encode_chat(CHAT)
    assert caught.value.field == "messages"
    assert manager.encode("hello")


TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[answer]"
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}{% endif %}"
)


def test_a_template_gets_tools_arguments_and_calls_as_transformers_gives_them(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TOOL_TEMPLATE)
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
    ]
    tools = ({"type": "function", "function": {"name": "weather"}},)
    for given in (str(file), TOOL_TEMPLATE):
        manager = TokenizerManager(str(folder), given)
        options = ChatOptions(tools=tools, arguments={"enable_thinking": False})
        assert manager.render_chat(messages, options) == f"{json.dumps(list(tools))}[user]hi[assistant]weatherOslo[answer]"
        assert manager.render_chat(messages[:1]) == "[user]hi[answer]<think>"
        goes_on = ChatOptions(add_generation_prompt=False, continue_final_message=True)
        assert manager.render_chat([*messages, {"role": "user", "content": "no"}], goes_on).endswith("[user]no")
        assert (manager.reads_tools, manager.reads("enable_thinking"), manager.reads("colour")) == (True, True, False)
        assert not any(map(manager.reads, ("enable", "message.content"))), "a name is one whole word"
        assert not any(map(manager.reads, ("messages", "tools", "tokenize", "eos_token"))), "these are not for clients to set"
        assert manager.chat_template == TOOL_TEMPLATE and manager.special_tokens == {"<|im_start|>": 0, "<|im_end|>": 1}


EACH = "{% for message in messages %}[{{ message.role }}]"
CALL_OF = "{% for call in message.tool_calls or [] %}<{{ call.function.name"
WRITES_OBJECTS = EACH + "{{ message.content }}" + CALL_OF + " }} {{ call.function.arguments | tojson }}>{% endfor %}{% endfor %}"
ADDS_TEXTS = EACH + "{{ message.content }}" + CALL_OF + " + ' ' + call.function.arguments }}>{% endfor %}{% endfor %}"
ONLY_BESIDE_NULL = (  # as DeepSeek V3's
    EACH + "{% if message.content is none %}" + CALL_OF + " + ' ' + call.function.arguments }}>{% endfor %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
FAILS_AT_NULL = (
    EACH + "{{ message.content.strip() }}" + CALL_OF + " }} {{ call.function.arguments | tojson }}>{% endfor %}{% endfor %}"
)
SHOWS_NO_CALLS = EACH + "{{ message.content }}{% endfor %}"


def chat_with_call(content: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city":  "Åre"}'}}
    return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content, "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("template", "content", "written"),
    [
        (WRITES_OBJECTS, "", '[user]hi[assistant]<weather {"city": "Åre"}>'),
        (WRITES_OBJECTS, "So.", '[user]hi[assistant]So.<weather {"city": "Åre"}>'),
        (ADDS_TEXTS, "So.", '[user]hi[assistant]So.<weather {"city":  "Åre"}>'),
        (ONLY_BESIDE_NULL, "", '[user]hi[assistant]<weather {"city":  "Åre"}>'),
        (FAILS_AT_NULL, "", '[user]hi[assistant]<weather {"city": "Åre"}>'),
    ],
)
def test_the_calls_of_earlier_answers_reach_the_prompt_in_the_form_that_the_template_takes(
    folder: Path, template: str, content: str, written: str
) -> None:
    assert TokenizerManager(str(folder), template).render_chat(chat_with_call(content)) == written


@pytest.mark.parametrize(("template", "content"), [(ONLY_BESIDE_NULL, "So."), (SHOWS_NO_CALLS, ""), (SHOWS_NO_CALLS, "So.")])
def test_calls_that_the_template_would_leave_out_of_the_prompt_are_refused(folder: Path, template: str, content: str) -> None:
    with pytest.raises(BadRequest, match="does not show calls"):
        TokenizerManager(str(folder), template).render_chat(chat_with_call(content))


NEEDS_DESCRIPTIONS = "{% for tool in tools %}{{ '// ' + tool.function.description + ' ' + tool.function.name }}{% endfor %}"


def test_a_function_without_a_description_has_an_empty_one_only_where_the_template_needs_one(folder: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g", "description": "G"}}]
    hello = [{"role": "user", "content": "hi"}]
    needing = TokenizerManager(str(folder), NEEDS_DESCRIPTIONS)
    assert needing.render_chat(hello, ChatOptions(tools=tools)) == "//  f// G g"
    assert TokenizerManager(str(folder), "{{ tools | tojson }}").render_chat(hello, ChatOptions(tools=tools)) == json.dumps(tools)


@pytest.mark.parametrize(
    ("template", "read"),
    [
        ("{# enable_thinking #}{{ messages }}", False),
        ("no enable_thinking here{{ messages }}", False),
        ("{{ messages[0].enable_thinking }}{{ 'enable_thinking' }}", False),
        ("{% if enable_thinking is defined and not enable_thinking %}x{% endif %}", True),
        ("{% if not enable_thinking is defined %}{% set enable_thinking = true %}{% endif %}{{ enable_thinking }}", True),
        ("{% macro f(a) %}{{ enable_thinking }}{% endmacro %}{%- generation -%}{{ f(1) }}{% endgeneration %}", True),
        ("{% for m in messages %}{% if enable_thinking %}{% break %}{% endif %}{% endfor %}", True),
    ],
)
def test_an_argument_is_read_where_its_value_counts(folder: Path, template: str, read: bool) -> None:
    assert TokenizerManager(str(folder), template).reads("enable_thinking") is read


def test_templates_run_in_a_sandbox(folder: Path) -> None:
    manager = TokenizerManager(str(folder), "{{ messages.__class__.__mro__ }}")
    with pytest.raises(BadRequest, match="unsafe"):
        manager.render_chat(CHAT)


@pytest.mark.parametrize(("given", "reason"), [("{% if %}", "--chat-template: line 1"), ("no-such-file.jinja", "cannot be read")])
def test_a_chat_template_that_cannot_be_used_is_refused_at_the_start(folder: Path, given: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        TokenizerManager(str(folder), given)


def test_half_a_surrogate_pair_is_a_bad_request(manager: TokenizerManager) -> None:
    with pytest.raises(BadRequest, match="surrogate") as caught:
        manager.encode("a\ud83d")
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "cannot be loaded"),
        ("config.json", None, "has no config.json"),
        ("config.json", "[]", "must hold a JSON object"),
        ("config.json", "{}", "max_position_embeddings"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_says_which_file_and_why(
    tmp_path: Path, name: str, text: str | None, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        TokenizerManager(changed(tmp_path / "broken", name, text))


def test_a_config_may_call_the_context_as_gpt2_does(tmp_path: Path) -> None:
    config = json.dumps({"model_type": "gpt2", "vocab_size": 384, "n_positions": 1024})
    assert TokenizerManager(changed(tmp_path / "gpt2", "config.json", config)).context_tokens == 1024


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    """A tokenizer file may carry what its training used; a prompt is never cut or filled up silently."""
    folder = write_checkpoint(tmp_path / "cut")
    file = json.loads((folder / "tokenizer.json").read_text())
    file["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(file))
    manager = TokenizerManager(str(folder))
    assert manager.backend.decode(manager.encode("a text of more than three tokens")) == "a text of more than three tokens"


def test_several_threads_may_encode_at_once(manager: TokenizerManager) -> None:
    expected = [manager.encode_chat([{"role": "user", "content": text}]) for text in TEXTS]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            got = threads.map(lambda text: manager.encode_chat([{"role": "user", "content": text}]), TEXTS)
            assert list(got) == expected


def test_torch_is_not_imported_and_importing_the_module_is_cheap(folder: Path) -> None:
    program = f"""
import sys
from common.text.tokenizer_manager import TokenizerManager
assert not {{"transformers", "tokenizers", "jinja2", "huggingface_hub"}} & set(sys.modules)
manager = TokenizerManager({str(folder)!r})
manager.encode_chat([{{"role": "user", "content": "hello"}}])
assert "transformers" in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
