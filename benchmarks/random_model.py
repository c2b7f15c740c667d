"""`python -m benchmarks.random_model FOLDER`: a checkpoint of random weights that any engine serves, and requests for it.

Owns the weights, the tokenizer, and the file of requests, which is one for `launch bench serve`. What a model costs does not
depend on its weights, so engines are compared over these without a download.
"""

import argparse
import json
from pathlib import Path

from bench.offline import sequences_of
from bench.options import OfflineOptions
from benchmarks.engine import SHAPES

CONTEXT_TOKENS = 4096
END_TOKEN = "<|endoftext|>"


def write_checkpoint(folder: Path, shape: str, dtype: str = "float32") -> None:
    """The shape's weights in one file, `model.safetensors`, with a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds

    sizes = dict(SHAPES[shape])
    special = {"bos_token_id": None, "eos_token_id": sizes["vocab_size"] - 1, "max_position_embeddings": CONTEXT_TOKENS}
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes | special)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder, max_shard_size="100GB")
    _write_tokenizer(sizes["vocab_size"], folder)


def _write_tokenizer(vocab_size: int, folder: Path) -> None:
    """Every id has a text of its own in plain ASCII, so that no server waits for the rest of a character before it sends a token.
    The first 256 are the bytes that byte-level tokenizers are made of."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts += [f"Ġ{number}" for number in range(len(texts), vocab_size - 1)]
    tokenizer = Tokenizer(models.BPE({text: id for id, text in enumerate(texts)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_TOKEN)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_TOKEN, pad_token=END_TOKEN).save_pretrained(folder)


def write_requests(file: Path, shape: str, num_prompts: int) -> None:
    """A line for each request: 128 to 512 random token ids, and 64 to 128 tokens of an answer."""
    lengths = OfflineOptions(num_prompts=num_prompts, prompt_tokens="128,512", answer_tokens="64,128")
    requests = sequences_of(lengths, SHAPES[shape]["vocab_size"])
    lines = ({"prompt": each.prompt.tolist(), "output_tokens": each.answer_tokens} for each in requests)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_model", description="Make a model of random weights.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="gets the checkpoint, and requests.jsonl")
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B", help="the shape of the model")
    parser.add_argument("--num-prompts", type=int, default=16, metavar="N", help="how many requests")
    flags = parser.parse_args()
    flags.folder.mkdir(parents=True, exist_ok=True)
    write_requests(flags.folder / "requests.jsonl", flags.shape, flags.num_prompts)
    write_checkpoint(flags.folder, flags.shape)
