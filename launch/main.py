"""The console script `launch`: which command starts what.

Owns the commands and their flags. Imports nothing heavy: each command imports what it needs when it runs, so that `launch --help`
answers at once.
"""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from bench import options
from common.config import AccessConfig, EngineConfig, InstanceConfig, LogConfig, ModelConfig, RouterConfig, SecurityConfig
from common.errors import ConfigError
from common.options import ConfigClass, add_flags, read_config, to_flags, with_defaults
from common.trust import write_key
from launch import chat, child, instance_command
from launch.child import BAD_FLAG, ChildProcess, run_process
from launch.commands import (
    Command,
    CommandParser,
    ShowVersion,
    add_command,
    add_local,
    add_ray,
    read_guarded_access,
    read_security,
    where_launch_is,
)
from simulation import plan as simulation_plan

if TYPE_CHECKING:
    from common.ids import Role  # its module imports numpy

OF_TIMED = ("executor", "step_cost")
"""Fields that benchmarks of the engine do not have: they measure what computes."""
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
INSTANCE_LIFE = (
    "SIGTERM or Ctrl-C drains it: it finishes its running requests or hands them off, then ends. A second signal ends it at once."
)
ROUTER_LIFE = (
    "SIGTERM or Ctrl-C drains it: it refuses new requests, lets the open ones finish, then ends. A second signal ends it at once."
)
LOAD_OPTIONS = (options.TargetOptions, options.WorkloadOptions, options.LoadOptions, options.ResultOptions)
SERVE_LIFE = "The flags are named as in `vllm bench serve`, and so are the keys of the JSON file."
KEY_LIFE = (
    "As the key of a fleet: copy the file to every host, and give each process --cluster-key FILE. As the control key of the "
    "HTTP API: make another file for the routers alone, and give them --control-key FILE. Who has a file is let in."
)
STATUSES = (
    "Exit status: 0 after an orderly end, 1 when something failed, 2 for a flag, file or model that cannot work, 130 when killed "
    "in haste."
)
DETOKENIZER = "detokenizer"

BENCH_SWITCHES = {
    "--quick": "take less than a minute, to show that everything works: flags that are not given get small values",
    "--markdown": "print the report as Markdown, with the command and the machine",
}


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="launch",
        description="Starts Tandem: LLM serving with prefill and decode on separate machines.",
        epilog=STATUSES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="show the version, and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_local(commands)
    add_ray(commands)
    router = add_command(
        commands, "router", "start the router: it serves the HTTP API, and instances register with it", _router, ROUTER_LIFE
    )
    add_flags(router, RouterConfig, ModelConfig, LogConfig, SecurityConfig, AccessConfig)
    instances = (
        add_command(commands, "prefill", "start one prefill instance", _instance("prefill"), INSTANCE_LIFE),
        add_command(commands, "decode", "start one decode instance", _instance("decode"), INSTANCE_LIFE),
    )
    for instance in instances:
        add_flags(instance, InstanceConfig, ModelConfig, EngineConfig, LogConfig, SecurityConfig)
    add_flags(add_command(commands, "chat", "talk with the served model in this terminal", _chat), chat.ChatFlags)
    _add_simulate(commands)
    key = add_command(
        commands, "key", "make a key, of a fleet or of its control, in a new file that only its owner can read", _key, KEY_LIFE
    )
    key.add_argument("file", metavar="FILE", help="the file to make")
    _add_bench(commands)
    return parser


def _build_detokenizer_parser() -> argparse.ArgumentParser:
    """Of a command that only the router gives: no help and no message names it."""
    parser = CommandParser(prog=f"launch {DETOKENIZER}", allow_abbrev=False)
    parser.set_defaults(command=_detokenizer, prog=parser.prog)
    parser.add_argument("--of", required=True)
    parser.add_argument("--shard", type=int, required=True)
    add_flags(parser, RouterConfig, ModelConfig, LogConfig, SecurityConfig)
    return parser


