"""How embeddings are made: --pooling, and the files of sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.config import PoolingName
from common.errors import ConfigError
from common.text.embedding import EmbeddingMode, read_embedding

OLD_MODES = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")


def old_pooling(*on: str) -> dict[str, Any]:
    return {"word_embedding_dimension": 8} | {f"pooling_mode_{mode}": mode in on for mode in OLD_MODES}


def checkpoint(path: Path, *kinds: str, pooling: object = None) -> str:
    """A checkpoint of sentence-transformers with modules of these kinds; without any, an ordinary one."""
    (path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    modules = [
        {"idx": at, "path": f"{at}_{kind}", "type": f"sentence_transformers.models.{kind}"} for at, kind in enumerate(kinds)
    ]
    if kinds:
        (path / "modules.json").write_text(json.dumps(modules))
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return str(path)


@pytest.mark.parametrize(
    ("kinds", "pooling", "expected"),
    [
        ((), None, None),
        (("Transformer", "Pooling", "Normalize"), old_pooling("lasttoken"), EmbeddingMode("last", True, 8)),
        (("Transformer", "Pooling"), old_pooling("mean_tokens"), EmbeddingMode("mean", False, 8)),
        (("Transformer", "Pooling"), {"pooling_mode": "cls"}, EmbeddingMode("cls", False, 8)),
        (("Transformer", "Pooling"), old_pooling("max_tokens"), None),
        (("Transformer", "Pooling"), old_pooling("cls_token", "lasttoken"), None),
        (("Transformer", "Pooling"), {"pooling_mode": "mean", "include_prompt": False}, None),
        (("Transformer", "Pooling", "Dense"), old_pooling("lasttoken"), None),
    ],
)
def test_auto_follows_the_checkpoint(
    tmp_path: Path, kinds: tuple[str, ...], pooling: object, expected: EmbeddingMode | None
) -> None:
    assert read_embedding(checkpoint(tmp_path, *kinds, pooling=pooling), "auto") == expected


@pytest.mark.parametrize(("flag", "expected"), [("none", None), ("mean", EmbeddingMode("mean", True, 8))])
def test_the_flag_goes_before_the_checkpoint(tmp_path: Path, flag: PoolingName, expected: EmbeddingMode | None) -> None:
    path = checkpoint(tmp_path, "Transformer", "Pooling", "Normalize", pooling=old_pooling("lasttoken"))
    assert read_embedding(path, flag) == expected


def test_an_ordinary_checkpoint_is_scaled_with_a_flag_and_a_broken_one_is_told(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    assert read_embedding(path, "cls") == EmbeddingMode("cls", True, 8)
    (tmp_path / "modules.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"modules\.json"):
        read_embedding(path, "auto")


@pytest.mark.parametrize(
    ("said", "sizes"),
    [({}, {8}), ({"is_matryoshka": True}, set(range(1, 9))), ({"matryoshka_dimensions": [2, 4]}, {2, 4, 8})],
)
def test_the_config_says_to_which_sizes_embeddings_may_be_cut(tmp_path: Path, said: dict[str, Any], sizes: set[int]) -> None:
    """By the names that vLLM reads."""
    path = checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8} | said))
    mode = read_embedding(path, "last")
    assert mode is not None and {size for size in range(1, 20) if mode.can_have(size)} == sizes
