"""The collectives of a group of ranks, against sums and concatenations of what each rank gave."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from common.errors import ConfigError, MeetingFailed
from engine import parallel
from engine.parallel import ALONE, Group, OneShot, TorchGroup, TorchPeerMemory, open_store, reach_store, share_memory
from tests.engine.ranks import CONNECT_S, CPU, HOST, T, on_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_the_same_sum_and_all_parts_in_order(dtype: torch.dtype) -> None:
    given = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(4)).to(dtype)

    def run(group: Group) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            return group.gather(given[group.rank].clone()), group.sum(given[group.rank].clone())

    results = on_ranks(3, run)
    for gathered, summed in results:
        assert torch.equal(gathered, torch.cat(list(given), dim=1))
        off = (summed.double() - given.double().sum(0)).abs()
        assert (off <= torch.finfo(dtype).eps * given.double().abs().sum(0)).all(), "two additions, each half a rounding off"
        assert torch.equal(summed, results[0][1]), "bit by bit the same"


def test_a_rank_that_is_alone_has_the_whole_of_everything() -> None:
    x = torch.ones(2, 3)
    assert ALONE.sum(x) is x and ALONE.gather(x) is x


def test_a_rank_that_leaves_breaks_the_sums_of_the_others() -> None:
    def run(group: Group) -> bool:
        group.sum(torch.ones(4))
        if group.rank == 0:
            with pytest.raises(RuntimeError, match=r"(?i)connection|broken pipe"):
                group.sum(torch.ones(4))
        return True

    assert on_ranks(2, run) == [True, True]


def fail_to_sum(group: TorchGroup) -> None:
    with pytest.raises(RuntimeError):
        group.sum(torch.ones(4))


def test_leaving_waits_for_no_rank_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "LEAVE_S", 0.1)
    left = threading.Event()

    def run(group: TorchGroup) -> bool:
        """Rank 1 is stopped, as far as rank 0 can tell: it takes no part in a sum, and keeps its connection."""
        if group.rank == 0:
            step = threading.Thread(target=fail_to_sum, args=(group,))
            step.start()
            step.join(0.1)
            group.close()
            assert step.is_alive(), "rank 1 is there"
            left.set()
            return True
        return left.wait(CONNECT_S)

    assert on_ranks(2, run) == [True, True]


class SilentNccl:
    """As much of torch's process group of NCCL as a group uses, by its documentation: no work comes back of a call that is
    synchronous to the stream. Of one rank, whose tensors are on the CPU."""

    class Options:
        """Takes any value."""

    def __init__(self, store: object, rank: int, ranks: int, options: object) -> None:
        self.calls: list[str] = []

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(f"connect {device}")

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        self.calls.append(f"sum, asynchronous {options.asyncOp}")

    def _allgather_base(self, out: Tensor, given: Tensor, options: Any) -> None:
        self.calls.append(f"gather, asynchronous {options.asyncOp}")
        out.copy_(given)


def test_nccl_connects_before_the_first_sum_which_goes_to_the_stream_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", SilentNccl, raising=False)
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
        monkeypatch.setenv(name, "0")
    group, x = TorchGroup(open_store(HOST), 0, 1, torch.device("cuda:1"), HOST, 1.0), torch.randn(2, 3)
    assert group.sums == "NCCL, because --all-reduce says so"
    assert group.sum(x) is x
    assert torch.equal(group.gather(x), x)
    assert group._group.calls == ["connect cuda:1", "sum, asynchronous False", "gather, asynchronous False"]


def test_a_rank_that_does_not_come_is_told_of_at_the_others_who_may_try_again() -> None:
    with pytest.raises(MeetingFailed, match="rank 0 could not connect to the other 1 ranks"):
        TorchGroup(open_store(HOST), 0, 2, CPU, HOST, connect_s=0.3)
    unused = open_store(HOST).port
    with pytest.raises(MeetingFailed, match=f"rank 0 cannot be reached at {HOST}:{unused}"):
        reach_store(HOST, unused, connect_s=0.3)


class HostMemory:
    """Implements `PeerMemory` for the threads of one process, with what torch checks before it starts its kernel: shapes, dtypes
    and alignments. Adds one rank after the other, each sum rounded, as the kernel does."""

    def __init__(self, ranks: int) -> None:
        self.reached: Callable[[int], bool] = lambda other: True
        self.broken_on: int | None = None
        self.slip = 0.0
        self.hangs_on: int | None = None
        self._current = threading.local()
        self.names: set[str] = set()
        self.buffers: dict[int, Tensor] = {}
        self._rank_of: dict[str, int] = {}
        self._device_of: dict[str, torch.device] = {}
        self.added: list[tuple[int, int]] = []
        """The rank and the address of each sum."""
        self._barrier = threading.Barrier(ranks)

    def reaches(self, device: torch.device, other: int) -> bool:
        return self.reached(other)

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        self._current.device = device
        yield
        self._current.device = None

    def ends_within(self, seconds: float) -> bool:
        device: torch.device = self._current.device
        return device.index != self.hangs_on

    def share(self, name: str, store: Store, rank: int, ranks: int, shared_bytes: int, device: torch.device) -> Tensor:
        assert self._current.device == device, "torch would take the thread's current device, which is GPU 0"
        if rank == self.broken_on:
            raise RuntimeError("CUDA driver error: invalid device ordinal\nand more")
        self.names.add(name)
        self._rank_of[name], self._device_of[name] = rank, device
        self.buffers[rank] = torch.zeros(shared_bytes, dtype=torch.uint8)
        return self.buffers[rank]

    def add(self, shared: Tensor, x: Tensor, name: str) -> None:
        assert x.is_contiguous() and shared.shape == x.shape and shared.dtype == x.dtype
        assert x.dtype in (torch.float32, torch.bfloat16)
        assert x.nbytes % 16 == 0 and x.storage_offset() * x.itemsize % 16 == 0 and shared.storage_offset() == 0
        rank = self._rank_of[name]
        if rank not in [each for each, _ in self.added]:
            assert self._current.device == self._device_of[name], "the trial starts its kernel there"
        self.added.append((rank, shared.data_ptr()))
        shared.copy_(x)
        self._barrier.wait(5.0 if self.broken_on is None else 0.2)
        parts = [self.buffers[each][: x.nbytes].view(x.dtype).view(x.shape) for each in sorted(self.buffers)]
        total = parts[0].clone()
        for part in parts[1:]:
            total = total + part
        self._barrier.wait(5.0)
        x.copy_(total + self.slip)

    def forget(self, name: str) -> None:
        self.names.remove(name)


def shared(memory: HostMemory | None, ranks: int, run: Callable[[int, OneShot | str], T]) -> list[T]:
    """What `run` returned on each rank, a thread, that has met the others."""
    store = open_store(HOST)

    def be(rank: int) -> T:
        ours = store if rank == 0 else reach_store(HOST, store.port, CONNECT_S)
        return run(rank, share_memory(memory, ours, rank, ranks, torch.device("cuda", rank)))

    with ThreadPoolExecutor(ranks) as pool, mock.patch.object(torch, "full", partial(_full, torch.full)):
        return list(pool.map(be, range(ranks)))


def _full(full: Callable[..., Tensor], *args: Any, device: torch.device) -> Tensor:
    return full(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_small_sums_by_one_kernel_are_those_of_all_ranks_in_the_same_memory_each_time(ranks: int, dtype: torch.dtype) -> None:
    memory = HostMemory(ranks)
    given = torch.randn(4, ranks, 5, 8, generator=torch.Generator().manual_seed(4)).to(dtype)

    def run(rank: int, made: OneShot | str) -> list[Tensor]:
        assert isinstance(made, OneShot)
        odd = torch.empty(41, dtype=dtype)[1:].view(5, 8)  # no vector begins there
        odd.copy_(given[3, rank])
        sums = [made.sum(given[number, rank].clone()) for number in range(3)]
        return [*sums, made.sum(odd)]

    results = shared(memory, ranks, run)
    for result in results:
        for total, parts in zip(result, given, strict=True):
            off = (total.double() - parts.double().sum(0)).abs()
            assert (off <= (ranks - 1) * torch.finfo(dtype).eps * parts.double().abs().sum(0)).all()
        assert all(torch.equal(ours, first) for ours, first in zip(result, results[0], strict=True)), "bit by bit the same"
    assert len(set(memory.added)) == ranks, "a graph may hold the address"


@pytest.mark.parametrize(
    ("ranks", "shape", "dtype", "is_taken"),
    [
        (2, (64, 4096), torch.bfloat16, True),
        (2, (65, 4096), torch.bfloat16, False),
        (4, (64, 4096), torch.bfloat16, True),
        (8, (32, 4096), torch.bfloat16, True),
        (8, (33, 4096), torch.bfloat16, False),
        (2, (1, 4096), torch.float16, False),
        (2, (1, 4), torch.bfloat16, False),
        (2, (0, 4096), torch.bfloat16, False),
    ],
)
def test_what_adds_a_tensor_is_decided_by_its_shape_and_dtype(
    ranks: int, shape: tuple[int, int], dtype: torch.dtype, is_taken: bool
) -> None:
    memory = HostMemory(1)
    with memory.on(CPU):
        made = OneShot(memory, open_store(HOST), 0, ranks, CPU)
    assert made.takes(torch.empty(shape, dtype=dtype)) is is_taken


def _reason(rank: int, made: OneShot | str) -> str:
    assert isinstance(made, str)
    return made


def test_nccl_adds_all_where_one_rank_cannot_share_memory_and_every_rank_knows_why(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(2)
    memory.reached = lambda other: other == 0
    assert shared(memory, 2, _reason) == ["cuda:0 does not reach the memory of GPU 1"] * 2 and not memory.buffers
    memory = HostMemory(2)
    memory.slip = 0.5
    assert {reason[:40] for reason in shared(memory, 2, _reason)} == {"memory that ranks share adds wrongly: [3"}
    memory = HostMemory(2)
    memory.broken_on = 1
    reasons = shared(memory, 2, _reason)
    assert reasons[0] == reasons[1] and "they cannot share memory (" in reasons[0]
    assert shared(None, 2, _reason) == ["--all-reduce says so"] * 2
    assert shared(HostMemory(9), 9, _reason) == ["9 ranks are too many"] * 9
    names = iter(["a", "b"])
    monkeypatch.setattr(socket, "gethostname", lambda: next(names))
    assert shared(HostMemory(2), 2, _reason) == ["the ranks are on several hosts"] * 2


@pytest.mark.parametrize("hangs_on", [0, 1])
def test_a_trial_that_hangs_on_one_rank_ends_the_start_of_all_with_the_way_out(hangs_on: int) -> None:
    memory, reasons = HostMemory(2), list[str]()
    memory.hangs_on = hangs_on
    store = open_store(HOST)

    def be(rank: int) -> None:
        ours = store if rank == 0 else reach_store(HOST, store.port, CONNECT_S)
        with pytest.raises(ConfigError) as raised:
            share_memory(memory, ours, rank, 2, torch.device("cuda", rank))
        reasons.append(str(raised.value))

    with ThreadPoolExecutor(2) as pool, mock.patch.object(torch, "full", partial(_full, torch.full)):
        list(pool.map(be, range(2)))
    assert reasons[0] == reasons[1] and "--all-reduce nccl" in reasons[0]
    assert f"has not ended on rank {hangs_on} (cuda:{hangs_on}) within 10 s" in reasons[0]


def test_the_device_of_a_rank_is_current_while_its_memory_is_shared_and_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch itself does it: its kernel is started on the current device."""
    entered: list[object] = []

    def enter(device: object) -> AbstractContextManager[None]:
        entered.append(device)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", enter)
    with TorchPeerMemory().on(torch.device("cuda", 1)):
        assert entered == [torch.device("cuda", 1)]


