"""Checkpoints without weights for `launch bench engine`, and what a step of them costs at least.

Owns the folders while they are needed, and the counts of bytes and operations. Runs nothing.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.engine.plan import SHAPES
from common.config import EngineConfig, ModelConfig
from common.ids import Int64Array
from common.model_path import model_name
from engine.models.shape import ServedShape


@contextlib.contextmanager
def shape_folder(name: str, **changes: object) -> Iterator[ModelConfig]:
    """A checkpoint of that shape which has a config and nothing else, gone at the end: for `--load-format dummy`."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        path = Path(folder) / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(SHAPES[name] | changes))
        yield ModelConfig(model=str(path), served_name=model_name(name))


def layer_weights(shape: ServedShape) -> int:
    """Numbers in the matrices of one layer."""
    attention = shape.hidden * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return attention + 3 * shape.hidden * shape.intermediate


def late_weights(shape: ServedShape) -> int:
    """Of these, the numbers behind the attention: in the last layer, only sampled tokens meet them."""
    return shape.hidden * shape.heads * shape.head_dim + 3 * shape.hidden * shape.intermediate


def products_flop(shape: ServedShape, tokens: int, sampled: int) -> float:
    """Operations of the products of all layers in one forward: two for each weight and token."""
    return 2.0 * shape.layers * layer_weights(shape) * tokens - 2.0 * late_weights(shape) * (tokens - sampled)


def step_weight_bytes(shape: ServedShape, item_bytes: int, engine: EngineConfig) -> int:
    """Bytes of weights that a decode step reads: every matrix of every layer, and the output head."""
    in_layers = item_bytes if engine.quantization == "none" else 1
    in_head = 1 if engine.quantization == "int8" else item_bytes
    return shape.layers * layer_weights(shape) * in_layers + shape.vocab_size * shape.hidden * in_head


def prefill_flop(shape: ServedShape, tokens: int) -> float:
    """Operations of a prompt: those of all products, and of attention four for each head, its size, and pair of tokens of which
    one sees the other. What is behind the last attention counts for the last token."""
    products = products_flop(shape, tokens, 1) + 2.0 * shape.vocab_size * shape.hidden
    pairs = tokens * (tokens + 1) / 2
    return products + 4.0 * shape.heads * shape.head_dim * pairs * shape.layers


def lengths_of(sequences: int, fewest: int, most: int, seed: int) -> tuple[Int64Array, Int64Array]:
    """Tokens of each prompt and of each answer, [sequences] each."""
    random = np.random.default_rng(seed)
    prompts, answers = random.integers(fewest, most + 1, (2, sequences))
    return prompts, answers
