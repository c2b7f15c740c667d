"""How large steps may be where a flag leaves it open.

Owns those defaults. Imports no torch.
"""

import dataclasses
from typing import Literal

from common.config import EngineConfig

CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}
"""A GPU needs thousands of tokens in a forward to be busy; on a CPU, shorter chunks overlap better with pushes."""
MAX_RUNNING = {"cpu": 64, "cuda": 256}


def with_step_size(engine: EngineConfig, kind: Literal["cpu", "cuda"]) -> EngineConfig:
    """The config with numbers where it says 0. kind: of the device."""
    return dataclasses.replace(
        engine,
        chunk_tokens=engine.chunk_tokens or CHUNK_TOKENS[kind],
        max_running=engine.max_running or MAX_RUNNING[kind],
    )
