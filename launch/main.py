"""The console script `launch`: which command starts what.

Owns the commands and their flags. Imports nothing heavy: each command imports what it needs when it runs, so that `launch --help`
answers at once.
"""

import argparse
import dataclasses
import secrets
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench import options
from common.access import read_control_key, write_key
from common.addresses import LOOPBACK
from common.config import AccessConfig, EngineConfig, InstanceConfig, LogConfig, ModelConfig, RouterConfig, SecurityConfig
from common.errors import INTERRUPTED, ConfigError
from common.extras import install_command
from common.host import count_gpus
from common.options import read_config, with_defaults
from launch import batch, chat, child, fleet_page, instance_command, settings
from launch.child import BAD_FLAG, ChildProcess, run_process
from launch.commands import (
    Command,
    CommandParser,
    ShowVersion,
    command_line,
    read_guarded_access,
    read_security,
    where_launch_is,
)
from launch.fleet_options import CoresConfig, FleetCounts, RayConfig, ScalingConfig, TopFlags
from simulation.plan import FleetPlan, LoadPlan, SearchPlan

if TYPE_CHECKING:
    from common.ids import ServingRole  # its module imports numpy, and so do those of a fleet
    from launch.local import FleetConfig

STATUSES = (
    "Exit status: 0 after an orderly end, 1 when something failed, 2 for a flag, file or model that cannot work, 130 when a "
    "second signal forced it to stop."
)
KEY_LIFE = (
    "To protect a fleet's own connections, copy the file to every host and give every process --cluster-key FILE. To protect the "
    "control endpoints of HTTP, make a second file and give it to the routers, as --control-key FILE, and to your tools. Whoever "
    "has a file can connect: keep it secret."
)
DETOKENIZER = "detokenizer"
HOUR_HELP = (
    "build, check and time the engine on one device, in less than ten minutes, from a checkout; its flags are in its own help"
)


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="launch",
        description="Starts Tandem: LLM serving with prefill and decode on separate machines.",
        epilog=STATUSES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="show the version, and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_to(commands)
    KEY.add_to(commands).add_argument("file", metavar="FILE", help="the file to make")
    config = CONFIG.add_to(commands)
    config.add_argument("--config", default="", metavar="FILE", help="the same as of the command")
    config.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="a command, with its flags; without: all")
    bench = commands.add_parser("bench", help="measure this machine, or a server", allow_abbrev=False)
    benches = bench.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    for command in BENCHES:
        command.add_to(benches)
    first_hour = benches.add_parser("engine", help=HOUR_HELP, description=f"{HOUR_HELP.capitalize()}.", add_help=False)
    first_hour.set_defaults(command=_bench_engine, prog=first_hour.prog)
    first_hour.passes_on = True
    return parser


