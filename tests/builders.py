"""Builders of small engine descriptions, limits, samplings and instances for tests. Knows no scheduler."""

from collections.abc import Sequence

import numpy as np

from common.executor import EngineDescription, StepPlan, StepResult
from common.ids import ROUTER, AttemptId, Incarnation, InstanceId, RequestId, Role
from common.instance.request import InstanceLimits
from common.messages import EngineChoices, InstanceInfo, ModelIdentity, PoolDescriptor, RankInfo
from common.pages.layout import KVLayout, MemoryRegion
from common.sampling_params import SamplingParams

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=4, page_size=4, dtype="uint8")
EOS = 7


def engine(total_pages: int = 64, max_rows: int = 4, context_tokens: int = 128) -> EngineDescription:
    model = ModelIdentity(
        name="toy", fingerprint="f", architecture="toy", dtype="uint8", vocab_size=1000, context_tokens=context_tokens
    )
    return EngineDescription(
        model=model,
        layout=LAYOUT,
        total_pages=total_pages,
        max_rows=max_rows,
        memory=MemoryRegion(address=0, region_bytes=total_pages * LAYOUT.page_bytes, device="cpu"),
        eos_token_ids=(EOS,),
        device="cpu",
    )


def limits(
    chunk_tokens: int = 8,
    max_waiting: int = 16,
    request_timeout_s: float = 60.0,
    drain_timeout_s: float = 30.0,
    answer_tokens: int = 0,
    prefix_cache: bool = True,
) -> InstanceLimits:
    return InstanceLimits(
        chunk_tokens=chunk_tokens,
        max_waiting=max_waiting,
        request_timeout_s=request_timeout_s,
        drain_timeout_s=drain_timeout_s,
        answer_tokens=answer_tokens,
        prefix_cache=prefix_cache,
    )


def key(name: str = "r", attempt: int = 0) -> AttemptId:
    return AttemptId(RequestId(name), attempt, ROUTER)


def sampling(max_new_tokens: int = 4, ignore_eos: bool = False, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids)


COMPUTES = EngineChoices(attention="in C over the pages", graphs="off, because there is no C compiler")


def instance(name: str, role: Role, incarnation: str = "1") -> InstanceInfo:
    """Incarnations that are numbers began in the order of these."""
    description = engine()
    return InstanceInfo(
        id=InstanceId(name),
        incarnation=Incarnation(incarnation),
        role=role,
        inbox=f"tcp://127.0.0.1:1{incarnation}",
        ranks=(RankInfo(rank=0, pid=1, host="localhost", device="cpu", engine=COMPUTES),),
        model=description.model,
        pools=(
            PoolDescriptor(
                backend="memory", agent=name + incarnation, address=0, total_pages=64, device="cpu", layout=LAYOUT, wire=b""
            ),
        ),
        max_running=4,
        started_ns=int(incarnation) if incarnation.isdecimal() else 1,
    )


class HandClock:
    """A clock that is turned by hand."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def result(plan: StepPlan | None, tokens: Sequence[int] = ()) -> StepResult:
    """The step came back with these tokens, one for each sampled row."""
    assert plan is not None
    assert len(plan.sampled_rows) == len(tokens), "a token for each sampled row"
    return StepResult(plan, np.array(tokens, dtype=np.int32))
