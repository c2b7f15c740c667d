"""The torch executor: the model runner on threads of its own, so that launching a step never waits for one.

Owns the engine thread, the completion thread, the steps in flight, and the end of the threads that OpenMP keeps for a thread that
computes no more. Knows no model. Implements `common.executor.Executor` on CPU and CUDA.
"""

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import msgspec
import torch

from common.config import EngineConfig, ModelConfig
from common.drafting import Drafting
from common.errors import BadRequest, ConfigError, TandemError, Unavailable
from common.executor import ExecutorFailed, FutureWork, StepPlan, StepResult, Work, ended_work
from common.ids import Digest, Int32Array
from common.messages.variants import RESULT_CHARS, JoinGroup, LeaveGroup, ReadAdapter, ReadWeight, Task, WeightsSource
from common.options import refuse_without_effect
from common.sampling_params import Grammar
from engine.backends import device_of
from engine.cpu.lent_cores import LentCores
from engine.kv_budget import Agree, as_offered
from engine.lora.adapter_files import Adapter
from engine.lora.adapter_slots import AdapterSlots
from engine.model_runner import ModelRunner
from engine.models.served_shape import FOREIGN
from engine.models.staging import ModelWeights, StagedModel
from engine.parallel import ALONE, Group
from engine.step_runner import PendingStep

_HARD = 2
"""omp_pause_hard: everything of a pool is given back. GNU's runtime does the same for omp_pause_soft."""


def end_own_pool() -> None:
    """End the threads that OpenMP keeps for the calling thread, which gets others when it next computes.

    Each thread that computes has a pool of its own, for as long as it lives. Where all pools together have more threads than
    there are processors, GNU's runtime lets a thread that waits sleep at once, and must wake it for each layer. So whoever
    computes no more should end its pool. Other runtimes have one pool for all threads, and are left alone. Source: libgomp's
    team.c and env.c; OpenMP 5.0, section 3.2.44.
    """
    try:
        library = ctypes.CDLL(torch._C.__file__)  # finds the symbols of what torch depends on, too
        end = library.omp_pause_resource_all
    except (OSError, AttributeError):
        return
    if not _is_llvm(library):
        end(_HARD)


def _is_llvm(library: ctypes.CDLL) -> bool:
    """Whether the runtime is LLVM's or Intel's."""
    try:
        return bool(library.__kmpc_fork_call)
    except AttributeError:
        return False


class StagingThread:
    """Makes new weights ready beside the steps. Implements `Work`. wake: called when it has ended."""

    def __init__(
        self,
        weights: ModelWeights,
        source: WeightsSource,
        after: threading.Event | None,
        former: "StagingThread | None",
        wake: Callable[[], None],
    ) -> None:
        """after: set when those are in use from which it takes what it is not given. former: what it replaces, which ends first,
        so that no two take memory."""
        self._weights, self._source, self._after, self._wake = weights, source, after, wake
        former_thread: threading.Thread | None = None if former is None else former.thread
        self._is_wanted = True
        self.staged: StagedModel | None = None
        self._failure: Exception | None = None
        self.ends_s: float | None = None
        self.thread: threading.Thread = threading.Thread(target=self._run, args=(former_thread,), name="staging", daemon=True)
        self.thread.start()

    def poll(self) -> Digest | None:
        if not self._is_wanted:
            raise Unavailable("nobody wants these weights any more")
        if isinstance(self._failure, TandemError):
            raise self._failure
        if self._failure is not None:
            raise ConfigError(f"the new weights cannot be used: {self._failure!r}") from self._failure
        return None if self.staged is None else self.staged.digest

    def drop(self) -> None:
        """Nobody wants them: the memory is given back as soon as may be."""
        self._is_wanted, self.staged = False, None
        self._weights.groups.give_up()

    def _run(self, former: threading.Thread | None) -> None:
        try:
            if former is not None:
                former.join()
            if self._after is not None and not self._after.wait(STOP_S):
                raise ConfigError("the weights before these are not in use yet")
            self._go_on("")
            staged = self._weights.stage(self._source, self._go_on)
            self.staged = staged if self._is_wanted else None
        except (TandemError, MemoryError, *FOREIGN) as error:  # `poll` raises it
            self._failure = error
            self._weights.abandon(self._source)
        self._wake()

    def _go_on(self, _: str) -> None:
        if not self._is_wanted:
            raise ConfigError("nobody wants these weights any more")


