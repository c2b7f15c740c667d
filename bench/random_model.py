"""A checkpoint of random weights, for measurements that depend on a model's shape and not on what it says.

Owns the checkpoint while it is needed. Speaks with the demo model's tokenizer. Serves nothing.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.overlap_plan import OverlapBench
from common.config import DEMO_MODEL
from common.model_path import resolve_model_path
from common.text.tokenizer_manager import TokenizerManager

MLP_FACTOR = 3


@contextlib.contextmanager
def random_model(bench: OverlapBench, context_tokens: int) -> Iterator[str]:
    """The folder of a Qwen3 checkpoint with the bench's shape, gone at the end. Imports what is heavy."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=TokenizerManager(DEMO_MODEL).vocab_size,
        hidden_size=bench.hidden,
        intermediate_size=MLP_FACTOR * bench.hidden,
        num_hidden_layers=bench.layers,
        num_attention_heads=bench.kv_heads,
        num_key_value_heads=bench.kv_heads,
        head_dim=bench.head_dim,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=True,
    )
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        Qwen3ForCausalLM(config).save_pretrained(folder)
        for file in resolve_model_path(DEMO_MODEL, weights=False).glob("*token*"):
            shutil.copy(file, Path(folder) / file.name)
        yield folder
