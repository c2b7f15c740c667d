"""What the commands of `launch` have in common: how one is made, how it refuses a wrong flag, and which keys it reads before it
starts anything.

Owns no command. Imports nothing heavy.

How `launch local` divides the cores of a host without GPUs among its instances.

Owns the flags and the arithmetic. What instances lend each other while they serve is `engine/cpu/lent_cores.py`.

The commands that start a whole fleet: `launch local` and `launch ray`.

Owns their flags. Imports nothing heavy: each command imports what it needs when it runs.
"""

import argparse
import difflib
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from common.access import read_access, require_guarded
from common.addresses import LOOPBACK, bind_address, check_address
from common.config import AccessConfig, EngineConfig, InstanceConfig, LogConfig, ModelConfig, RouterConfig, SecurityConfig
from common.options import Switch, add_flags, option, parse_numbers, read_config, require
from common.trust import Trust, read_trust
from launch import child
from launch.child import BAD_FLAG
from launch.ray_plan import RayConfig

DECODE_TOKEN = 2.0
"""What an answer's token costs, in tokens of prompts: about this much in batches of 8 to 16 rows, where reading the weights
counts as much as computing with them (docs/measurements/cpu.md)."""


@dataclass(frozen=True, kw_only=True)
class CoresConfig:
    """How the cores of a host without GPUs are divided."""

    workload: str = option(
        "512,128",
        "tokens of a typical prompt and of its answer: prefill and decode instances get cores by the work that each makes",
    )
    lend_cores: Switch = option(
        "on", "on: while an instance has nothing to compute, others on this host use its cores too; off: each uses its own only"
    )

    def __post_init__(self) -> None:
        lengths = parse_numbers(self.workload, "workload", int)
        require(len(lengths) == 2 and min(lengths) >= 1, "workload", "two numbers of tokens, such as 512,128", self.workload)

    @property
    def prefill_share(self) -> float:
        """Of the work."""
        prompt, answer = parse_numbers(self.workload, "workload", int)
        return prompt / (prompt + DECODE_TOKEN * answer)


def divide_by_work(cores: int, prefill: int, decode: int, prefill_share: float) -> tuple[int, int]:
    """Cores of each prefill and of each decode instance: at least one each, and together no more than there are where possible.
    Of all divisions it is the one whose slower role takes the least time.

    prefill, decode: how many instances. prefill_share: of the work, where there are both.
    """
    if not prefill:
        return 0, max(1, cores // decode)

    def slower_role(of_decode: int) -> float:
        """How long the role takes that takes longer."""
        return max(prefill_share / (prefill * left_for_prefill(of_decode)), (1 - prefill_share) / (decode * of_decode))

    def left_for_prefill(of_decode: int) -> int:
        return max(1, (cores - of_decode * decode) // prefill)

    of_decode = min(range(1, max(1, (cores - prefill) // decode) + 1), key=slower_role)
    return left_for_prefill(of_decode), of_decode


Command = Callable[[argparse.Namespace], int]


class CommandParser(argparse.ArgumentParser):
    """Refuses a wrong command line with one line, which names the nearest right word, and status BAD_FLAG."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_FLAG, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """What is not known is refused here, by the parser of the command that was given, and not by the outermost one."""
        read, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            named = flags[0] if flags else unknown[0]
            what = "is not a flag of this command" if flags else "follows no flag that takes it"
            self.error(f"{named} {what}{_nearest(named, self._option_string_actions)}")
        return read, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            near = _nearest(str(value), choices)
            raise argparse.ArgumentError(action, f"must be one of {', '.join(choices)}; it is {value!r}{near}")


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


class ShowVersion(argparse.Action):
    """Looks the version up when it is asked for: that takes longer than all other flags."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            shown = version("tandem-serve")
        except PackageNotFoundError:  # a checkout that is not installed
            shown = "of a checkout that is not installed"
        print(f"{parser.prog} (tandem-serve) {shown}")
        parser.exit()


def add_command(commands: Any, name: str, explanation: str, command: Command, life: str = "") -> argparse.ArgumentParser:
    """explanation: what the command does. life: what happens after the start, and how it ends."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=explanation, description=f"{explanation[0].upper()}{explanation[1:]}. {life}".rstrip(), allow_abbrev=False
    )
    parser.set_defaults(command=command, prog=parser.prog)
    return parser


def read_security(flags: argparse.Namespace) -> tuple[SecurityConfig, Trust]:
    """Raises ConfigError, before anything is started, when the key cannot be used or an address needs one."""
    config = read_config(SecurityConfig, flags)
    trust = read_trust(config)
    if "host" in flags:
        trust.check(f"tcp://{bind_address(flags.host, '--host')}:0")
    if "router" in flags:
        for address in flags.router.split(","):
            trust.check(check_address(address.strip()))
    return config, trust


def read_guarded_access(flags: argparse.Namespace, security: SecurityConfig) -> AccessConfig:
    """Raises ConfigError, before anything is started, when a file cannot be used or HTTP would be open to everybody."""
    config = read_config(AccessConfig, flags)
    read_access(config)
    address = f"tcp://{bind_address(flags.host, '--host')}:0"
    require_guarded(config, address, insecure=security.insecure == "on")
    return config


def where_launch_is(message: str) -> str:
    """What to add to a message that says to run `launch`, where a shell would not find it; "" when it would."""
    ours = Path(sys.executable).with_name("launch")
    if "`launch " not in message or shutil.which("launch") is not None or not ours.exists():
        return ""
    return f" (`launch` is not on PATH: it is {ours}; or run `source {ours.with_name('activate')}` once in each shell)"


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


@child.kept()
def _local(flags: argparse.Namespace) -> int:
    from launch.instance_command import check_model, count_gpus
    from launch.local import LocalPlan, run

    fleet = _read_fleet(flags)
    engine = fleet["engine"]
    child.configure(fleet["log"], "local")
    gpus = count_gpus() if engine.device == "auto" and engine.executor == "torch" else 0
    plan = LocalPlan(**fleet, gpus=gpus, cores=read_config(CoresConfig, flags))
    check_model(plan.model, plan.engine, plan.instance.tp, on_cpu=plan.on_cpu)
    return run(plan)


@child.kept()
def _ray(flags: argparse.Namespace) -> int:
    from launch.instance_command import check_model
    from launch.ray_fleet import RayPlan, run

    fleet = _read_fleet(flags)
    child.configure(fleet["log"], "ray")
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