def _read_weight(weights: ModelWeights, task: ReadWeight, after: threading.Event | None, read: "Future[str]") -> None:
    """after: set when the latest weights are in use."""
    try:
        if after is not None and not after.wait(STOP_S):
            raise Unavailable("the latest weights are not in use yet")
        result = msgspec.json.encode(weights.read(task.name, task.rows)).decode()
        if len(result) > RESULT_CHARS:
            rule = f"{len(result)} characters, and {RESULT_CHARS} can be sent: ask for fewer"
            raise BadRequest(f"truncate_size: {task.rows} rows of {task.name} take {rule}", field="truncate_size")
        read.set_result(result)
    except TandemError as error:
        read.set_exception(error)


def _read_adapter(adapters: AdapterSlots, folder: str) -> Adapter:
    try:
        return adapters.read(Path(folder))
    except ConfigError as error:
        raise BadRequest(str(error)) from error
    except (MemoryError, *FOREIGN) as error:
        raise BadRequest(f"{folder} cannot be read: {error!r}") from error
    finally:
        end_own_pool()


STEPS_QUEUED = 8
STOP_S = 30.0


@dataclass(slots=True, eq=False)
class StepInFlight:
    """Implements `StepHandle`. The engine thread sets its fields, the loop's thread reads them."""

    plan: StepPlan
    wake: Callable[[], None]
    """Called when it completes or progresses, on a thread of the executor."""
    result: StepResult | None = None
    failure: Exception | None = None
    layers_done: int = 0
    progress: int = 0
    ends_s: float | None = None

    def poll(self) -> StepResult | None:
        if self.failure is not None:
            step = self.plan.step
            raise ExecutorFailed(f"step {step} failed: {self.failure}", step) from self.failure
        return self.result

    def report_layers(self, layers: int) -> None:
        self.layers_done = layers
        self.wake()