def _build_detokenizer_parser() -> argparse.ArgumentParser:
    """The parser of a command that only the router gives: no help and no message names it."""
    parser = CommandParser(prog=f"launch {DETOKENIZER}", allow_abbrev=False)
    parser.add_argument("--of", required=True)
    parser.add_argument("--shard", type=int, required=True)
    configs = RouterConfig, ModelConfig, LogConfig, SecurityConfig
    Command(DETOKENIZER, "", _detokenizer, configs).set_up(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 2 for a bad flag, which is named on stderr."""
    given = sys.argv[1:] if arguments is None else arguments
    is_hidden = bool(given) and given[0] == DETOKENIZER
    parser = _build_detokenizer_parser() if is_hidden else build_parser()
    flags = parser.parse_args(given[is_hidden:])
    try:
        settings.settle(parser, flags, settings.environment_of_process())
        status: int = flags.command(flags)
    except ConfigError as error:
        print(f"{flags.prog}: {settings.with_origins(str(error), flags)}{where_launch_is(str(error))}", file=sys.stderr)
        return BAD_FLAG
    except KeyboardInterrupt:
        print(f"\n{flags.prog}: stopped", file=sys.stderr)
        return INTERRUPTED
    return status


# --- fleets ------------------------------------------------------------------------------------------------------------------


@child.kept()
def _local(flags: argparse.Namespace) -> int:
    from launch.local import LocalPlan, run

    config = _read_fleet(flags)
    engine = config.engine
    child.configure(config.log, "local")
    gpus = count_gpus() if engine.device == "auto" and engine.executor == "torch" else 0
    plan = LocalPlan(config=config, gpus=gpus, cores=read_config(CoresConfig, flags))
    instance_command.check_host(engine, on_cpu=plan.on_cpu)
    instance_command.check_model(config.model, engine, config.instance.tp, on_cpu=plan.on_cpu)
    drafting = config.with_role("decode", config.instance).drafting
    instance_command.check_draft_model(drafting, engine, config.instance.tp, on_cpu=plan.on_cpu)
    return run(plan)


@child.kept()
def _ray(flags: argparse.Namespace) -> int:
    from launch.ray_fleet import run

    config = _read_fleet(flags)
    child.configure(config.log, "ray")
    instance_command.check_model(config.model, config.engine, config.instance.tp, on_cpu=config.engine.device == "cpu")
    return run(config, read_config(RayConfig, flags))


def _read_fleet(flags: argparse.Namespace) -> "FleetConfig":
    """Raises ConfigError."""
    from launch.local import FleetConfig

    router = argparse.Namespace(**vars(flags) | flags.of_roles.get("router", {}))
    security, _ = read_security(router)
    return FleetConfig(
        counts=read_config(FleetCounts, flags),
        router=read_config(RouterConfig, router),
        instance=read_config(InstanceConfig, flags, host=LOOPBACK),
        model=read_config(ModelConfig, flags),
        engine=read_config(EngineConfig, flags),
        log=read_config(LogConfig, flags),
        security=security,
        access=read_guarded_access(router, security),
        of_roles=flags.of_roles,
    )


@child.kept()
def _autoscale(flags: argparse.Namespace) -> int:
    from launch.autoscale import run

    return run(read_config(ScalingConfig, flags))


def _router(flags: argparse.Namespace) -> int:
    config, model, log = read_config(RouterConfig, flags), read_config(ModelConfig, flags), read_config(LogConfig, flags)
    security, _ = read_security(flags)
    access = read_guarded_access(flags, security)

    def body(process: ChildProcess) -> None:
        import uvloop

        from launch.router_process import serve

        uvloop.run(serve(process, config, model, log, security, access))

    return run_process("router", log, 1, body)


def _detokenizer(flags: argparse.Namespace) -> int:
    config, model, log = read_config(RouterConfig, flags), read_config(ModelConfig, flags), read_config(LogConfig, flags)
    _, trust = read_security(flags)

    def body(process: ChildProcess) -> None:
        from launch.router_process import serve_detokenizer

        serve_detokenizer(process, config, model, flags.of, flags.shard, trust)

    return run_process(f"detokenizer-{flags.shard}" if config.detokenizers > 1 else "detokenizer", log, 1, body)


def _instance(role: "ServingRole", flags: argparse.Namespace) -> int:
    security, trust = read_security(flags)
    instance = read_config(InstanceConfig, flags)
    command = instance_command.InstanceCommand(
        role=role,
        name=instance.name or f"{role}-{secrets.token_hex(3)}",
        instance=instance,
        model=read_config(ModelConfig, flags),
        engine=read_config(EngineConfig, flags),
        log=read_config(LogConfig, flags),
        security=security,
        trust=trust,
    )
    return command.run()


def _chat(flags: argparse.Namespace) -> int:
    plan = read_config(chat.ChatFlags, flags)
    return chat.run(plan, chat.read_api_key(plan.api_key_file))


def _batch(flags: argparse.Namespace) -> int:
    plan = read_config(batch.BatchFlags, flags)
    build_parser().parse_args(["local", *plan.fleet_flags])  # a wrong flag ends the command here
    return batch.run(plan, chat.read_api_key(plan.api_key_file))


def _drain(flags: argparse.Namespace) -> int:
    plan = read_config(fleet_page.DrainFlags, flags)
    return fleet_page.drain(plan, read_control_key(plan.control_key))


def _top(flags: argparse.Namespace) -> int:
    plan = read_config(TopFlags, flags)
    try:
        from launch.top import run
    except ImportError as error:
        raise ConfigError(f"launch top needs rich, which is not installed here ({error}): {install_command('top')}") from error
    return run(plan, read_control_key(plan.control_key))


def _key(flags: argparse.Namespace) -> int:
    write_key(flags.file)
    print(f"wrote {flags.file}: {KEY_LIFE}")
    return 0


def _config(flags: argparse.Namespace) -> int:
    environment = settings.environment_of_process()
    given = {**environment, "TANDEM_CONFIG": flags.config} if flags.config else environment
    lines = "\n".join(settings.describe(build_parser(), flags.words, given))
    encoding = sys.stdout.encoding
    print(lines.encode(encoding, "backslashreplace").decode(encoding))  # a terminal may know ASCII alone
    return 0


# --- measurements ------------------------------------------------------------------------------------------------------------


def _simulate(flags: argparse.Namespace) -> int:
    child.prepare(1)
    from launch.simulate import run

    fleet, load, router = _read_simulated(flags)
    command = command_line(flags, fleet, load, router)
    return run(fleet, load, dataclasses.replace(router, max_requests=fleet.max_requests), command, flags.markdown)


def _plan(flags: argparse.Namespace) -> int:
    child.prepare(1)
    from launch.plan import run

    plan, (fleet, load, router) = read_config(SearchPlan, flags), _read_simulated(flags)
    command, config = command_line(flags, plan, fleet, load, router), dataclasses.replace(router, max_requests=fleet.max_requests)
    return run(plan, fleet, load, config, command, read_control_key(plan.control_key), flags.markdown)


def _read_simulated(flags: argparse.Namespace) -> tuple[FleetPlan, LoadPlan, RouterConfig]:
    """--max-requests has the default of a plan, and stands in the plan alone."""
    router = read_config(RouterConfig, flags, max_requests=RouterConfig().max_requests)
    return read_config(FleetPlan, flags), read_config(LoadPlan, flags), router


def _bench_offline(flags: argparse.Namespace) -> int:
    engine = read_config(EngineConfig, flags)
    child.prepare(engine.threads)
    from bench.offline import run

    bench, model = read_config(options.OfflineOptions, flags), read_config(ModelConfig, flags)
    command = command_line(flags, bench, model, engine)
    if flags.quick:
        bench, engine = with_defaults(bench, options.QUICK_OFFLINE), with_defaults(engine, options.QUICK_ENGINE)
    return run(bench, model, engine, command, flags.markdown)


def _bench_engine(flags: argparse.Namespace) -> int:
    """An instrument of the developers, which has its own flags and is not installed."""
    if not Path("benchmarks", "engine.py").is_file():
        raise ConfigError("it runs in the folder of a checkout only")
    script = "import sys; from benchmarks.engine import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", script, *flags.rest], check=False).returncode


def _bench_serve(flags: argparse.Namespace) -> int:
    child.prepare(1)
    from bench.serve import run

    bench = _read_load(flags)
    return run(bench, command_line(flags, *bench.without_secrets), chat.read_api_key(bench.target.api_key_file))


def _bench_compare(flags: argparse.Namespace) -> int:
    child.prepare(1)
    bench = read_config(options.CompareOptions, flags)
    for layout in bench.layouts:
        build_parser().parse_args(["local", *layout.flags])  # a wrong flag ends the command here, and not in the middle
    common = _read_load(flags, request_rate=bench.ladder[0])  # some flags need a rate
    options.check_comparable(common)
    from bench.compare import run

    command = command_line(flags, bench, *common.without_secrets, without=options.DECIDED_BY_COMPARE)
    return run(bench, common, command, flags.markdown, chat.read_api_key(common.target.api_key_file))


def _read_load(flags: argparse.Namespace, **load: object) -> options.ServeOptions:
    return options.ServeOptions(
        target=read_config(options.TargetOptions, flags),
        workload=read_config(options.WorkloadOptions, flags),
        load=read_config(options.LoadOptions, flags, **load),
        results=read_config(options.ResultOptions, flags),
    )


def _bench_trace(flags: argparse.Namespace) -> int:
    child.prepare(1)
    bench = read_config(options.TraceOptions, flags)
    workload, load = read_config(options.WorkloadOptions, flags), read_config(options.LoadOptions, flags)
    bench.check_load(workload, load)
    if not bench.url:
        build_parser().parse_args(["local", *bench.fleet_flags])  # a wrong flag ends the command here
    from bench.trace import run

    command = command_line(flags, bench, workload, load, without=options.DECIDED_BY_TRACE)
    return run(bench, workload, load, command, flags.markdown, read_control_key(bench.control_key))


# --- the table ---------------------------------------------------------------------------------------------------------------

INSTANCE_LIFE = (
    "SIGTERM or Ctrl-C drains it: it finishes its running requests or hands them off, then ends. A second signal ends it at once."
)
DECIDED_FOR_A_FLEET = ("share_port", "own_port", "router", "inbox_port", "name", "rank", "leader", "lent_cores", "memory_part")
"""Fields that both commands set for their routers and instances. Other fields that both kinds have are one flag for both."""
PARTS = ("router", "prefill", "decode", "both")
SIMULATED = (
    "dispatch",
    "prefill_policy",
    "decode_policy",
    "early_rejection",
    "heartbeat_s",
    "dead_after_s",
    "max_attempts",
    "peers_per_instance",
    "request_timeout_s",
    "resume_wait_s",
)
"""What `launch simulate` takes of the router's flags. It has --max-requests too, with another default."""
SEARCHED = ("prefill", "decode", "skip_steps", "dispatch", "prefill_policy", "decode_policy")
"""What `launch plan` decides of what is simulated."""
OF_ONE_RUN = ("rate", "requests", "speed", "begin_s", "duration_s", "kill_every_s", "restart_s", "progress")
NOT_SIMULATED = tuple({field.name for field in dataclasses.fields(RouterConfig)} - {*SIMULATED, "max_requests"})
FLEET = (RouterConfig, ModelConfig, EngineConfig, InstanceConfig, LogConfig, SecurityConfig, AccessConfig)
INSTANCE = (InstanceConfig, ModelConfig, EngineConfig, LogConfig, SecurityConfig)
LOAD_OPTIONS = (options.TargetOptions, options.WorkloadOptions, options.LoadOptions, options.ResultOptions)

COMMANDS = (
    Command(
        "local",
        "start routers, prefill and decode instances on this machine",
        _local,
        (FleetCounts, *FLEET, CoresConfig),
        without=DECIDED_FOR_A_FLEET,
        roles=PARTS,
        life="A process that dies is started again, a router on the same ports. An instance that was drained, by the router or "
        "by SIGTERM, is not. Ctrl-C stops all processes in order; a second Ctrl-C stops them at once.",
    ),
    Command(
        "router",
        "start the router: it serves the HTTP API, and instances register with it",
        _router,
        (RouterConfig, ModelConfig, LogConfig, SecurityConfig, AccessConfig),
        life="SIGTERM or Ctrl-C drains it: it refuses new requests, lets the open ones finish, then ends. A second signal ends "
        "it at once.",
    ),
    Command("prefill", "start one prefill instance", partial(_instance, "prefill"), INSTANCE, life=INSTANCE_LIFE),
    Command("decode", "start one decode instance", partial(_instance, "decode"), INSTANCE, life=INSTANCE_LIFE),
    Command(
        "both",
        "start one decode instance that serves whole requests too, where that costs less than a pair of instances",
        partial(_instance, "both"),
        INSTANCE,
        life=INSTANCE_LIFE,
    ),
    Command("chat", "talk with the served model in this terminal", _chat, (chat.ChatFlags,)),
    Command(
        "top",
        "show a fleet in this terminal, once a second: its instances, its requests and what happens to it",
        _top,
        (TopFlags,),
        life="What the router's page at / shows. It ends with Ctrl-C.",
    ),
    Command(
        "batch",
        "compute a file of requests, by a fleet that runs or one that is started for it, and write a file of answers",
        _batch,
        (batch.BatchFlags,),
        life="The files are those of OpenAI's batches. It ends with 0 when every line has its answer. Ctrl-C cancels the batch.",
    ),
    Command(
        "drain",
        "have an instance drain, and wait until it may be deleted",
        _drain,
        (fleet_page.DrainFlags,),
        life="It ends with 0 when every write from or to the instance is proven to have ended and no request of any router needs "
        "it, and with 1 when that is not known in time.",
    ),
    Command(
        "autoscale",
        "watch a fleet through its router, and change roles and numbers of its instances as its load changes",
        _autoscale,
        (ScalingConfig,),
        life="Every decision has its reason on the router's GET /cluster/decisions. It may be killed at any time.",
    ),
    Command(
        "plan",
        "search the best fleet for a load and limits: how many instances of each role, with which ranks, chunks and policies",
        _plan,
        (SearchPlan, FleetPlan, LoadPlan, RouterConfig),
        without=(*SEARCHED, *OF_ONE_RUN, *NOT_SIMULATED),
        switches=("--markdown",),
        life="Each is simulated at several rates: all of them for a short time, the best for longer.",
    ),
    Command(
        "simulate",
        "run a whole fleet in this process on simulated time, and report what its clients and its control plane see",
        _simulate,
        (FleetPlan, LoadPlan, RouterConfig),
        without=NOT_SIMULATED,
        switches=("--markdown",),
        life="Routers, schedulers and protocols are the real ones; computing and transfers take the time that the flags say.",
    ),
    Command(
        "ray",
        "start routers here, and prefill and decode instances on a Ray cluster (needs Ray)",
        _ray,
        (RayConfig, FleetCounts, *FLEET),
        without=(*DECIDED_FOR_A_FLEET, "sharers"),
        roles=PARTS,
        life="Ray reserves a place for each instance, and a process that dies is started again there, or on another node when "
        "its node is gone. Files that flags name (model, keys) must be there on every node. Ctrl-C stops all processes in order.",
    ),
)
KEY = Command(
    "key",
    "make a key, of a fleet or of its control, in a new file that only its owner can read",
    _key,
    life=KEY_LIFE,
)
CONFIG = Command(
    "config",
    "show what holds for a command, and where each value comes from",
    _config,
    life="Write `config` before any command, such as `launch config local --decode 2`. Without a command it shows what a file "
    "and the environment give to each, and refuses what is wrong in them.",
)
BENCHES = (
    Command(
        "offline",
        "measure the throughput of one engine, with its scheduler and without HTTP",
        _bench_offline,
        (options.OfflineOptions, ModelConfig, EngineConfig),
        without=("executor", "step_cost"),  # it measures what computes
        switches=("--quick", "--markdown"),
    ),
    Command(
        "serve",
        "send a load to any server with OpenAI's API, and report what its clients see",
        _bench_serve,
        LOAD_OPTIONS,
        life="The flags are named as in `vllm bench serve`, and so are the keys of the JSON file.",
    ),
    Command(
        "compare",
        "send the same load through several layouts in turn, and draw what their clients see",
        _bench_compare,
        (options.CompareOptions, *LOAD_OPTIONS),
        without=options.DECIDED_BY_COMPARE,
        switches=("--markdown",),
    ),
    Command(
        "trace",
        "record what every process of a fleet does, and write a trace that Perfetto shows",
        _bench_trace,
        (options.TraceOptions, options.WorkloadOptions, options.LoadOptions),
        without=options.DECIDED_BY_TRACE,
        switches=("--markdown",),
    ),
)

if __name__ == "__main__":
    sys.exit(main())