def test_a_group_on_cards_takes_one_kernel_for_small_sums_nccl_for_others_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", SilentNccl, raising=False)
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
        monkeypatch.setenv(name, "0")
    memory = HostMemory(1)
    with mock.patch.object(torch, "full", partial(_full, torch.full)):
        group = TorchGroup(open_store(HOST), 0, 1, torch.device("cuda:1"), HOST, 1.0, memory)
    small, large = torch.randn(4, 8), torch.randn(2**18)
    assert torch.equal(group.sum(small.clone()), small) and group._group.calls == ["connect cuda:1"]
    assert group.sum(large) is large and group._group.calls[1:] == ["sum, asynchronous False"]
    assert group.sums == "one kernel up to 512 KiB, NCCL above"
    group._group.abort = lambda: None
    group.close()
    assert not memory.names


def test_torch_knows_what_is_asked_of_its_symmetric_memory() -> None:
    """As far as a build without CUDA can tell."""
    memory, store, torchs = TorchPeerMemory(), open_store(HOST), cast(Any, torch._C)._distributed_c10d
    with pytest.raises(RuntimeError, match="does not support device type"):
        memory.share("of-a-test", PrefixStore("p", store), 0, 1, 64, CPU)
    assert torchs._resolve_process_group("of-a-test").size() == 1
    memory.forget("of-a-test")
    with pytest.raises(RuntimeError, match="of-a-test"):
        torchs._resolve_process_group("of-a-test")
    arguments = torch.ops.symm_mem.one_shot_all_reduce_copy_out.default._schema.arguments
    assert [each.name for each in arguments] == ["symm_buffer", "local_input", "reduce_op", "group_name", "out"]
