"""A real instance in which one thread fails at its first step, for tests of how an instance ends.

Owns the failure. The rest is the product: `python -m tests.launch.failing_instance WHICH ROUTER` runs a decode instance that
joins the router at that address. WHICH says what fails:

    engine      the model, on the engine thread
    transfer    the transfer loop, on the transfer thread, when the engine has begun its first step
    stuck       as transfer, and the engine never ends that step
    nothing     nothing: it ends when it is told to
"""

import sys
import threading
from collections.abc import Callable
from typing import Any

from common.config import EngineConfig, InstanceConfig, LogConfig
from launch import child
from launch.child import ChildProcess, run_child
from launch.instance_command import InstanceCommand

NAME = "decode-0"
FOREVER_S = 600.0


def main(which: str, router: str) -> int:
    child.prepare(1)
    child.configure(LogConfig(), NAME)

    def body(process: ChildProcess) -> None:
        from launch import instance_process

        break_threads(which)
        engine = EngineConfig(dtype="float32", kv_memory="8MiB", threads=1, grammar="off")
        instance = InstanceConfig(router=router, drain_timeout_s=FOREVER_S, verify_pages="on")
        instance_process.serve(process, InstanceCommand(role="decode", name=NAME, instance=instance, engine=engine), {0: engine})

    return run_child(NAME, body)


def break_threads(which: str) -> None:
    from engine.step_runner import StepRunner
    from kv_transfer.transfer_loop import TransferLoop

    stepped = threading.Event()
    launch, step = StepRunner.launch, TransferLoop.step

    def failing_launch(self: StepRunner, *arguments: Any) -> Any:
        stepped.set()
        if which == "engine":
            raise RuntimeError("the device fell off the bus")
        if which == "stuck":
            threading.Event().wait(FOREVER_S)
        return launch(self, *arguments)

    def failing_step(self: TransferLoop) -> bool:
        if which in ("transfer", "stuck") and stepped.is_set():
            raise RuntimeError("the network card fell off the bus")
        return step(self)

    owners: tuple[tuple[type, str, Callable[..., Any]], ...] = (
        (StepRunner, "launch", failing_launch),
        (TransferLoop, "step", failing_step),
    )
    for owner, name, replacement in owners:
        setattr(owner, name, replacement)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
