"""README's flags table says what the config classes say."""

import dataclasses
from pathlib import Path

from common.config import AccessConfig, EngineConfig, InstanceConfig, LogConfig, ModelConfig, RouterConfig, SecurityConfig
from common.flags import ConfigClass, flag_of
from launch.local_cores import CoresConfig

README = Path(__file__).parents[2] / "README.md"
GROUPS: tuple[tuple[str, type[ConfigClass]], ...] = (
    ("router", RouterConfig),
    ("router, prefill, decode", ModelConfig),
    ("prefill, decode", EngineConfig),
    ("prefill, decode", InstanceConfig),
    ("all", LogConfig),
    ("all", SecurityConfig),
    ("router", AccessConfig),
    ("local", CoresConfig),
)


def flags_table() -> str:
    rows = ["| flag | default | of | what it says |", "|---|---|---|---|"]
    for commands, config in GROUPS:
        for field in dataclasses.fields(config):
            default = f"`{field.default}`" if field.default not in ("", ()) else ""
            rows.append(f"| `{flag_of(field.name)}` | {default} | {commands} | {field.metadata['help']} |")
    return "\n".join(rows)


def test_the_flags_table_is_that_of_the_code() -> None:
    assert flags_table() in README.read_text(), f"put this table into README.md:\n{flags_table()}"
