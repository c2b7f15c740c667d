"""`docs/deployment.md`: its commands are commands of `launch`, its flags exist, and so do the metrics and files that it names."""

import re
from pathlib import Path

import pytest

from launch.main import build_parser
from tests.router.calls import get
from tests.router.fakes import Site

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/deployment.md").read_text()
BLOCKS = "".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
COMMANDS = re.findall(r"launch (router|prefill|decode|ray|key|bench)\b([^\n&#]*)", BLOCKS)


@pytest.mark.parametrize(("command", "rest"), COMMANDS)
def test_a_command_is_one_of_launch(command: str, rest: str) -> None:
    """A flag whose value is left out (…) has one elsewhere on the page."""
    words = re.sub(r"--\S+ …", "", rest).split()
    build_parser().parse_args([command, *words])


def test_the_page_has_its_commands() -> None:
    assert len(COMMANDS) >= 8


def test_every_flag_of_launch_that_the_text_names_exists() -> None:
    known = {word for role in ("router", "prefill", "ray") for word in re.findall(r"--[\w-]+", _help(role))}
    foreign = {"--use_cuda", "--signal", "--batch"}
    assert set(re.findall(r"`(--[\w-]+)", PAGE)) - foreign <= known


@pytest.mark.anyio
async def test_every_metric_that_the_text_names_exists(site: Site) -> None:
    text = (await get(site, "/metrics")).text
    known = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    named = set(re.findall(r"`(tandem_\w+)`", PAGE))
    assert len(named) >= 8 and named <= known


def test_every_file_of_the_repository_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`((?:deploy|tests|docs)/[\w./-]+)`", PAGE))
    assert named and all((ROOT / name).exists() for name in named)


def _help(role: str) -> str:
    parser = build_parser()
    (commands,) = [action for action in parser._actions if isinstance(action.choices, dict)]
    choices = commands.choices
    assert isinstance(choices, dict)
    return str(choices[role].format_help())
