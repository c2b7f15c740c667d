"""README and the pages of docs: their commands are commands of `launch`; flags, metrics, files and names in them exist.

The pages of docs/reference say what the code says.
"""

import ast
import configparser
import functools
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from common.instance.requests import LAST_S
from launch.main import build_parser
from launch.suggestions import COMMANDS_OF_OTHERS, OTHER_MEANING, SAME_MEANING
from tests.docs.reference import FOLDER, MATTERS, WIDTH, pages

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = [page for page in PAGES if page.parent != FOLDER]
"""Pages that people write, beside those that the code makes."""
FOR_USERS = [page for page in WRITTEN if page.parent.name not in ("architecture", "measurements")]
FOREIGN = {"--batch", "--cache", "--fast", "--help", "--long", "--quick", "--signal", "--soak", "--use-server-token-count"}
"""Flags that pages for users name of other programs, of `./check`, of the benchmarks and of pytest."""
ROOMS = ("launch", "bench", "simulation", "router", "prefill", "decode", "kv_transfer", "engine", "common")
VALUES = {"POLICY": "session", "RATE": "1", "PORT": "8000"}
"""Words that stand for a value in commands that were run with several."""


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@functools.cache
def _words_of_the_code() -> set[str]:
    return {word for room in ROOMS for path in (ROOT / room).rglob("*.py") for word in re.findall(r"\w+", path.read_text())}


def _commands() -> list[tuple[str, str]]:
    """(page, command line) of each `launch` in a block of shell, without its comment and its prompt."""
    found = []
    for page in WRITTEN:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                found += [(_name(page), text) for text in re.findall(r"(?:^|&& |\$ )launch ([^&|>#]*)", line)]
    return found


COMMANDS, PARSER = _commands(), build_parser()


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_is_one_of_launch(page: str, command: str) -> None:
    """A flag whose value is left out (…) has one elsewhere on its page."""
    words = shlex.split(re.sub(r"--\S+ …", "", command))
    PARSER.parse_args([VALUES.get(word, word) for word in words])


def test_the_pages_have_their_commands() -> None:
    assert len(COMMANDS) >= 25


@pytest.mark.parametrize("page", FOR_USERS, ids=_name)
def test_every_flag_that_a_page_for_users_names_exists(page: Path) -> None:
    known = set(re.findall(r"--[\w-]+", (FOLDER / "flags.md").read_text()))
    assert set(re.findall(r"`(--[\w-]+)", _prose(page))) - FOREIGN <= known


@pytest.mark.parametrize("page", WRITTEN, ids=_name)
def test_every_metric_that_a_page_names_exists(page: Path) -> None:
    known = set(re.findall(r"\*\*`(tandem_\w+)`\*\*", (FOLDER / "metrics.md").read_text()))
    assert set(re.findall(r"`(tandem_\w+)`", page.read_text())) <= known


@pytest.mark.parametrize("page", WRITTEN, ids=_name)
def test_every_file_of_the_repository_that_a_page_names_exists(page: Path) -> None:
    rooms = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
    named = set(re.findall(rf"`((?:{rooms})/[\w./-]*)`", page.read_text()))
    missing = {name for name in named if not (ROOT / name).exists()}
    assert not missing


@pytest.mark.parametrize("page", WRITTEN, ids=_name)
def test_every_module_that_a_page_runs_exists(page: Path) -> None:
    named = set(re.findall(r"python -m ((?:tests|benchmarks|demo)\.[a-z_.]+[a-z_])", page.read_text()))
    missing = {name for name in named if importlib.util.find_spec(name) is None}
    assert not missing


