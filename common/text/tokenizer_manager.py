"""The tokenizer: chat template, text to tokens, and the limits of the model that a router must know.

Owns the tokenizer's files. Does not know requests, HTTP or devices, and never imports torch: it reads the files with
the tokenizers library through transformers' thin class, not through its AutoTokenizer. Importing this module is cheap: it imports
the libraries when a tokenizer is loaded.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import BadRequest, ConfigError
from common.model_path import model_name, read_json, resolve_model_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"


class TokenizerManager:
    """The tokenizer of a model: a folder, a Hugging Face name, or "demo". Raises ConfigError when it cannot be loaded.

    `encode` and `encode_chat` change nothing, so several threads may call them at once.
    """

    def __init__(self, model: str) -> None:
        path = resolve_model_path(model, weights=False)
        config = read_json(path / "config.json")
        text_config = config.get("text_config", config)
        self.model_name: str = model_name(model)
        self.context_tokens: int = _positive(text_config, "max_position_embeddings", path)
        self.vocab_size: int = _positive(text_config, "vocab_size", path)
        """Rows of the model's embedding: every id below it can be computed, even one that the tokenizer lacks."""
        self._transformers = _load(path)
        self.backend: Tokenizer = self._transformers.backend_tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain prompt. add_special_tokens: with those that the model begins with. Raises BadRequest."""
        return self._encode(text, "prompt", add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these tokens; incomplete characters are U+FFFD. Ids that the tokenizer lacks have no text."""
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins. Raises BadRequest."""
        return self._encode(self.render_chat(messages), "messages", add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The model's chat template applied to the messages. Raises BadRequest, also for what the template itself refuses."""
        import jinja2

        if self._transformers.chat_template is None:
            reason = f"{self.model_name} has no chat template: use /v1/completions with a prompt"
            raise BadRequest(reason, field="messages")
        try:
            text: str = self._transformers.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise BadRequest(f"the chat template of {self.model_name} refuses messages: {error}", field="messages") from error
        return text

    def _encode(self, text: str, field: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"{field} contains half of a surrogate pair, which is not text", field=field) from error
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids


def _load(path: Path) -> Any:
    """A transformers.PreTrainedTokenizerFast."""
    if not (path / TOKENIZER_FILE).is_file():
        raise ConfigError(
            f"{path} has no {TOKENIZER_FILE}: convert the checkpoint's tokenizer to the tokenizers library's format"
        )
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