def _add_simulate(commands: Any) -> None:
    simulate = add_command(
        commands,
        "simulate",
        "run a whole fleet in this process on simulated time, and report what its clients and its control plane see",
        _simulate,
        "Routers, schedulers and protocols are the real ones; computing and transfers take the time that the flags say.",
    )
    add_flags(simulate, simulation_plan.FleetPlan, simulation_plan.LoadPlan)
    others = [field.name for field in dataclasses.fields(RouterConfig) if field.name not in SIMULATED]
    add_flags(simulate, RouterConfig, without=(*others, "max_requests"))
    simulate.add_argument("--markdown", action="store_true", help=BENCH_SWITCHES["--markdown"])


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure this machine, or a server", allow_abbrev=False)
    benches = bench.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    offline = add_command(
        benches, "offline", "measure the throughput of one engine, with its scheduler and without HTTP", _bench_offline
    )
    add_flags(offline, options.OfflineOptions, ModelConfig)
    add_flags(offline, EngineConfig, without=OF_TIMED)
    _add_loads(benches)
    for flag, explanation in BENCH_SWITCHES.items():
        offline.add_argument(flag, action="store_true", help=explanation)


def _add_loads(benches: Any) -> None:
    """Those that send a load as clients do."""
    serve = add_command(
        benches, "serve", "send a load to any server with OpenAI's API, and report what its clients see", _bench_serve, SERVE_LIFE
    )
    add_flags(serve, *LOAD_OPTIONS)
    compare = add_command(
        benches, "compare", "send the same load through several layouts in turn, and draw what their clients see", _bench_compare
    )
    add_flags(compare, options.CompareOptions, *LOAD_OPTIONS, without=options.DECIDED_BY_COMPARE)
    compare.add_argument("--markdown", action="store_true", help=BENCH_SWITCHES["--markdown"])
    trace = add_command(
        benches, "trace", "record what every process of a fleet does, and write a trace that Perfetto shows", _bench_trace
    )
    add_flags(trace, options.TraceOptions)
    add_flags(trace, options.WorkloadOptions, options.LoadOptions, without=options.DECIDED_BY_TRACE)
    trace.add_argument("--markdown", action="store_true", help=BENCH_SWITCHES["--markdown"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 2 for a bad flag, which is named on stderr."""
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] == DETOKENIZER:
        flags = _build_detokenizer_parser().parse_args(given[1:])
    else:
        flags = build_parser().parse_args(given)
    command: Command = flags.command
    try:
        return command(flags)
    except ConfigError as error:
        print(f"{flags.prog}: {error}{where_launch_is(str(error))}", file=sys.stderr)
        return BAD_FLAG


def _router(flags: argparse.Namespace) -> int:
    config, model, log = read_config(RouterConfig, flags), read_config(ModelConfig, flags), read_config(LogConfig, flags)
    security, _ = read_security(flags)
    access = read_guarded_access(flags, security)

    def body(process: ChildProcess) -> None:
        from launch.router_process import serve

        serve(process, config, model, log, security, access)

    return run_process("router", log, 1, body)


def _chat(flags: argparse.Namespace) -> int:
    plan = read_config(chat.ChatFlags, flags)
    return chat.run(plan, chat.read_api_key(plan.api_key_file))


def _simulate(flags: argparse.Namespace) -> int:
    child.prepare(1)
    from launch.simulate import run

    fleet, load = read_config(simulation_plan.FleetPlan, flags), read_config(simulation_plan.LoadPlan, flags)
    router = read_config(RouterConfig, flags, max_requests=RouterConfig().max_requests)
    command = _bench_command(flags, ("--markdown",), fleet, load, router)
    return run(fleet, load, dataclasses.replace(router, max_requests=fleet.max_requests), command, flags.markdown)


def _bench_offline(flags: argparse.Namespace) -> int:
    engine = read_config(EngineConfig, flags)
    child.prepare(engine.threads)
    from bench.offline import run

    bench, model = read_config(options.OfflineOptions, flags), read_config(ModelConfig, flags)
    command = _bench_command(flags, BENCH_SWITCHES, bench, model, engine)
    if flags.quick:
        bench, engine = with_defaults(bench, options.QUICK_OFFLINE), with_defaults(engine, options.QUICK_ENGINE)
    return run(bench, model, engine, command, flags.markdown)


def _bench_serve(flags: argparse.Namespace) -> int:
    child.prepare(1)
    from bench.serve import run

    target, workload = read_config(options.TargetOptions, flags), read_config(options.WorkloadOptions, flags)
    load, results = read_config(options.LoadOptions, flags), read_config(options.ResultOptions, flags)
    bench = options.ServeOptions(target=target, workload=workload, load=load, results=results)
    command = _bench_command(flags, (), target.without_secrets(), workload, load, results)
    return run(bench, command, chat.read_api_key(target.api_key_file))


def _bench_compare(flags: argparse.Namespace) -> int:
    child.prepare(1)
    bench = read_config(options.CompareOptions, flags)
    for layout in bench.layouts:
        if not layout.is_url:
            build_parser().parse_args(["local", *layout.flags])  # a wrong flag ends the command here, and not in the middle
    target, workload = read_config(options.TargetOptions, flags), read_config(options.WorkloadOptions, flags)
    load = read_config(options.LoadOptions, flags, request_rate=bench.ladder[0])  # some flags need a rate
    results = read_config(options.ResultOptions, flags)
    common = options.ServeOptions(target=target, workload=workload, load=load, results=results)
    options.check_comparable(common)
    from bench.compare import run

    configs = bench, target.without_secrets(), workload, load, results
    command = _bench_command(flags, ("--markdown",), *configs, without=options.DECIDED_BY_COMPARE)
    return run(bench, common, command, flags.markdown, chat.read_api_key(target.api_key_file))


def _bench_trace(flags: argparse.Namespace) -> int:
    child.prepare(1)
    bench = read_config(options.TraceOptions, flags)
    workload, load = read_config(options.WorkloadOptions, flags), read_config(options.LoadOptions, flags)
    bench.check_load(workload, load)
    if not bench.url:
        build_parser().parse_args(["local", *bench.fleet_flags])  # a wrong flag ends the command here
    from bench.trace import run

    command = _bench_command(flags, ("--markdown",), bench, workload, load, without=options.DECIDED_BY_TRACE)
    return run(bench, workload, load, command, flags.markdown, chat.read_api_key(bench.control_key) if bench.control_key else "")


def _bench_command(flags: argparse.Namespace, switches: Iterable[str], *configs: ConfigClass, without: Sequence[str] = ()) -> str:
    """The command line that was given, so that a reader can repeat it. without: fields that are no flags of the command."""
    given = [flag for flag in switches if vars(flags)[flag.strip("-")]]
    return f"{flags.prog} {shlex.join([*given, *to_flags(*configs, without=without)])}".rstrip()


def _detokenizer(flags: argparse.Namespace) -> int:
    config, model, log = read_config(RouterConfig, flags), read_config(ModelConfig, flags), read_config(LogConfig, flags)
    _, trust = read_security(flags)

    def body(process: ChildProcess) -> None:
        from common.ids import InstanceId
        from launch.detokenizer_process import serve

        serve(process, config, model, InstanceId(flags.of), flags.shard, trust)

    return run_process(f"detokenizer-{flags.shard}" if config.detokenizers > 1 else "detokenizer", log, 1, body)


def _instance(role: "Role") -> Command:
    def command(flags: argparse.Namespace) -> int:
        security, trust = read_security(flags)
        return instance_command.run(
            role,
            read_config(InstanceConfig, flags),
            read_config(ModelConfig, flags),
            read_config(EngineConfig, flags),
            read_config(LogConfig, flags),
            security,
            trust,
        )

    return command


def _key(flags: argparse.Namespace) -> int:
    write_key(flags.file)
    print(f"wrote {flags.file}: {KEY_LIFE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
