"""Configuration: every limit is an error that names the flag."""

import dataclasses
from typing import Any

import pytest

from common.config import AccessConfig, EngineConfig, InstanceConfig, LogConfig, ModelConfig, RouterConfig, SecurityConfig
from common.errors import ConfigError
from common.options import parse_bytes, parse_memory
from common.step_cost import STEP_COST, StepCost

SLICES = (ModelConfig, EngineConfig, InstanceConfig, RouterConfig, LogConfig, SecurityConfig, AccessConfig)


@pytest.mark.parametrize("slice_type", SLICES)
def test_the_defaults_are_valid_frozen_and_each_has_a_help_text(slice_type: Any) -> None:
    config = slice_type()
    for field in dataclasses.fields(config):
        assert field.metadata["help"]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, None)


def test_no_two_slices_of_an_instance_share_a_flag() -> None:
    names = [
        field.name
        for slice_type in (ModelConfig, EngineConfig, InstanceConfig, LogConfig, SecurityConfig)
        for field in dataclasses.fields(slice_type)
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("slice_type", "field", "values"),
    [
        (ModelConfig, "model", ("",)),
        (EngineConfig, "dtype", ("float64",)),
        (EngineConfig, "kv_dtype", ("fp8",)),
        (EngineConfig, "attention", ("flash",)),
        (EngineConfig, "device", ("tpu", "cuda:")),
        (EngineConfig, "page_size", (0, 1025)),
        (EngineConfig, "max_running", (-1, 4097)),
        (EngineConfig, "chunk_tokens", (-1,)),
        (EngineConfig, "layer_groups", (-1,)),
        (EngineConfig, "threads", (-1, 10**12)),
        (EngineConfig, "kv_memory", ("much", "0%", "101%", "40 percent", "%")),
        (EngineConfig, "sharers", (-1,)),
        (InstanceConfig, "tp", (0, 65)),
        (InstanceConfig, "rank", ("0-7", "1", "all")),
        (InstanceConfig, "leader", ("tcp://127.0.0.1:9",)),
        (InstanceConfig, "inbox_port", (65536, -1)),
        (InstanceConfig, "max_waiting", (0,)),
        (InstanceConfig, "max_request_timeout_s", (0.0, float("inf"))),
        (InstanceConfig, "startup_timeout_s", (float("nan"),)),
        (InstanceConfig, "transport", ("pigeon",)),
        (InstanceConfig, "drain_timeout_s", (-0.1, float("nan"))),
        (InstanceConfig, "verify_pages", ("maybe",)),
        (InstanceConfig, "prefix_cache", ("auto",)),
        (RouterConfig, "port", (65536,)),
        (RouterConfig, "control_port", (-1,)),
        (RouterConfig, "max_requests", (0,)),
        (RouterConfig, "max_body", ("auto", "0")),
        (RouterConfig, "heartbeat_s", (0.0,)),
        (RouterConfig, "dead_after_s", (1.0, 1e16)),
        (RouterConfig, "request_timeout_s", (-1.0, 86_401.0)),
        (RouterConfig, "max_request_timeout_s", (0.0, float("inf"), 1e17)),
        (RouterConfig, "keep_alive_s", (-0.1,)),
        (RouterConfig, "drain_timeout_s", (-0.1,)),
        (RouterConfig, "max_attempts", (0,)),
        (RouterConfig, "resume_wait_s", (-1.0, float("nan"))),
        (LogConfig, "log_level", ("loud",)),
        (SecurityConfig, "insecure", ("maybe",)),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_flag(slice_type: Any, field: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}"):
            slice_type(**{field: value})


@pytest.mark.parametrize(
    ("slice_type", "field", "values"),
    [
        (EngineConfig, "device", ("cuda:7",)),
        (EngineConfig, "page_size", (1024,)),
        (EngineConfig, "kv_memory", ("1.5GiB", "100%")),
        (InstanceConfig, "rank", ("0-0",)),
        (InstanceConfig, "inbox_port", (65535,)),
        (InstanceConfig, "drain_timeout_s", (0.0,)),
        (InstanceConfig, "verify_pages", ("on",)),
        (InstanceConfig, "prefix_cache", ("off",)),
        (RouterConfig, "port", (0,)),
        (RouterConfig, "dead_after_s", (1.01,)),
        (RouterConfig, "max_attempts", (1,)),
        (RouterConfig, "resume_wait_s", (0.0,)),
    ],
)
def test_a_value_at_its_limit_is_taken(slice_type: Any, field: str, values: tuple[object, ...]) -> None:
    for value in values:
        assert getattr(slice_type(**{field: value}), field) == value


@pytest.mark.parametrize("slice_type", SLICES)
def test_an_unknown_key_is_refused(slice_type: Any) -> None:
    with pytest.raises(TypeError, match="no_such_field"):
        slice_type(no_such_field=1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", None), ("1", 1), ("1000000", 1_000_000), ("10B", 10), ("2KB", 2_000), ("2KiB", 2_048), ("512MiB", 512 * 2**20),
        ("3 MB", 3_000_000), ("40GiB", 40 * 2**30), ("1.5gib", 3 * 2**29), ("7GB", 7 * 10**9),
    ],
)  # fmt: skip
def test_amounts_of_memory_are_read(text: str, expected: int | None) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "MiB", "0", "-1", "-5MiB", "0.5", "0.1B", "1TiB", "1 M", "5iB", "1MiBB",
        "nan", "inf", "-inf", "1e999", "Auto", "1,5GiB",
    ],
)  # fmt: skip
def test_a_malformed_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not an amount of memory"):
        parse_bytes(text)
    with pytest.raises(ConfigError, match=r"^--kv-memory: "):
        parse_bytes(text, "kv-memory")


