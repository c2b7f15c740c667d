"""The rows of the batch: what the device is told about a step is exactly what its requests asked for."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from common.executor import Chunk, RowStart, StepPlan
from common.sampling_params import SamplingParams
from engine.rows import BatchTensors, HostStep, StepArrays
from engine.torch_kernels import GREEDY_BELOW

ROWS, PAGES, PAGE_SIZE, SPARE = 6, 3, 4, 99
CPU = torch.device("cpu")
JUST_GREEDY = float(np.nextafter(np.float32(GREEDY_BELOW), np.float32(0)))
NEAREST_BELOW = float(np.nextafter(GREEDY_BELOW, 0.0))
"""As float64 below the bound, and at the bound in the float32 that the device compares."""


def asked(temperature: float = 0.7, **others: float) -> SamplingParams:
    return SamplingParams(max_new_tokens=9, temperature=temperature, **others)  # type: ignore[arg-type]


def begun(
    params: Sequence[SamplingParams], lengths: Sequence[int] | None = None, decode_size: int = 0
) -> tuple[BatchTensors, HostStep]:
    """All rows start with their KV and decode at once. The device is told of it, and computes nothing."""
    rows = BatchTensors(ROWS, PAGES, PAGE_SIZE, SPARE, CPU)
    page = np.zeros(PAGES, dtype=np.int32)
    starts = [
        RowStart(row, page, sampling, length=3 if lengths is None else lengths[row], last_token=50 + row)
        for row, sampling in enumerate(params)
    ]
    host = rows.prepare(StepPlan(1, starts=tuple(starts), decode_rows=np.arange(len(params), dtype=np.int32)), decode_size)
    rows.apply(on_device(host))
    return rows, host


def on_device(host: HostStep) -> StepArrays[Tensor]:
    return StepArrays(*map(torch.from_numpy, host.arrays))


def test_a_row_samples_exactly_as_its_request_asked() -> None:
    params = [
        asked(0.0, seed=-(2**63)),
        asked(1.3, seed=2**63 - 1, top_p=0.9),
        asked(0.7, seed=2**32 + 5, min_p=0.05),
        asked(2.0, seed=-1, top_k=2**31 - 1),
        asked(1e-5, top_k=7, top_p=0.25, min_p=0.5),
    ]
    lengths = [0, 3, 8, 11, 5]
    rows, _ = begun(params, lengths)
    got = rows.sampling(torch.arange(len(params)))
    logarithms = np.array([-np.inf, -np.inf, np.log(0.05), -np.inf, np.log(0.5)], dtype=np.float32)
    assert got.min_logit.tolist() == logarithms.tolist()
    for name, values in (("temperature", got.temperature), ("top_p", got.top_p)):
        assert values.tolist() == np.array([getattr(p, name) for p in params], dtype=np.float32).tolist()
    assert got.seed.tolist() == [p.seed for p in params]
    assert got.top_k.tolist() == [p.top_k for p in params]
    assert got.position.tolist() == lengths
    assert rows.last_token[: len(params)].tolist() == [50, 51, 52, 53, 54]


def test_rows_are_noisy_where_the_device_does_not_take_them_for_greedy() -> None:
    temperatures = [0.0, 1e-6, JUST_GREEDY, NEAREST_BELOW, GREEDY_BELOW, 2.0]
    rows, host = begun([asked(temperature) for temperature in temperatures])
    assert not host.is_greedy
    is_greedy = [begun([asked(temperature)])[1].is_greedy for temperature in temperatures]
    assert is_greedy == (rows.sampling(torch.arange(ROWS)).temperature < GREEDY_BELOW).tolist() == [True] * 3 + [False] * 3


def test_a_row_that_starts_again_forgets_how_it_sampled() -> None:
    rows, _ = begun([asked(top_k=5, min_p=0.1, seed=-3)])
    start = RowStart(0, np.zeros(1, dtype=np.int32), asked(0.0, seed=4))
    host = rows.prepare(StepPlan(2, starts=(start,), chunks=(Chunk(0, 0, np.full(2, 7, dtype=np.int32), last=True),)), 0)
    rows.apply(on_device(host))
    got = rows.sampling(torch.zeros(1, dtype=torch.int64))
    assert (got.seed.item(), got.top_k.item(), got.min_logit.item(), got.temperature.item()) == (4, 0, -np.inf, 0.0)
    assert host.is_greedy


def test_a_short_batch_is_filled_with_the_null_row() -> None:
    rows, host = begun([asked(), asked()], lengths=[0, 9], decode_size=5)
    assert host.arrays.decode_rows.tolist() == [0, 1, ROWS, ROWS, ROWS]
    assert host.decode_lengths.tolist() == [1, 10, 1, 1, 1]
    assert rows.table[ROWS].tolist() == [SPARE] * PAGES
    again = rows.prepare(StepPlan(2, decode_rows=np.array([1], dtype=np.int32)), 2)
    assert again.arrays.decode_rows.tolist() == [1, ROWS]
    assert again.decode_lengths.tolist() == [11, 1]
