"""What is read of a checkpoint's weight files."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.errors import ConfigError
from common.model_path import resolve_model_path
from engine import checkpoint
from engine.checkpoint import fingerprint, read_weights, weight_files


def names(path: Path, lines: list[str] | None = None) -> list[str]:
    return [name for name, _ in read_weights(weight_files(path), ([] if lines is None else lines).append)]


def write_shards(path: Path) -> None:
    for number in range(2):
        save_file({f"{number}.{part}": torch.ones(256) for part in "abc"}, path / f"model-{number}.safetensors")
    places = {f"{number}.{part}": f"model-{number}.safetensors" for number in range(2) for part in "abc"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_saved_rotary_frequencies_are_no_weights(tmp_path: Path) -> None:
    tensors = {"model.norm.weight": torch.ones(4), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert names(tmp_path) == ["model.norm.weight"]


def test_the_bytes_of_all_shards_are_reported_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path)
    lines: list[str] = []
    assert sorted(names(tmp_path, lines)) == ["0.a", "0.b", "0.c", "1.a", "1.b", "1.c"]
    assert lines == ["loading weights: 0 of 0 MB"]
    monkeypatch.setattr(checkpoint, "_LEAST_REPORT_BYTES", 2048)
    monkeypatch.setattr(checkpoint, "_MOST_REPORTS", 3)
    lines.clear()
    names(tmp_path, lines)
    assert len(lines) == 3


def test_a_shard_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    last = tmp_path / "model-1.safetensors"
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model-1.safetensors is not a safetensors file, or not a whole one"):
        names(tmp_path)
    last.unlink()
    with pytest.raises(ConfigError, match=r"lacks model-1.safetensors"):
        names(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(ConfigError, match="weight_map must say which file holds each weight"):
        names(tmp_path)


def test_fingerprints_tell_checkpoints_and_ways_to_load_them_apart(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    made = [fingerprint(tmp_path), fingerprint(tmp_path, ways=["fp8"]), fingerprint(tmp_path, weights=False)]
    (tmp_path / "config.json").write_text("{ }")
    made += [fingerprint(tmp_path), fingerprint(tmp_path, weights=False)]
    assert len(set(made)) == len(made)


def test_a_fingerprint_is_the_same_in_every_release() -> None:
    """Its definition: of the config, and of each file its name, size, header and 64 blocks of 4096 bytes, evenly spread over the
    rest. The demo model has one file."""
    path = resolve_model_path("demo")
    weights = (path / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(weights[:8], "little")
    places = [begin + (len(weights) - 4096 - begin) * block // 63 for block in range(64)]
    parts = [(path / "config.json").read_bytes(), f"model.safetensors {len(weights)} ".encode(), weights[8:begin]]
    parts += [weights[place : place + 4096] for place in places]
    assert fingerprint(path) == hashlib.sha256(b"".join(parts)).hexdigest()[:32]


def test_a_fine_tune_has_another_fingerprint_than_its_base_wherever_it_differs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    base = {name: torch.zeros(40_000) for name in "abcd"}
    seen = set()
    for tuned in (None, "a", "b", "c", "d"):
        save_file({name: tensor + (name == tuned) for name, tensor in base.items()}, tmp_path / "model.safetensors")
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 5


def test_a_last_shard_that_is_not_whole_is_refused_before_the_first_is_read(tmp_path: Path) -> None:
    write_shards(tmp_path)
    last = tmp_path / "model-1.safetensors"
    whole = last.read_bytes()
    for content in (whole[:-8], whole + b"more", whole[:20], b"", b"\xff" * 30):
        last.write_bytes(content)
        with pytest.raises(ConfigError, match=r"model-1.safetensors is not a safetensors file, or not a whole one"):
            next(read_weights(weight_files(tmp_path), lambda text: None))


def test_a_weight_that_is_in_two_shards_is_said_to_be_there_twice(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"0.a": torch.ones(2), "1.a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    with pytest.raises(ConfigError, match=r"has the weight 0.a twice: in model-0.safetensors and in model-1.safetensors"):
        names(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_weights_that_are_quantised_are_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"the weight b is of \w+; supported are .*: give the checkpoint before quantisation"):
        names(tmp_path)


def test_a_checkpoint_in_another_format_is_told_what_converts_it(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"lacks model.safetensors; .* it has pytorch_model.bin, which save_pretrained"):
        names(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ConfigError, match=r"lacks model.safetensors"):
        names(tmp_path)
