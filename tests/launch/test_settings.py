"""Where values of flags come from: of all sources that give one, the highest holds; what is wrong is refused where it stands.

A second computation says what must hold: it knows the sources and their order, and writes the file and the variables itself.
"""

import argparse
import json
import random
import re
import shlex
import sys
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from common.processes.child import ORDER_FD
from launch import settings
from launch.local import FleetConfig
from launch.main import PARTS, build_parser, main
from launch.settings import describe, settle

PARSER = build_parser()
LAYERS = ("line", "environment", "command", "role", "top")
"""From the highest to the lowest."""
ROLE = "decode"


def commands(parser: argparse.ArgumentParser = PARSER, path: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from commands(inner, f"{path} {name}".strip())
    if "--config" in parser._option_string_actions and path != "config":
        yield path, parser


COMMANDS = dict(commands())
OF_ROLE = {action.dest for action in COMMANDS[ROLE]._actions}


def value_for(action: argparse.Action, luck: random.Random) -> Any:
    if action.choices:
        return luck.choice([*action.choices])
    if action.nargs == 0:
        return luck.random() < 0.5
    if action.type is int:
        return luck.randrange(-9, 10**6)
    if action.type is float:
        return luck.choice([luck.random(), float(luck.randrange(9)), 1e-7])
    words = ["a", "b c", "d=e", 'f"g', "h\\i", "j#k", "ö'l", "m,n"]
    return [luck.choice(words) for _ in range(luck.randrange(1, 3))] if action.nargs == "+" else luck.choice(words)


def as_toml(action: argparse.Action, value: Any, luck: random.Random) -> str:
    if action.type is float and value == int(value) and luck.random() < 0.5:
        return str(int(value))
    if value in ("on", "off") and action.choices and luck.random() < 0.5:
        return "true" if value == "on" else "false"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def as_text(action: argparse.Action, value: Any, luck: random.Random) -> str:
    if isinstance(value, bool):
        return luck.choice([("off", "on"), ("false", "true")])[value]
    if value in ("on", "off") and action.choices:
        return luck.choice([str(value), "true" if value == "on" else "false"])
    return shlex.join(value) if isinstance(value, list) else str(value)


@pytest.mark.parametrize("name", COMMANDS)
def test_of_every_set_of_sources_the_highest_holds_for_every_flag(name: str, tmp_path: Path) -> None:
    """Each flag meets every set of sources once."""
    luck, file = random.Random(name), tmp_path / "fleet.toml"
    flags = {
        action.dest: action
        for action in COMMANDS[name]._actions
        if action.option_strings and action.dest not in ("help", "config")
    }
    for turn in range(2 ** len(LAYERS)):
        line, environment = [*name.split(), f"--config={file}"], {}
        tables: dict[str, list[str]] = {layer: [] for layer in ("top", "command", "role")}
        given: dict[str, dict[str, Any]] = {}
        for number, (dest, action) in enumerate(flags.items()):
            flag, key = f"--{dest.replace('_', '-')}", dest.replace("_", luck.choice("-_"))
            given[dest] = {layer: value_for(action, luck) for at, layer in enumerate(LAYERS) if (turn + number) >> at & 1}
            if action.nargs == 0 and "line" in given[dest]:
                given[dest]["line"] = True
            for layer, value in given[dest].items():
                if layer == "line":
                    line += [flag, *value] if isinstance(value, list) else [flag] if value is True else [f"{flag}={value}"]
                elif layer == "environment":
                    environment[f"TANDEM_{dest.upper()}"] = as_text(action, value, luck)
                elif (layer == "top" and dest in PARTS) or (
                    layer == "role" and (name not in ("local", "ray") or dest not in OF_ROLE)
                ):
                    given[dest] = {each: value for each, value in given[dest].items() if each != layer}
                else:
                    tables[layer].append(f"{key} = {as_toml(action, value, luck)}")
        heads = {"top": "", "command": f"[{name.replace(' ', '.')}]", "role": f"[{ROLE}]" if tables["role"] else ""}
        file.write_text("\n".join(text for layer in tables for text in (heads[layer], *tables[layer])))
        read = PARSER.parse_args(line)
        settle(PARSER, read, environment)
        for dest, action in flags.items():
            base = [value for layer, value in given[dest].items() if layer != "role"]
            assert vars(read)[dest] == (base[0] if base else action.default), (turn, dest, given[dest])
            if name in ("local", "ray"):
                first = next(iter(given[dest]), "")
                assert read.of_roles[ROLE].get(dest) == (given[dest]["role"] if first == "role" else None), (dest, given[dest])


WRONG = [
    ("", {"TANDEM_PROT": "1"}, "TANDEM_PROT is set, which is the variable of no flag; did you mean TANDEM_PORT?"),
    ("", {"TANDEM_PORT": "x"}, "TANDEM_PORT: argument --port: invalid int value: 'x'"),
    ("", {"TANDEM_LOG_LEVEL": "warn"}, "argument --log-level: must be one of debug, info, warning, error; it is 'warn'; did"),
    ("", {"TANDEM_ALLOW_ORIGIN": "'http://a"}, "TANDEM_ALLOW_ORIGIN: No closing quotation"),
    ("", {"TANDEM_PORT": "tcp://10.0.0.1:80", "TANDEM_SERVICE_HOST": "10.0.0.1"}, "give the pod enableServiceLinks: false"),
    ("", {"TANDEM_PORT_80_TCP": "tcp://a", "TANDEM_SERVICE_HOST": "10.0.0.1"}, "give the pod enableServiceLinks: false"),
    ("", {"TANDEM_PORT": "99999"}, "--port must be between 0 and 65535; it is 99999 (--port is from TANDEM_PORT)"),
    ("port = 99999", {}, "between 0 and 65535; it is 99999 (--port is from {file})"),
    ("port = 1\nport 2", {}, "--config {file} cannot be read: Expected '=' after a key in a key/value pair (at line 2"),
    ("model = " + "[" * 3000, {}, "--config {file} cannot be read: "),
    ("[" + ".".join("a" * 3000) + "]", {}, "--config {file} cannot be read: "),
    ("[bench.serve]\nheader = 'Authorization=hush'", {}, "{file} [bench.serve]: header must be a list of texts in quotes\n"),
    ("config = 'x'", {}, "{file}: config is not a flag of any command"),
    ("prot = 1", {}, "{file}: prot is not a flag of any command; did you mean port?"),
    ("[router]\nprot = 1", {}, "{file} [router]: prot is not a flag of this command; did you mean port?"),
    ("[decode]\nport = 1", {}, "{file} [decode]: port is not a flag of this command"),
    ("[locl]", {}, "{file} [locl] is no command of launch; did you mean local?"),
    ("[decode]\nspeculative-config = {method = 'ngram'}", {}, "[decode.speculative-config] is a flag: it must be a text"),
    ("[bench]\nrequest-rate = 1", {}, "{file} [bench] is no command of launch; did you mean bench."),
    ("[bench.serv]\n", {}, "{file} [bench.serv] is no command of launch; did you mean bench.serve?"),
    ("port = '80'", {}, "{file}: port must be a whole number; it is '80'"),
    ("[router]\nport = true", {}, "{file} [router]: port must be a whole number; it is True"),
    ("heartbeat-s = 'x'", {}, "{file}: heartbeat-s must be a number; it is 'x'"),
    ("model = 3", {}, "{file}: model must be a text in quotes; it is 3"),
    ("model = [1]", {}, "{file}: model must be a text in quotes; it is [1]"),
    ("allow-origin = 'http://a.b'", {}, "{file}: allow-origin must be a list of texts in quotes; it is 'http://a.b'"),
    ("prefix-cache = 1", {}, "{file}: prefix-cache must be true or false; it is 1"),
    ("prefix-cache = 'no'", {}, "{file}: argument --prefix-cache: must be one of off, on; it is 'no'"),
    ("[simulate]\nmarkdown = 'yes'", {}, "{file} [simulate]: argument --markdown: must be on or off; it is 'yes'"),
    ("kv-memory = 'auto'\nkv_memory = 'auto'", {}, "{file}: kv_memory is there twice, with - and with _"),
    ("[decode]\ntp = 2", {}, "[decode] tp: all roles that this command starts have the same: move it to the top"),
    ("[router]\nmodel = 'm'", {}, "[router] model: all roles that this command starts have the same"),
    ("[decode]\npage-size = 0", {}, "[decode] --page-size must be between 1 and 1024"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "environment", "said"), WRONG, ids=[re.sub(r"\W+", " ", row[2])[:60] for row in WRONG])
def test_what_is_wrong_is_refused_in_one_line_that_says_where_it_is(
    text: str,
    environment: dict[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["local", f"--config={file}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("launch local: ") and said.format(file=file) in error and error.count("\n") == 1


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--config=/nowhere.toml"]) == 2
    assert "--config /nowhere.toml cannot be read: [Errno 2] No such file" in capsys.readouterr().err


def test_a_child_process_has_what_its_command_line_says_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TANDEM_PORT": "9", "TANDEM_CONFIG": "/nowhere", "TANDEM_OF_NOBODY": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(ORDER_FD, "3")
    flags = PARSER.parse_args(["router"])
    settle(PARSER, flags, settings.environment_of_process())
    assert flags.port == 8000


def test_what_holds_for_a_command_is_shown_with_where_it_comes_from_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, key = tmp_path / "fleet.toml", tmp_path / "key"
    key.write_text("c" * 24)
    file.write_text(
        f"control-key = '{key}'\n[local]\nprefill = 2\n[decode]\nmax-running = 8\n[bench.serve]\nheader = ['Authorization=hush']"
        "\nextra-body = '{\"token\": \"whisper\"}'\nmodel = 'é'"
    )
    monkeypatch.setenv("TANDEM_CONFIG", str(file))
    monkeypatch.setenv("TANDEM_MAX_WAITING", "7")
    assert main(["config", "local", "--decode", "3"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    rows = {tuple(re.split(r"\s{2,}", line.strip())) for line in lines}
    assert head == "launch local" and len(rows) > 60
    assert rows > {
        ("--decode", "3", "the command line"),
        ("--max-waiting", "7", "TANDEM_MAX_WAITING"),
        ("--prefill", "2", f"{file} [local]"),
        ("--max-running", "0", "default"),
        ("--max-running", "8", f"{file} [decode], for this role"),
    }
    assert any(row[0] == "--control-key" and str(key) in row[1] for row in rows)
    assert main(["config"]) == 0
    shown = capsys.readouterr().out
    assert "launch bench serve\n" in shown and "(not shown)" in shown and "default" not in shown
    assert "hush" not in shown and "whisper" not in shown and "c" * 24 not in shown
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", TextIOWrapper(out := BytesIO(), encoding="ascii"))
        assert main(["config"]) == 0
        sys.stdout.flush()
        assert b"\\xe9" in out.getvalue(), "a terminal that knows ASCII alone gets it in ASCII"


def test_the_example_of_the_guide_holds_for_the_commands_that_it_names(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs/operate/configuration.md").read_text()
    file = tmp_path / "fleet.toml"
    file.write_text(guide.partition("```toml\n")[2].partition("```")[0])
    found = {}
    for name in ("local", "router", "prefill", "decode"):
        found[name] = PARSER.parse_args([name, f"--config={file}"])
        settle(PARSER, found[name], {})
    assert (found["router"].port, found["prefill"].port if "port" in found["prefill"] else None) == (80, None)
    assert (found["prefill"].max_running, found["decode"].max_running, found["local"].max_running) == (128, 512, 128)
    assert found["prefill"].chunk_tokens == 16384 and found["decode"].prefix_cache == "off" and found["local"].decode == 2
    whole = FleetConfig(of_roles=found["local"].of_roles)
    assert whole.with_role("decode", whole.engine).max_running == 512


def test_of_commands_without_flags_nothing_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "key", "f"]) == 2
    assert "launch key has no flags that a file or a variable can give" in capsys.readouterr().err
    assert list(describe(PARSER, [], {})) == []
