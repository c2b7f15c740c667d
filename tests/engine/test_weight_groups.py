"""Weights from a trainer's group: a real trainer in a process of its own, and all that can go wrong between the two."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import BroadcastOptions
from transformers import PreTrainedModel

from common.config import EngineConfig, ModelConfig
from common.errors import BadRequest, TandemError, Unavailable
from common.executor import StepPlan, StepResult, Work
from common.ids import Digest
from common.messages.variants import (
    AnnouncedWeight,
    FloatName,
    JoinGroup,
    LeaveGroup,
    ReadWeight,
    WeightsFromGroup,
    WeightsOnDisk,
)
from engine.models.staging import ModelWeights
from engine.torch_executor import TorchExecutor
from tests.engine.checkpoints import llama, qwen3, qwen3_moe, saved
from tests.engine.driver import Driver
from tests.engine.exact import GREEDY, answers, assert_exact, runner
from tests.engine.ranks import least_of, on_ranks, runner_of
from tests.engine.test_staging import PROMPTS, WAIT_S, changed, digest_of, exchange, silent
from tests.rig.forks import forked
from tests.rig.trainer import GROUP, HOST, trainer

Tensors = Mapping[str, torch.Tensor]
FEW_S = 6.0


@pytest.fixture(scope="module", autouse=True)
def groups_in_forked_processes() -> Iterator[None]:
    with forked():
        yield


def nobody() -> None: ...


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return found


def bucket(tensors: Tensors, group: str = GROUP) -> WeightsFromGroup:
    dtypes: dict[torch.dtype, FloatName] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    weights = tuple(AnnouncedWeight(name, dtypes[each.dtype], tuple(each.shape)) for name, each in tensors.items())
    return WeightsFromGroup(group, uuid4().hex, weights)


def part_of(tensors: Tensors, names: Sequence[str]) -> dict[str, torch.Tensor]:
    return {name: tensors[name] for name in names}


@dataclass(frozen=True)
class ThreadTrainer:
    """Rank 0 of a group, on a thread of this process. task: how its rank 1 joins."""

    task: JoinGroup
    group: "Future[Any]"
    thread: ThreadPoolExecutor

    def send(self, tensors: Tensors) -> "Future[None]":
        return self.thread.submit(self._send, tensors)

    def _send(self, tensors: Tensors) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        for tensor in tensors.values():
            self.group.result().broadcast([tensor.contiguous()], options).wait()


@contextmanager
def thread_trainer(members: int = 1, timeout_s: float = WAIT_S) -> Iterator[ThreadTrainer]:
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(HOST, 0, members + 1, is_master=True, wait_for_workers=False, timeout=timeout)
    prefixed = PrefixStore("cpu/", PrefixStore(f"{GROUP}/", PrefixStore(GROUP, store)))
    with ThreadPoolExecutor(1) as thread:
        group = thread.submit(lambda: ProcessGroupGloo(prefixed, 0, members + 1, timeout=timeout))
        yield ThreadTrainer(JoinGroup(GROUP, HOST, store.port, 1, members + 1, "gloo", timeout_s), group, thread)


def until_done(work: Work, woken: threading.Event | None = None) -> str:
    until_s = time.monotonic() + WAIT_S
    while (result := work.poll()) is None:
        assert time.monotonic() < until_s
        (woken or threading.Event()).wait(0.02)
    return result


def join(weights: ModelWeights, task: JoinGroup) -> None:
    met = threading.Event()
    work = weights.groups.join(task, met.set)
    assert met.wait(WAIT_S) and work.poll() == ""


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[TorchExecutor]:
    """One that serves the llama in old/."""
    saved(llama(), tmp_path / "old")
    config = EngineConfig(device="cpu", page_size=16, kv_memory="8MiB", max_running=8, grammar="off")
    with closing(TorchExecutor(ModelConfig(model=str(tmp_path / "old")), config, nobody, silent)) as made:
        yield made


def answers_of(executor: TorchExecutor) -> list[list[int]]:
    def run(plan: StepPlan) -> StepResult:
        step, until_s = executor.launch(plan), time.monotonic() + WAIT_S
        while (result := step.poll()) is None:
            assert time.monotonic() < until_s
        return result

    return Driver(run, executor.description).answers(PROMPTS, 6, GREEDY, 16)


def test_a_trainer_sends_a_model_bucket_by_bucket_and_dies_in_the_last_one_while_steps_go_on(
    tmp_path: Path, executor: TorchExecutor
) -> None:
    """The trainer is a process that knows torch alone."""
    model = llama()
    before = answers_of(executor)
    changed(model).save_pretrained(tmp_path / "new")
    file, tensors = tmp_path / "new" / "model.safetensors", tensors_in(tmp_path / "new")
    with trainer(world_size=2) as process:
        given = process.init
        joining = JoinGroup(GROUP, HOST, given["master_port"], 1, 2, "gloo", WAIT_S)
        met = executor.perform(joining)
        assert until_done(met) == "" and process.hear() == "met"
        with pytest.raises(BadRequest, match="the group weight_update_group is there already"):
            executor.perform(joining)
        names = list(tensors)
        for begin in range(0, len(names), 10):
            some = names[begin : begin + 10]
            assert executor.weights != digest_of(tmp_path / "new")
            staging = executor.stage(bucket(part_of(tensors, some)))
            process.tell(file, some)
            assert until_done(staging) and process.hear() == f"sent {len(some)}"
            executor.switch()
        assert executor.weights == digest_of(tmp_path / "new")
        after = answers_of(executor)
        assert after == [answer.tokens for answer in answers(runner(tmp_path / "new"), PROMPTS, 6, 16)] != before
        staging = executor.stage(bucket(part_of(tensors, names[:3])))
        assert answers_of(executor) == after and staging.poll() is None
        process.tell(file, names[:3], dies_after=1)
        reason = rf"{names[1]} \(weight 2 of 3\) did not come from the group {GROUP}: .*Connection (closed|reset) by peer"
        with pytest.raises(Unavailable, match=reason):
            until_done(staging)
    assert executor.weights == digest_of(tmp_path / "new") and answers_of(executor) == after
    with pytest.raises(BadRequest, match="no group weight_update_group is here: send POST /init_weights_update_group first"):
        until_done(executor.stage(bucket(part_of(tensors, names[:3]))))


@pytest.mark.parametrize("make", [qwen3, qwen3_moe], ids=lambda make: make.__name__)
def test_a_bucket_replaces_the_weights_that_it_names_and_nothing_else(
    make: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    model = make()
    made = runner(saved(model, tmp_path / "old"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers.1." in name or "embed" in name:
                parameter.mul_(0.5)
    model.save_pretrained(tmp_path / "new")
    old, new = tensors_in(tmp_path / "old"), tensors_in(tmp_path / "new")
    some = {name: tensor for name, tensor in new.items() if not torch.equal(tensor, old[name])}
    assert 10 < len(some) < len(new) - 10
    with thread_trainer() as sender:
        join(made.weights, sender.task)
        sent = sender.send(some)
        exchange(made, bucket(some))
        sent.result(WAIT_S)
    assert_exact(model, answers(made, PROMPTS, 6, 16))
    assert made.weights.digest == digest_of(tmp_path / "new")


def test_each_rank_receives_whole_weights_and_takes_its_share(tmp_path: Path) -> None:
    model = llama()
    old = saved(model, tmp_path / "old")
    changed(model).save_pretrained(tmp_path / "new")
    agree, tensors = least_of(2), tensors_in(tmp_path / "new")
    source = bucket(tensors)

    with thread_trainer(members=2) as sender:
        sender.send(tensors)

        def run(group: object) -> tuple[Digest, list[list[int]]]:
            made = runner_of(old, group, agree)  # type: ignore[arg-type]
            join(made.weights, sender.task)
            exchange(made, source)
            return made.weights.digest, Driver(made.run, made.description).answers(PROMPTS, 6, GREEDY, 16)

        (first, tokens), (second, others) = on_ranks(2, run)
    assert first == second == digest_of(tmp_path / "new") and tokens == others
    assert tokens == [answer.tokens for answer in answers(runner(tmp_path / "new"), PROMPTS, 6, 16)]


def test_what_cannot_be_used_is_refused_before_anything_is_received_and_ends_the_group(
    tmp_path: Path, executor: TorchExecutor
) -> None:
    """Nothing is ever sent here, so who waited for it would not come back in time."""
    name, shape = "model.layers.0.mlp.down_proj.weight", (96, 160)
    right = AnnouncedWeight(name, "float32", shape)
    refused: list[tuple[tuple[AnnouncedWeight, ...], type[TandemError], str]] = [
        (
            (right, AnnouncedWeight("model.extra", "float32", (4,))),
            BadRequest,
            "names: the checkpoint .* has no weight model.extra",
        ),
        ((right, AnnouncedWeight("model.norm.weight", "float32", (5,))), BadRequest, r"model.norm.weight has the shape \[5\]"),
        ((right, right), BadRequest, "names: a weight is there twice"),
    ]
    for weights, kind, message in refused:
        with thread_trainer() as sender:
            until_done(executor.perform(sender.task))
            with pytest.raises(kind, match=message):
                until_done(executor.stage(WeightsFromGroup(GROUP, uuid4().hex, weights)))
            with pytest.raises(BadRequest, match="no group"):
                until_done(executor.stage(WeightsFromGroup(GROUP, uuid4().hex, (right,))))
    assert executor.weights == digest_of(tmp_path / "old")


@pytest.mark.parametrize(
    ("announced", "sent", "kind", "message"),
    [
        ("float32", torch.bfloat16, BadRequest, "names: .*: it has fewer bytes than float32"),
        ("bfloat16", torch.float32, Unavailable, "did not come .* more came than was announced"),
    ],
    ids=["less", "more"],
)
def test_a_tensor_of_another_size_than_announced_is_refused_and_harms_nobody(
    tmp_path: Path,
    executor: TorchExecutor,
    announced: FloatName,
    sent: torch.dtype,
    kind: type[TandemError],
    message: str,
) -> None:
    name, before = "model.layers.0.mlp.down_proj.weight", answers_of(executor)
    with thread_trainer() as sender:
        until_done(executor.perform(sender.task))
        staging = executor.stage(WeightsFromGroup(GROUP, uuid4().hex, (AnnouncedWeight(name, announced, (96, 160)),)))
        sender.send({name: torch.ones((96, 160), dtype=sent)})
        with pytest.raises(kind, match=message):
            until_done(staging)
    assert answers_of(executor) == before
    assert executor.weights == digest_of(tmp_path / "old")


def test_who_leaves_a_group_that_has_not_met_is_told_and_no_thread_stays(executor: TorchExecutor) -> None:
    threads = threading.active_count()
    with socket.socket() as silent_host:
        silent_host.bind((HOST, 0))
        task = JoinGroup(GROUP, HOST, silent_host.getsockname()[1], 1, 2, "gloo", 3600.0)
        joining = executor.perform(task)
        until_done(executor.perform(LeaveGroup(GROUP)))
        with pytest.raises(Unavailable, match="was left before all had met"):
            until_done(joining)
        until_s = time.monotonic() + WAIT_S
        while threading.active_count() > threads:
            assert time.monotonic() < until_s
            time.sleep(0.05)


def test_who_gives_up_a_broadcast_waits_for_it_no_longer(tmp_path: Path, executor: TorchExecutor) -> None:
    tensors = {"model.norm.weight": torch.zeros(96)}
    with thread_trainer() as sender:
        until_done(executor.perform(sender.task))
        staging = executor.stage(bucket(tensors))
        begin_s = time.monotonic()
        executor.drop_staged()
        assert until_done(executor.stage(WeightsOnDisk(str(tmp_path / "old")))) == executor.weights
        assert time.monotonic() - begin_s < WAIT_S / 2
        with pytest.raises(Unavailable, match="nobody wants these weights"):
            staging.poll()
        with pytest.raises(BadRequest, match="no group"):
            until_done(executor.stage(bucket(tensors)))
        sender.send(tensors)


def test_a_broadcast_is_received_once(executor: TorchExecutor) -> None:
    """A router that has lost what was staged asks again; the trainer does not send it again."""
    tensors = {"model.norm.weight": torch.ones(96)}
    with thread_trainer() as sender:
        until_done(executor.perform(sender.task))
        source = bucket(tensors)
        sender.send(tensors)
        assert until_done(executor.stage(source))
        executor.drop_staged()
        with pytest.raises(BadRequest, match="was received before, and is lost"):
            until_done(executor.stage(source))


def test_every_wait_for_a_trainer_has_an_end(executor: TorchExecutor) -> None:
    with thread_trainer(timeout_s=1.0) as sender:  # the group has three members, and two come
        one_more = JoinGroup(GROUP, HOST, sender.task.port, 1, 3, "gloo", 1.0)
        with pytest.raises(Unavailable, match=rf"the group {GROUP} did not meet: rank 1 of 3 at {HOST}"):
            until_done(executor.perform(one_more))
        sender.group.cancel()
    executor.perform(LeaveGroup(GROUP))
    with thread_trainer(timeout_s=FEW_S) as sender:
        until_done(executor.perform(sender.task))
        with pytest.raises(Unavailable, match=r"model.norm.weight \(weight 1 of 1\) did not come from the group"):
            until_done(executor.stage(bucket({"model.norm.weight": torch.zeros(96)})))


def test_a_backend_that_cannot_be_is_refused(executor: TorchExecutor) -> None:
    for backend, fix in (("nccl", "use gloo"), ("mpi", "use gloo or nccl")):
        with pytest.raises(BadRequest, match=fix):
            executor.perform(JoinGroup(GROUP, HOST, 1, 1, 2, backend, FEW_S))


def test_the_first_rows_of_a_weight_in_use_are_those_of_the_checkpoint(tmp_path: Path, executor: TorchExecutor) -> None:
    stored = tensors_in(tmp_path / "old")

    def read(name: str, rows: int) -> Any:
        return json.loads(until_done(executor.perform(ReadWeight(name, rows))))

    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        assert read(name, 3) == stored[name][:3].tolist()
    assert len(read("lm_head.weight", 10_000)) == len(stored["lm_head.weight"])
    with pytest.raises(BadRequest, match=r"the model has no weight model\.extra"):
        read("model.extra", 3)
