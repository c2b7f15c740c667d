"""The previous release's real code, in a folder of its own.

Owns which release that is (`tests/common/released_wire.json` names its commit), and how its code runs. It has the libraries of
this environment: only the product's code is another one.
"""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[2]
RELEASED = ROOT / "tests/common/released_wire.json"


class NoHistory(Exception):
    """The project's history does not hold the previous release."""


def previous_commit() -> str:
    commit: str = json.loads(RELEASED.read_text())["commit"]
    return commit


def unpack_previous(folder: Path) -> Path:
    """Put the previous release's code there. Raises NoHistory, which says why it is not at hand."""
    command = ["git", "archive", "--format=tar", previous_commit()]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    except OSError as error:
        raise NoHistory(f"there is no git: {error}") from error
    if done.returncode != 0:
        raise NoHistory(f"{previous_commit()} is not in the history here: {done.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def environment_of(folder: Path) -> Mapping[str, str]:
    """In which Python imports the product from this folder."""
    return {**os.environ, "PYTHONPATH": str(folder)}


def run_python(folder: Path, script: str, given: bytes = b"") -> bytes:
    """What the script, run over the code in this folder, writes."""
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, cwd=folder, env=environment_of(folder), input=given, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout
