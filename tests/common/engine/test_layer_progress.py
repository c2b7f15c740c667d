"""What is told of a step's layers while it computes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from common.config import EngineConfig, ModelConfig
from common.engine.layer_progress import LayerProgress
from common.engine.model_runner import ModelRunner
from common.engine.plan import Chunk, Plan, RowStart
from common.sampling_params import SamplingParams
from tests.common.engine.checkpoints import qwen3, saved


@pytest.mark.parametrize(
    ("layers", "groups", "expected"),
    [(8, 4, [2, 4, 6, 8]), (8, 2, [4, 8]), (8, 1, [8]), (8, 0, []), (3, 4, [1, 2, 3]), (10, 4, [2, 5, 7, 10])],
)
def test_progress_is_reported_after_each_group(layers: int, groups: int, expected: list[int]) -> None:
    told: list[int] = []
    progress = LayerProgress(torch.device("cpu"), layers, groups, told.append)
    for layer in range(1, layers + 1):
        progress.written(layer)
    progress.wait()
    assert told == expected


@pytest.mark.parametrize(("groups", "expected"), [(3, [1, 2, 3]), (0, [])])
def test_the_engine_reports_the_groups_that_its_flag_sets_for_last_chunks_only(
    tmp_path: Path, groups: int, expected: list[int]
) -> None:
    engine = EngineConfig(device="cpu", page_size=8, kv_memory="1MiB", context_tokens=64, max_running=2, layer_groups=groups)
    runner = ModelRunner(ModelConfig(model=str(saved(qwen3(), tmp_path))), engine, lambda text: None)
    prompt, pages = np.arange(3, 13, dtype=np.int32), np.arange(2, dtype=np.int32)
    start = RowStart(0, pages, SamplingParams(max_new_tokens=1, temperature=0.0))
    told: list[int] = []
    runner.run(Plan(1, starts=(start,), chunks=(Chunk(0, 0, prompt[:6], last=False),)), told.append)
    assert told == []
    runner.run(Plan(2, chunks=(Chunk(0, 6, prompt[6:], last=True),)), told.append)
    assert told == expected