@pytest.mark.parametrize(
    ("text", "expected"), [("auto", None), ("40%", 400), ("12.5 %", 125), ("100%", 1000), ("512", 512), ("1KiB", 1024)]
)
def test_memory_is_an_amount_or_a_share_of_the_whole(text: str, expected: int | None) -> None:
    assert parse_memory(text, "kv-memory", total_bytes=1000) == expected


@pytest.mark.parametrize(
    ("flag", "given"),
    [
        ("--step-cost", {"executor": "timed", "step_cost": "0.005,0.1"}),
        ("--step-cost", {"executor": "timed", "step_cost": "0.005,-0.1,0"}),
        ("--step-cost", {"executor": "timed", "step_cost": "0.005,0.1,0,0,0"}),
        ("--step-cost", {"executor": "timed", "step_cost": "inf,0,0"}),
        ("--step-cost", {"step_cost": "0.005,0,0"}),
        ("--device", {"executor": "timed", "device": "cuda:1"}),
        ("--quantization", {"executor": "timed", "quantization": "fp8"}),
        ("--load-format", {"executor": "timed", "load_format": "dummy"}),
        ("--graphs", {"executor": "timed", "graphs": "on"}),
        ("--layer-groups", {"executor": "timed", "layer_groups": 0}),
        ("--lent-cores", {"executor": "timed", "lent_cores": "/tmp/file"}),
        ("--lent-cores", {"device": "cuda", "lent_cores": "/tmp/file"}),
        ("--memory-part", {"device": "cuda:1", "memory_part": 5}),
        ("--memory-part", {"kv_memory": "40%", "memory_part": 5}),
    ],
)
def test_what_an_executor_or_device_would_ignore_is_refused(flag: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=flag):
        EngineConfig(**given)


def test_a_step_cost_is_three_or_four_numbers_of_seconds() -> None:
    assert StepCost.parse("0.5,0.25,0") == StepCost(0.5, 0.25, 0.0, 0.0)
    assert StepCost.parse("0.5,0.25,0,3e-8") == StepCost(0.5, 0.25, 0.0, 3e-8)
    assert StepCost.parse("") == StepCost.parse(STEP_COST)


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ({}, range(4)),
        ({"rank": "0"}, range(1)),
        ({"rank": "0-1", "leader": "tcp://h:9", "host": "0.0.0.0"}, range(2)),
        ({"rank": "2-3", "leader": "tcp://h:9", "host": "10.0.0.2"}, range(2, 4)),
        ({"rank": "2-3", "leader": "tcp://localhost:9"}, range(2, 4)),
    ],
)
def test_a_command_starts_the_ranks_that_it_names(flags: dict[str, str], ranks: range) -> None:
    assert InstanceConfig(tp=4, **flags).ranks == ranks  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"rank": "2-1"}, "--rank"),
        ({"rank": "1-4", "leader": "tcp://h:9"}, "--rank"),
        ({"rank": "-1"}, "--rank"),
        ({"rank": "2-3"}, "--leader"),
        ({"rank": "2-3", "leader": "h:9"}, "tcp://"),
        ({"rank": "2-3", "leader": "tcp://h:9", "inbox_port": 9}, "--inbox-port"),
        ({"leader": "tcp://h:9"}, "--leader"),
        ({"rank": "0", "leader": "tcp://127.0.0.1:0"}, "--leader"),
        ({"rank": "0", "leader": "tcp://0.0.0.0:9", "host": "0.0.0.0"}, "--leader"),
        ({"rank": "0", "leader": "tcp://10.0.0.1:9"}, "--host"),
        ({"rank": "1", "leader": "tcp://h:9"}, "--host"),
        ({"verify_pages": "on"}, "--verify-pages"),
    ],
)
def test_ranks_that_cannot_be_started_so_are_refused_with_the_flag(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        InstanceConfig(tp=4, **flags)
