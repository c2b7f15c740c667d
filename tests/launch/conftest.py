"""Fixtures of the tests of `launch`."""

from pathlib import Path

import pytest


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stubs note what happens to them."""
    path = tmp_path / "stubs"
    path.touch()
    monkeypatch.setenv("STUB_LOG", str(path))
    return path
