"""What is installed from a wheel is the whole product: other tests run on the files of the repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = sorted({path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks", "tests"})


def test_a_wheel_has_every_file_of_the_product(tmp_path: Path) -> None:
    """Built of a copy: a build leaves folders behind."""
    copy = tmp_path / "copy"
    for folder in PRODUCT:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "shape", copy / "tests" / "shape", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    built = subprocess.run(
        [sys.executable, "-c", "from setuptools import build_meta; build_meta.build_wheel('.')"],
        cwd=copy, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = copy.glob("*.whl")
    installed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    there = {str(path.relative_to(copy)) for folder in PRODUCT for path in (copy / folder).rglob("*") if path.is_file()}
    assert len(there) > 200 and installed == there
