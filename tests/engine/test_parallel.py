"""The collectives of a group of ranks, against sums and concatenations of what each rank gave."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import MeetingFailed
from engine import parallel
from engine.parallel import ALONE, Group, TorchGroup, open_store, reach_store
from tests.engine.ranks import CONNECT_S, CPU, HOST, on_ranks


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
    assert group.sum(x) is x
    assert torch.equal(group.gather(x), x)
    assert group._group.calls == ["connect cuda:1", "sum, asynchronous False", "gather, asynchronous False"]


def test_a_rank_that_does_not_come_is_told_of_at_the_others_who_may_try_again() -> None:
    with pytest.raises(MeetingFailed, match="rank 0 could not connect to the other 1 ranks"):
        TorchGroup(open_store(HOST), 0, 2, CPU, HOST, connect_s=0.3)
    unused = open_store(HOST).port
    with pytest.raises(MeetingFailed, match=f"rank 0 cannot be reached at {HOST}:{unused}"):
        reach_store(HOST, unused, connect_s=0.3)
