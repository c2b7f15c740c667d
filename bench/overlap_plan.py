"""What `launch bench overlap` measures: its flags, the fleets that it compares, the prompts' lengths, and a model's shape.

Owns names, defaults and limits. Imports nothing heavy, starts nothing.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from common.config import EngineConfig, TransportName
from common.options import option, parse_numbers, require, require_at_least

FleetKind = Literal["layer-wise", "page-wise", "colocated"]
"""layer-wise: one prefill and one decode instance. page-wise: the same, but the last chunk is pushed when it is computed.
colocated: one decode instance, which does both."""
FLEETS: tuple[FleetKind, ...] = get_args(FleetKind)
RANDOM = "random"


@dataclass(frozen=True, kw_only=True)
class OverlapBench:
    """What is measured, and how often."""

    model: str = option(
        f"{RANDOM},demo",
        f"checkpoints, one after the other: {RANDOM} (random weights of the shape below), demo, a folder, or a Hugging Face name",
    )
    chunks: str = option(
        "1,2,8", "lengths of the prompts, in chunks; each prompt is one page shorter, which leaves room for the answer"
    )
    repeat: int = option(9, "how many rounds; in each, every fleet gets every prompt once, in random order")
    transport: TransportName = option("nixl", "what moves KV pages")
    layers: int = option(8, "random weights: layers")
    hidden: int = option(512, "random weights: size of the hidden state; the MLP is three times as wide")
    kv_heads: int = option(8, "random weights: heads, each with a KV head of its own")
    head_dim: int = option(64, "random weights: size of a head")
    json: str = option("", "write the figures of every request to this file")

    def __post_init__(self) -> None:
        require_at_least(self, repeat=1, layers=1, hidden=1, kv_heads=1, head_dim=1)
        require(self.head_dim % 2 == 0, "head-dim", "even", self.head_dim)
        each_once = "" not in self.models and len(set(self.models)) == len(self.models)
        require(each_once, "model", "names of checkpoints, each once, with commas between them", self.model)
        require(min(self.lengths) >= 1, "chunks", "at least 1 each", self.chunks)

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.model.split(","))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the prompts, in chunks, the shortest first."""
        return tuple(sorted(set(parse_numbers(self.chunks, "chunks", int))))


def prompt_tokens(chunks: int, engine: EngineConfig) -> int:
    """A prompt of so many chunks, less one page: so prompt and answer fit a context that is a whole number of chunks.

    Raises ConfigError when nothing is left.
    """
    require(engine.chunk_tokens > engine.page_size, "chunk-tokens", "more than --page-size", engine.chunk_tokens)
    return chunks * engine.chunk_tokens - engine.page_size


QUICK: dict[str, Any] = {"model": RANDOM, "repeat": 1, "layers": 2, "hidden": 64, "kv_heads": 2, "head_dim": 32}
QUICK_ENGINE: dict[str, Any] = {"chunk_tokens": 64, "grammar": "off"}
"""What `--quick` measures."""