@pytest.mark.parametrize("page", [page for page in WRITTEN if page.parent.name == "architecture"], ids=_name)
def test_every_name_of_the_code_that_a_page_uses_exists(page: Path) -> None:
    """Names of classes and constants, in backticks."""
    named = set(re.findall(r"`((?:[A-Z][a-z]+){2,}|[A-Z]+(?:_[A-Z]+)+)[`(.]", _prose(page)))
    assert named <= _words_of_the_code()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_prose_is_narrow_enough_to_be_read_as_it_is(page: Path) -> None:
    """Tables, headings and code may be wider, and words that cannot be broken."""
    wide = [line for line in _prose(page).splitlines() if len(line) > WIDTH and not line.startswith(("|", "#", "!"))]
    assert not [line for line in wide if " " in re.sub(r"`[^`]*`|^\s*[-*] ", "", line.strip())]


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "architecture"], ids=_name)
def test_a_page_of_the_architecture_is_read_in_one_sitting(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 150


@functools.cache
def _texts_of_the_code() -> str:
    """Every text that the code has, each on a line of its own. Texts that stand side by side are one."""
    trees = (ast.parse(path.read_text()) for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    constants = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return "\n".join(text.replace("%s", "…") for text in constants if isinstance(text, str))


def test_every_message_that_the_page_of_messages_explains_is_one_of_the_code() -> None:
    page = (ROOT / "docs/operate/troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    pieces = [piece.strip() for message in messages for piece in message.split("…")]
    missing = [piece for piece in pieces if piece not in _texts_of_the_code()]
    assert len(messages) >= 40 and not missing


def test_extras_are_installed_from_a_checkout_and_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    said = "\n".join([_texts_of_the_code(), *(page.read_text() for page in WRITTEN)])
    assert "tandem-serve[" not in said
    assert set(re.findall(r"-e '\.\[(\w+)\]'", said)) <= extras.keys()
    called = re.findall(r"install_command\('(\w+)'\)", "\n".join(p.read_text() for r in ROOMS for p in (ROOT / r).rglob("*.py")))
    assert len(called) >= 6 and set(called) <= extras.keys()


def test_the_table_for_users_of_others_says_what_launch_suggests_for_their_flags() -> None:
    table = re.findall(r"^```text\n(.*?)^```", (ROOT / "docs/guides/coming-from.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    rows = [re.split(r" {2,}", line) for line in table.splitlines()[1:]]
    assert len(rows) >= 20
    for *theirs, ours in rows:
        for name in set(theirs) - _flags_of_local() - {"-"}:
            said = SAME_MEANING.get(name) or OTHER_MEANING[name]
            assert re.findall(r"--[\w-]+", ours)[:1] == re.findall(r"--[\w-]+", said)[:1] or not ours.startswith("--"), name


def test_every_suggestion_for_a_flag_of_others_names_flags_of_ours_and_hides_none() -> None:
    for theirs, said in {**SAME_MEANING, **OTHER_MEANING}.items():
        named = re.findall(r"--[a-z][\w-]+", said)
        assert named and set(named) <= _flags_of_local(), theirs
        assert theirs not in _flags_of_local()
    for command in COMMANDS_OF_OTHERS.values():
        assert PARSER.parse_args(command.split()[:1])


def _flags_of_local() -> set[str]:
    return set(PARSER.parse_args(["local"]).parser._option_string_actions)


def test_the_kv_of_a_token_in_the_table_of_models_follows_from_their_shapes() -> None:
    rows = re.findall(
        r"^\| \S+ \| ([\d.]+) \| ([\d.]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \|$",
        (ROOT / "docs/guides/models.md").read_text(),
        re.MULTILINE,
    )
    for parameters, weights, layers, heads, size, kv_kib, kv_gib in rows:
        assert float(weights) == pytest.approx(2 * float(parameters))
        kv_bytes = 2 * int(layers) * int(heads) * int(size) * 2
        assert kv_bytes == int(kv_kib) * 1024
        assert float(kv_gib) == pytest.approx(kv_bytes * 8192 / 2**30, abs=0.01)
    assert len(rows) >= 10


def test_the_unit_of_systemd_runs_commands_of_launch_and_leaves_a_drain_its_time() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((ROOT / "deploy/systemd/tandem@.service").read_text())
    service = unit["Service"]
    for role in ("router", "prefill", "decode"):
        words = service["ExecStart"].replace("%i", role).split()
        flags = PARSER.parse_args(words[1:])
        assert float(service["TimeoutStopSec"]) > flags.drain_timeout_s + LAST_S
    assert service["RestartPreventExitStatus"] == "2"


def test_the_readme_is_read_in_a_few_minutes_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)]
    assert len(targets) > 20 and all((ROOT / target).exists() for target in targets)


@pytest.mark.parametrize(
    "page", [one for one in PAGES if one.parent.name == "measurements" and one.name != "index.md"], ids=_name
)
def test_a_measurement_opens_with_its_result(page: Path) -> None:
    assert page.read_text().splitlines()[2].startswith("**Result.** ")


def test_the_site_builds_and_every_link_in_it_leads_somewhere(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "reference" / "flags" / "index.html").exists()


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


def test_the_flags_that_matter_most_exist(written: dict[str, str]) -> None:
    assert len(MATTERS) == 10 and all(f"**`--{name}`**" in written["flags.md"] for name in MATTERS)


def test_a_field_is_there_with_its_limits_and_its_meaning(written: dict[str, str]) -> None:
    assert "- **`temperature`** (number ≥ 0 and ≤ 2) = `1.0`: 0: always take the most likely token." in written["endpoints.md"]


def test_a_metric_is_there_with_its_labels(written: dict[str, str]) -> None:
    assert "- **`tandem_requests_ended_total`** (counter, by ending):" in written["metrics.md"]
