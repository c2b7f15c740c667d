"""The model in the forms that the engines read, each made once in the cache folder and kept.

Owns the checkpoint of random weights, its tokenizer, and the calls of the converters. A folder or file is whole when it has its
final name.
"""

import os
import shutil
import subprocess
from pathlib import Path

from bench.cpu_peers.environments import CONVERT, environment_of
from bench.cpu_peers.plan import Shape
from bench.report import say
from common.errors import TandemError

CONTEXT_TOKENS = 4096
CONVERT_S = 1800.0
SHOWN_LINES = 4
END_TOKEN = "<|endoftext|>"
DRIVERS = Path(__file__).parent / "drivers"


class NotConverted(TandemError):
    """A converter failed. The message has its last lines."""


def checkpoint(shape: Shape, cache: Path) -> Path:
    """The folder of a Qwen3 checkpoint with random weights."""
    folder = cache / "models" / shape.name / "checkpoint"
    if not folder.exists():
        say(f"making random weights in {folder}")
        partial = _partial(folder)
        _write_weights(shape, partial)
        _write_tokenizer(shape, partial)
        partial.rename(folder)
    return folder


def openvino_model(shape: Shape, cache: Path, weight_format: str) -> Path:
    """The folder of its OpenVINO IR. weight_format: fp32 or int8, as `optimum-cli export openvino` names them. Raises
    NotInstalled and NotConverted."""
    folder = cache / "models" / shape.name / f"openvino-{weight_format}"
    if not folder.exists():
        source, environment = checkpoint(shape, cache), environment_of(CONVERT, cache)
        partial = _partial(folder)
        say(f"converting to {folder}")
        _convert(
            [
                *(environment.program("optimum-cli"), "export", "openvino", "--model", str(source)),
                *("--task", "text-generation-with-past", "--weight-format", weight_format, str(partial)),
            ]
        )
        partial.rename(folder)
    return folder


def gguf_model(shape: Shape, cache: Path, kind: str) -> Path:
    """Its GGUF file. kind: f32 or q8_0. Raises NotInstalled and NotConverted."""
    file = cache / "models" / shape.name / f"{kind}.gguf"
    if not file.exists():
        source, environment = checkpoint(shape, cache), environment_of(CONVERT, cache)
        partial = file.with_suffix(".partial")
        say(f"converting to {file}")
        _convert([environment.python, "-E", str(DRIVERS / "convert_gguf.py"), str(source), str(partial), kind])
        partial.rename(file)
    return file


def _write_weights(shape: Shape, folder: Path) -> None:
    """Imports what is heavy."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=shape.vocab - 1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _write_tokenizer(shape: Shape, folder: Path) -> None:
    """Every id has a text of its own in plain ASCII, so that no server waits for the rest of a character before it sends a token.
    The first 256 are the bytes that byte-level tokenizers are made of."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts += [f"Ġ{number}" for number in range(len(texts), shape.vocab - 1)]
    tokenizer = Tokenizer(models.BPE({text: id for id, text in enumerate(texts)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_TOKEN)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_TOKEN, pad_token=END_TOKEN).save_pretrained(folder)


def _partial(folder: Path) -> Path:
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _convert(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            text=True,
            errors="replace",
            timeout=CONVERT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NotConverted(f"the converter failed: {error}") from error
    if done.returncode:
        raise NotConverted(f"the converter failed: {' | '.join(done.stdout.splitlines()[-SHOWN_LINES:])}")
