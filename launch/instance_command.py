"""The commands `prefill` and `decode`: an instance, or some of its ranks.

Owns which process a command becomes, and what is checked before anything is started: the count of GPUs, and what the config of a
model rules out. Reads config.json only, and imports nothing heavy: a wrong flag costs neither the start of a process nor a report
from each. A name of Hugging Face is left to those who download it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.access import LOOPBACK_ONLY, Trust
from common.addresses import check_instance_id
from common.config import EngineConfig, InstanceConfig, LogConfig, ModelConfig, SecurityConfig
from common.errors import ConfigError
from common.host import core_count, count_gpus, divide_cores, host_memory_now
from common.model_path import model_folder
from engine.models.shape import (
    DEFAULTS,
    check_quantization,
    check_ranks,
    head_config,
    read_architecture,
    read_shape,
    refuse_ranks,
)
from launch.child import ChildProcess, run_process

if TYPE_CHECKING:
    from common.drafting import Drafting
    from common.ids import ServingRole  # its module imports numpy


def check_model(model: ModelConfig, engine: EngineConfig, ranks: int, *, on_cpu: bool) -> None:
    """ranks: of one instance. Raises ConfigError."""
    folder = model_folder(model.model)
    if engine.executor != "torch":
        return
    if engine.quantization == "fp8" and on_cpu:
        raise ConfigError("--quantization fp8 needs a GPU that computes in FP8, and this runs on CPU: give --quantization int8")
    if engine.attention == "flashinfer" and on_cpu:
        raise ConfigError("--attention flashinfer needs a GPU, and this runs on CPU: give --attention auto")
    if folder is None:
        return
    architecture = read_architecture(folder)
    shape = read_shape(folder) if architecture in DEFAULTS else None
    check_quantization(architecture, shape, engine.quantization)
    if shape is not None:
        check_ranks(shape, ranks, engine.quantization)
    elif ranks > 1:
        refuse_ranks(architecture, ranks)


def check_host(engine: EngineConfig, *, on_cpu: bool) -> None:
    """What is asked for is on this host. Raises ConfigError."""
    if on_cpu and engine.kv_memory != "auto":
        from engine.kv_budget import given_kv_bytes

        given_kv_bytes(engine.kv_memory, "cpu", host_memory_now().total_bytes)
    if engine.device.startswith("cuda"):
        gpus, number = count_gpus(), engine.device.partition(":")[2]
        if int(number or 0) >= gpus:
            raise ConfigError(f"--device {engine.device}: this host has {gpus} CUDA devices")


def check_draft_model(drafting: "Drafting | None", engine: EngineConfig, ranks: int, *, on_cpu: bool) -> None:
    """As `check_model`, for the model or head that drafts tokens, if one does."""
    if drafting is None or not drafting.model:
        return
    if engine.executor == "timed":
        raise ConfigError("--speculative-config: --executor timed loads no model, so no draft model or head either: take ngram")
    try:
        folder = model_folder(drafting.model)
        if drafting.is_head and folder is not None:
            check_ranks(read_shape(folder, like=head_config(folder)), ranks, "none")
        elif not drafting.is_head:
            check_model(ModelConfig(model=drafting.model), engine, ranks, on_cpu=on_cpu)
    except ConfigError as error:
        raise ConfigError(f"--speculative-config: the draft {'head' if drafting.is_head else 'model'}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class InstanceCommand:
    """What the command was told. Raises ConfigError for a name that cannot be one."""

    role: "ServingRole"
    name: str
    """That of the instance, whichever of its ranks the command starts."""
    instance: InstanceConfig = InstanceConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    log: LogConfig = LogConfig()
    security: SecurityConfig = SecurityConfig()
    trust: Trust = LOOPBACK_ONLY

    def __post_init__(self) -> None:
        try:
            check_instance_id(self.name)
        except ConfigError as error:
            raise ConfigError(f"--name: {error}") from None

    @property
    def drafting(self) -> "Drafting | None":
        """How it drafts tokens. A draft model takes memory, so an instance that starts as prefill has none."""
        drafting = self.instance.drafting
        return None if drafting is None or (drafting.model and self.role == "prefill") else drafting

    def run(self) -> int:
        """With several ranks this process is the first of those that the command starts, and it starts the others. Returns the
        exit status."""
        instance, engine = self.instance, self.engine
        first, is_alone = instance.ranks[0], instance.tp == 1
        threads = engine.threads if is_alone else divide_cores(engine.threads or core_count(), len(instance.ranks))

        def body(process: ChildProcess) -> None:
            from common.instance.ranks.line import RankLost
            from launch import follower_process, instance_process
            from launch.rank_setup import engines_of_ranks

            # Before weights are loaded or other ranks are started.
            on_cpu = engine.device == "cpu" or (engine.device == "auto" and not count_gpus())
            check_host(engine, on_cpu=on_cpu)
            check_model(self.model, engine, instance.tp, on_cpu=on_cpu)
            check_draft_model(self.drafting, engine, instance.tp, on_cpu=on_cpu)
            serve = follower_process.serve if first else instance_process.serve
            try:
                serve(process, self, {0: engine} if is_alone else engines_of_ranks(instance, engine))
            except RankLost as error:
                process.end_now(str(error))  # threads may wait in a library for the rank that is lost

        return run_process(f"{self.name}.rank-{first}" if first else self.name, self.log, threads, body)
