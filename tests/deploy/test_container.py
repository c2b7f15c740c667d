"""The Containerfile takes into the image what a wheel is made of, and nothing that could be a key."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "Containerfile").read_text().splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def copied() -> dict[str, str]:
    """Where each source is put."""
    found: dict[str, str] = {}
    for line in LINES:
        if line.startswith("COPY "):
            *sources, target = line.split()[1:]
            found |= dict.fromkeys(sources, target)
    return found


def test_every_package_and_every_file_that_the_build_reads_is_copied_by_name() -> None:
    packages = {name.rstrip(".*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    files = {"pyproject.toml", "constraints.txt", "LICENSE", PROJECT["project"]["readme"]}
    assert copied().keys() == packages | files
    assert all((ROOT / source).exists() for source in copied())
    assert all(target == (f"/src/{source}" if source in packages else "/src/") for source, target in copied().items())


def test_the_image_runs_launch_with_extras_that_exist() -> None:
    assert 'ENTRYPOINT ["launch"]' in LINES and "launch" in PROJECT["project"]["scripts"]
    (extras,) = re.findall(r'"/src\[(.*?)\]"', "\n".join(LINES))
    assert set(extras.split(",")) <= PROJECT["project"]["optional-dependencies"].keys()
