"""The Containerfile takes into the image what a wheel is made of, and nothing that could be a key.

constraints.txt names the version of everything that the project installs, so an install in a year is that of today.
"""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


LOCKED = {
    canonicalize_name(locked.name): locked
    for line in (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    if not line.startswith("#") and (locked := Requirement(line))
}


def direct() -> Iterator[Requirement]:
    """All that pyproject.toml asks for, with every extra, and to build the package."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    for asked in (PROJECT["project"]["dependencies"], *extras, PROJECT["build-system"]["requires"]):
        yield from map(Requirement, asked)


def test_every_dependency_is_locked_to_a_version_that_pyproject_allows() -> None:
    for asked in direct():
        if asked.name != PROJECT["project"]["name"]:
            (locked,) = LOCKED[canonicalize_name(asked.name)].specifier
            assert locked.operator == "==" and asked.specifier.contains(locked.version), asked


def test_what_is_installed_here_for_the_project_has_the_locked_versions() -> None:
    waiting, seen = [*direct()], set[str]()
    while waiting:
        asked = waiting.pop()
        name = canonicalize_name(asked.name)
        key = f"{name}[{','.join(sorted(asked.extras))}]"
        if key in seen or (asked.marker is not None and not asked.marker.evaluate({"extra": ""})):
            continue
        seen.add(key)
        try:
            installed = distribution(name)
        except PackageNotFoundError:  # of an extra that is not installed here
            continue
        if name != PROJECT["project"]["name"]:
            assert name in LOCKED, f"{name} is not in constraints.txt: run make lock"
            assert LOCKED[name].specifier.contains(installed.version.split("+")[0]), f"{name} {installed.version}"
        for text in installed.requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *asked.extras)):
                needed.marker = None
                waiting.append(needed)
    assert len(seen) > 50