class TorchExecutor:
    """Loads the model in its constructor. wake: called when a step completes or progresses, on a thread of the executor. group,
    agree: see `ModelRunner`; agree is called in the constructor only.

    On CUDA the engine thread gives step after step to the device and waits for none; the completion thread waits for them, in the
    same order. On CPU a step is complete when it has been launched.
    """

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        wake: Callable[[], None],
        progress: Callable[[str], None],
        group: Group = ALONE,
        agree: Agree = as_offered,
        drafting: Drafting | None = None,
    ) -> None:
        if engine.threads:
            torch.set_num_threads(engine.threads)
        self._threads_now = torch.get_num_threads()
        on_cpu = device_of(engine.device).type == "cpu"
        if not on_cpu:
            refuse_without_effect(engine, ("lent_cores", "memory_part"), "on a GPU")
        self._cores = LentCores(engine.lent_cores, self._threads_now) if engine.lent_cores else None
        self._runner = ModelRunner(model, engine, progress, group, agree, warms_grammars=True, drafting=drafting)
        if on_cpu:
            end_own_pool()  # the engine thread computes from now on
        self.description = self._runner.description
        self._wake = wake
        self.weights = self.description.weights
        self._staging: StagingThread | None = None
        self._latest: threading.Event | None = None
        """Set when what was last staged is in use."""
        self._reader = ThreadPoolExecutor(1, "adapters")
        self._steps: queue.Queue[StepInFlight | StagedModel | None] = queue.Queue(STEPS_QUEUED)
        self._launched: queue.SimpleQueue[tuple[StepInFlight, PendingStep] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._launch_steps, name="engine", daemon=True),
            threading.Thread(target=self._complete_steps, name="completion", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._await_grammars(progress)

    def launch(self, plan: StepPlan) -> StepInFlight:
        step = StepInFlight(plan, self._wake)
        self._steps.put_nowait(step)
        return step

    def prepare(self, grammar: Grammar, owner: str = "") -> Work:
        if self._runner.grammars is None:
            return ended_work(BadRequest(f"{grammar.kind}: this instance runs with --grammar off: leave it out", grammar.kind))
        return self._runner.grammars.prepare(grammar, self._wake, owner)

    def stage(self, source: WeightsSource) -> StagingThread:
        former = self._staging
        self.drop_staged()
        self._staging = StagingThread(self._runner.weights, source, self._latest, former, self._wake)
        return self._staging

    def switch(self) -> None:
        """The engine thread takes them over before the next step."""
        staged = None if self._staging is None else self._staging.staged
        assert staged is not None, "nothing is ready"
        self.weights = staged.digest
        self._latest = staged.is_in_use
        self._steps.put_nowait(staged)
        self.drop_staged()

    def drop_staged(self) -> None:
        if self._staging is not None:
            self._staging.drop()

    def perform(self, task: Task) -> Work:
        weights, adapters = self._runner.weights, self._runner.adapters
        match task:
            case JoinGroup():
                return weights.groups.join(task, self._wake)
            case LeaveGroup(group=group):
                weights.groups.leave(group)
                return ended_work("")
            case ReadWeight():
                read: Future[str] = Future()
                job = (weights, task, self._latest, read)
                threading.Thread(target=_read_weight, args=job, name="reading a weight", daemon=True).start()
                return FutureWork(read, self._wake)
            case ReadAdapter():
                return FutureWork(self._reader.submit(_read_adapter, adapters, task.folder), self._wake, adapters.hold)
            case _:
                assert_never(task)

    def free_adapter(self, digest: Digest) -> None:
        self._runner.adapters.free(digest)

    def digest_pages(self, pages: Int32Array) -> bytes:
        return self._runner.memory.digest_pages(pages)

    def close(self) -> None:
        if self._runner.grammars is not None:
            self._runner.grammars.close()
        self._reader.shutdown(wait=False, cancel_futures=True)
        if self._threads[0].is_alive():
            self._steps.put(None)
        until = time.monotonic() + STOP_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if self._cores is not None:
            self._cores.close()
        self._runner.weights.groups.close()

    def _await_grammars(self, progress: Callable[[str], None]) -> None:
        """Their compiler is there before a request can come. A model that cannot have one is served without."""
        if self._runner.warming is None:
            return
        progress("waiting for the compiler of grammars")
        try:
            self._runner.warming.wait()
        except TandemError as error:
            progress(f"no answer can be held to a grammar: {error}")

    def _launch_steps(self) -> None:
        """On CPU with cores that others lend, where a launch is the whole step, the threads follow what is lent."""
        torch.set_num_threads(self._threads_now)
        broken: Exception | None = None
        with self._runner.on_device():
            while (step := self._steps.get()) is not None:
                if isinstance(step, StagedModel):
                    try:
                        self._runner.weights.switch(step)
                    except Exception as error:  # noqa: BLE001 - as below; a half of other weights computes nothing
                        broken = error
                    continue
                try:
                    if broken is not None:
                        raise broken
                    if self._cores is not None:
                        self._cores.begin()
                        self._follow_lent_cores()
                    pending = self._runner.launch(step.plan, step.report_layers, self._between_layers(step))
                    if not pending.is_complete:
                        self._launched.put((step, pending))
                        continue
                    step.result = pending.wait()
                except Exception as error:  # noqa: BLE001 - the thread's outermost door; the step's poll raises it
                    step.failure = error
                finally:
                    if self._cores is not None:
                        self._cores.end()
                self._wake()
        self._launched.put(None)

    def _between_layers(self, step: StepInFlight) -> Callable[[], None] | None:
        """What is called at each layer. None for decode steps that nothing holds up: a recorded one is then a single call."""
        follows = self._cores is not None
        if not follows and not step.plan.chunks:
            return None

        def between() -> None:
            step.progress += 1
            if follows:
                self._follow_lent_cores()

        return between

    def _follow_lent_cores(self) -> None:
        assert self._cores is not None
        threads = self._cores.threads()
        if threads != self._threads_now:
            self._threads_now = threads
            torch.set_num_threads(threads)

    def _complete_steps(self) -> None:
        while (launched := self._launched.get()) is not None:
            step, pending = launched
            try:
                step.result = pending.wait()
            except Exception as error:  # noqa: BLE001 - as above: CUDA reports here what failed on the device
                step.failure = error
            self._wake()
