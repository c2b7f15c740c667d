"""What is read of a checkpoint's weight files."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from common.engine.checkpoint import read_weights


def test_saved_rotary_frequencies_are_no_weights(tmp_path: Path) -> None:
    tensors = {"model.norm.weight": torch.ones(4), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert [name for name, _ in read_weights(tmp_path, lambda text: None)] == ["model.norm.weight"]
