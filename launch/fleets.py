"""The commands that start a whole fleet: `launch local` and `launch ray`.

Owns their flags. Imports nothing heavy: each command imports what it needs when it runs.
"""

import argparse
from typing import Any

from common.addresses import LOOPBACK
from common.config import AccessConfig, EngineConfig, InstanceConfig, LogConfig, ModelConfig, RouterConfig, SecurityConfig
from common.flags import add_flags, read_config
from launch import logs, signals
from launch.commands import add_command, read_guarded_access, read_security
from launch.local_cores import CoresConfig
from launch.ray_plan import RayConfig

DECIDED_FOR_INSTANCES = ("router", "host", "inbox_port", "name", "rank", "leader", "lent_cores", "memory_part")
"""Fields that both commands set for their instances."""
DECIDED_BY_RAY = (*DECIDED_FOR_INSTANCES, "sharers")
DECIDED_FOR_ROUTERS = ("share_port", "own_port")
"""Fields that they set for their routers."""
OF_ALL = ("max_request_timeout_s", "drain_timeout_s")
"""Fields that the router and its instances have in common: one flag is for both."""
LOCAL_LIFE = (
    "A process that dies is started again, a router on the same ports. An instance that was drained, by the router or by "
    "SIGTERM, is not. Ctrl-C stops all processes in order; a second Ctrl-C stops them at once."
)
RAY_LIFE = (
    "Ray reserves a place for each instance, and a process that dies is started again there, or on another node when its node is "
    "gone. Files that flags name (model, keys) must be there on every node. Ctrl-C stops all processes in order."
)


def add_local(commands: Any) -> None:
    local = add_command(commands, "local", "start routers, prefill and decode instances on this machine", _local, LOCAL_LIFE)
    _add_fleet(local, DECIDED_FOR_INSTANCES)
    add_flags(local, CoresConfig)


def add_ray(commands: Any) -> None:
    ray = add_command(
        commands, "ray", "start routers here, and prefill and decode instances on a Ray cluster (needs Ray)", _ray, RAY_LIFE
    )
    add_flags(ray, RayConfig)
    _add_fleet(ray, DECIDED_BY_RAY)


def _add_fleet(parser: argparse.ArgumentParser, decided: tuple[str, ...]) -> None:
    counts = parser.add_argument_group("How many")
    counts.add_argument(
        "--prefill", type=int, default=1, metavar="N", help="number of prefill instances; 0 means colocated serving (default: 1)"
    )
    counts.add_argument("--decode", type=int, default=1, metavar="M", help="number of decode instances (default: 1)")
    counts.add_argument(
        "--routers", type=int, default=1, metavar="R", help="number of routers, which share the HTTP port (default: 1)"
    )
    add_flags(parser, RouterConfig, without=DECIDED_FOR_ROUTERS)
    add_flags(parser, ModelConfig)
    add_flags(parser, EngineConfig, without=decided)
    add_flags(parser, InstanceConfig, without=(*decided, *OF_ALL))
    add_flags(parser, LogConfig, SecurityConfig, AccessConfig)


@signals.kept()
def _local(flags: argparse.Namespace) -> int:
    from launch.gpus import count_gpus
    from launch.local import LocalPlan, run
    from launch.model_check import check_model

    fleet = _read_fleet(flags)
    engine = fleet["engine"]
    logs.configure(fleet["log"], "local")
    gpus = count_gpus() if engine.device == "auto" and engine.executor == "torch" else 0
    plan = LocalPlan(**fleet, gpus=gpus, cores=read_config(CoresConfig, flags))
    check_model(plan.model, plan.engine, plan.instance.tp, on_cpu=plan.on_cpu)
    return run(plan)


@signals.kept()
def _ray(flags: argparse.Namespace) -> int:
    from launch.model_check import check_model
    from launch.ray_fleet import RayPlan, run

    fleet = _read_fleet(flags)
    logs.configure(fleet["log"], "ray")
    plan = RayPlan(**fleet, ray=read_config(RayConfig, flags))
    check_model(plan.model, plan.engine, plan.instance.tp, on_cpu=plan.engine.device == "cpu")
    return run(plan)


def _read_fleet(flags: argparse.Namespace) -> dict[str, Any]:
    """The fields of a LocalPlan that flags give. Raises ConfigError."""
    security, _ = read_security(flags)
    return {
        "prefill": flags.prefill,
        "decode": flags.decode,
        "routers": flags.routers,
        "router": read_config(RouterConfig, flags),
        "instance": read_config(InstanceConfig, flags, host=LOOPBACK),
        "model": read_config(ModelConfig, flags),
        "engine": read_config(EngineConfig, flags),
        "log": read_config(LogConfig, flags),
        "security": security,
        "access": read_guarded_access(flags, security),
    }
