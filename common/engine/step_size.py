"""How large steps may be where a flag leaves it open.

Owns those defaults. Imports no torch.
"""

import dataclasses
from typing import Literal

from common.config import EngineConfig

CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}
"""A GPU needs thousands of tokens in a forward to be busy; on a CPU, shorter chunks overlap better with pushes."""
SHARED_CHUNK_TOKENS = 2048
"""Where instances share a GPU, it runs their kernels in turns: a decode step beside a long chunk waits for many of them."""
MAX_RUNNING = {"cpu": 64, "cuda": 256}


def with_step_size(engine: EngineConfig, kind: Literal["cpu", "cuda"]) -> EngineConfig:
    """The config with numbers where it says 0. kind: of the device."""
    chunk_tokens = SHARED_CHUNK_TOKENS if shares_gpu(engine, kind) else CHUNK_TOKENS[kind]
    return dataclasses.replace(
        engine,
        chunk_tokens=engine.chunk_tokens or chunk_tokens,
        max_running=engine.max_running or MAX_RUNNING[kind],
    )


def shares_gpu(engine: EngineConfig, kind: str) -> bool:
    """Whether other instances are on its GPU, as --sharers says. kind: of the device."""
    return kind == "cuda" and engine.sharers > 1
