"""The pages of docs/reference say what the code says."""

import pytest

from tests.docs.reference import FOLDER, WIDTH, pages


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return pages()


@pytest.mark.parametrize("name", ["flags.md", "endpoints.md", "metrics.md"])
def test_a_page_of_the_reference_is_that_of_the_code(name: str, written: dict[str, str]) -> None:
    assert (FOLDER / name).read_text() == written[name], "run: python -m tests.docs.reference"


def test_there_is_no_other_page(written: dict[str, str]) -> None:
    assert {path.name for path in FOLDER.iterdir()} == written.keys()


def test_every_line_is_narrow_enough_to_be_read_as_it_is(written: dict[str, str]) -> None:
    lines = [line for text in written.values() for line in text.splitlines() if " " in line.strip()]
    assert max(map(len, lines)) <= WIDTH


def test_a_flag_that_several_commands_take_stands_once(written: dict[str, str]) -> None:
    fleets = written["flags.md"].partition("## Benchmarks under load")[0]
    assert fleets.count("**`--model`**") == 1 and "**`--port`** (`8000`) [local, ray, router]:" in fleets


def test_a_field_is_there_with_its_limits_and_its_meaning(written: dict[str, str]) -> None:
    assert "- **`temperature`** (number ≥ 0 and ≤ 2) = `1.0`: 0: always take the most likely token." in written["endpoints.md"]


def test_a_metric_is_there_with_its_labels(written: dict[str, str]) -> None:
    assert "- **`tandem_requests_ended_total`** (counter, by ending):" in written["metrics.md"]
