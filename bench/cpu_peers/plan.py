"""What `launch bench cpu-peers` measures: its flags, the shapes of the models, and the order of the turns.

Owns names, defaults and limits. Imports nothing heavy, starts nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from bench.options import OfflineOptions
from common.errors import ConfigError
from common.options import option, require_at_least


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Qwen3 model. Its input and output embeddings are one."""

    name: str
    vocab: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_token_bytes(self) -> int:
        """Of a token's keys and values in float32."""
        return 2 * 4 * self.layers * self.kv_heads * self.head_dim


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="0.6b", vocab=151_936, hidden=1024, mlp=3072, layers=28, heads=16, kv_heads=8, head_dim=128),
        Shape(name="30m", vocab=16_384, hidden=512, mlp=1536, layers=7, heads=8, kv_heads=4, head_dim=64),
    )
}
"""By the names that --shape takes: that of Qwen3-0.6B, and one with 30 million parameters."""
NAMES = (
    *("tandem", "tandem-1p1d", "tandem-int8", "tandem-int8-1p1d", "tandem-bf16"),
    *("openvino", "openvino-bf16", "openvino-int8", "vllm", "llama.cpp", "llama.cpp-q8_0", "transformers", "transformers-cb"),
)
EXTRA = ("tandem-bf16", "openvino-bf16")
"""Engines that run only when they are named."""
PAGE = 32
"""Room in the KV memory of every engine is counted in so many tokens, which is a multiple of all their pages."""


@dataclass(frozen=True, kw_only=True)
class CpuPeersBench:
    """The model, the requests, the engines, and how often each runs."""

    shape: Literal["0.6b", "30m"] = option("0.6b", "the model: random weights in the shape of Qwen3-0.6B, or of 30 M parameters")
    engines: str = option(
        ",".join(name for name in NAMES if name not in EXTRA),
        f"which engines take part, in this order; also known: {', '.join(EXTRA)}",
    )
    once: str = option("transformers,transformers-cb", "engines that take part in the first round alone, because they are slow")
    num_prompts: int = option(16, "requests, all sent at once")
    prompt_tokens: str = option("128,512", "fewest and most tokens of a prompt")
    answer_tokens: str = option("64,128", "fewest and most tokens of an answer")
    rounds: int = option(2, "how often each engine is started and measured: A B C, A B C and so on")
    threads: int = option(2, "cores of this machine that are used, by each engine in its turn with as many threads")
    limit_s: float = option(400.0, "longest time that a load may take")
    cache: str = option("~/.cache/tandem/cpu-peers", "the folder that keeps the peers' environments and the converted models")
    seed: int = option(0, "of lengths and token ids: equal seeds give equal requests")
    json: str = option("", "write the figures to this file")

    def __post_init__(self) -> None:
        require_at_least(self, num_prompts=1, rounds=1, threads=1, limit_s=1)
        if not self.names:
            raise ConfigError("--engines is empty: name at least one")
        for flag, names in (("engines", self.names), ("once", self.names_once)):
            for name in names:
                if name not in NAMES:
                    raise ConfigError(f"--{flag}: there is no {name!r}: known are {', '.join(NAMES)}")
        self.load  # noqa: B018  # refused here, and not in the middle of a run

    @property
    def names(self) -> tuple[str, ...]:
        return _names(self.engines)

    @property
    def names_once(self) -> tuple[str, ...]:
        return _names(self.once)

    @property
    def model(self) -> Shape:
        return SHAPES[self.shape]

    @property
    def load(self) -> OfflineOptions:
        """The lengths and token ids are drawn as in `launch bench offline`."""
        return OfflineOptions(
            num_prompts=self.num_prompts,
            prompt_tokens=self.prompt_tokens,
            answer_tokens=self.answer_tokens,
            temperature=0.0,
            seed=self.seed,
        )

    @property
    def cache_folder(self) -> Path:
        return Path(self.cache).expanduser()

    def turns(self) -> Iterator[tuple[int, str]]:
        """Round and engine: what changes slowly about the machine meets every engine."""
        for number, name in product(range(self.rounds), self.names):
            if number == 0 or name not in self.names_once:
                yield number, name


QUICK: dict[str, Any] = {
    "shape": "30m",
    "num_prompts": 4,
    "prompt_tokens": "16,32",
    "answer_tokens": "8,16",
    "rounds": 1,
    "engines": "tandem,tandem-1p1d",
}
"""What `--quick` measures: it installs nothing, and shows that the command works."""


def _names(text: str) -> tuple[str, ...]:
    """Each once, in order."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
