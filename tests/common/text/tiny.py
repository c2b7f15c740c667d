"""A tokenizer small enough to train in a test: byte-level BPE, so every text has tokens and most characters take several.

Owns the corpus and the files of a checkpoint that has a tokenizer and no weights.
"""

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|im_start|>", "<|im_end|>")
TEXTS = (
    "hello world, hello there",
    "STOP here and there\n\n",
    "日本語のテキスト、中文字符。",
    "🙂👩‍👩‍👧‍👦🇫🇷 e\u0301 a\u030a",
    "Ünïcödé ßtraße",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message['content'] + '' }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE with 256 bytes, two special tokens and some merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


@functools.cache
def sentencepiece_like_tokenizer() -> Tokenizer:
    """As Llama 2's: a leading space is dropped when decoding, unknown characters fall back to bytes."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁hello", "▁world", "语"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: id for id, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def write_checkpoint(folder: Path, **changes: Any) -> Path:
    """A checkpoint's text files in `folder`. changes: fields of tokenizer_config.json; None leaves one out."""
    folder.mkdir(exist_ok=True)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "model_max_length": 64,
        "chat_template": CHAT_TEMPLATE,
        **changes,
    }
    kept = {name: value for name, value in fields.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    config = {"model_type": "qwen3", "vocab_size": 384, "max_position_embeddings": 2048, "eos_token_id": 5}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    return folder
