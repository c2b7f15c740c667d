"""The commands `prefill` and `decode`: an instance, or some of its ranks.

Owns which process a command becomes, and what is checked before anything is started: the count of GPUs, and what the config of a
model rules out. Reads config.json only, and imports nothing heavy: a wrong flag costs neither the start of a process nor a report
from each. A name of Hugging Face is left to those who download it.
"""

import secrets
from typing import TYPE_CHECKING

from common.addresses import check_instance_id
from common.config import EngineConfig, InstanceConfig, LogConfig, ModelConfig, SecurityConfig
from common.errors import ConfigError
from common.host import core_count, count_gpus, divide_cores
from common.model_path import model_folder
from common.trust import Trust
from engine.models.shape import DEFAULTS, check_ranks, read_architecture, read_shape, refuse_ranks
from launch.child import ChildProcess, run_process

if TYPE_CHECKING:
    from common.ids import Role  # its module imports numpy


def check_model(model: ModelConfig, engine: EngineConfig, ranks: int, *, on_cpu: bool) -> None:
    """ranks: of one instance. Raises ConfigError."""
    folder = model_folder(model.model)
    if engine.executor != "torch":
        return
    if engine.quantization == "fp8" and on_cpu:
        raise ConfigError("--quantization fp8 needs a GPU that computes in FP8, and this runs on CPU: give --quantization int8")
    if folder is None:
        return
    architecture = read_architecture(folder)
    if architecture in DEFAULTS:
        check_ranks(read_shape(folder), ranks, engine.quantization)
    elif ranks > 1:
        refuse_ranks(architecture, ranks)


def run(
    role: "Role",
    instance: InstanceConfig,
    model: ModelConfig,
    engine: EngineConfig,
    log: LogConfig,
    security: SecurityConfig,
    trust: Trust,
) -> int:
    """With several ranks this process is the first of those that the command starts, and it starts the others. Returns the exit
    status. Raises ConfigError for a name that cannot be one."""
    name = instance.name or f"{role}-{secrets.token_hex(3)}"
    try:
        check_instance_id(name)
    except ConfigError as error:
        raise ConfigError(f"--name: {error}") from None
    ranks, is_alone = instance.ranks, instance.tp == 1
    threads = engine.threads if is_alone else divide_cores(engine.threads or core_count(), len(ranks))

    def body(process: ChildProcess) -> None:
        from common.ids import InstanceId
        from launch import instance_process

        _check(instance, model, engine)
        if is_alone:
            instance_process.serve(process, role, instance, model, engine, InstanceId(name), trust)
            return
        from common.instance.ranks.line import RankLost
        from launch import follower_process
        from launch.rank_setup import commands_of_ranks, engines_of_ranks

        engines = engines_of_ranks(instance, engine)
        others = commands_of_ranks(role, name, instance, model, engines, log, security)
        serve = instance_process.serve if ranks[0] == 0 else follower_process.serve
        try:
            serve(process, role, instance, model, engines[ranks[0]], InstanceId(name), trust, others)
        except RankLost as error:
            process.end_now(str(error))  # threads may wait in a library for the rank that is lost

    return run_process(name if ranks[0] == 0 else f"{name}.rank-{ranks[0]}", log, threads, body)


def _check(instance: InstanceConfig, model: ModelConfig, engine: EngineConfig) -> None:
    """Before weights are loaded or other ranks are started. Raises ConfigError."""
    on_cpu = engine.device == "cpu" or (engine.device == "auto" and not count_gpus())
    check_model(model, engine, instance.tp, on_cpu=on_cpu)
