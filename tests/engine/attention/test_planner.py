"""FlashInfer's own planner, compiled without CUDA: workspaces hold what it plans, and the plan of a graph never changes."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from common.ids import Int64Array
from engine.gpu import flashinfer
from engine.gpu.flashinfer import GRAPH_PLAN_BYTES, AttentionNeeds, float_workspace_bytes
from engine.ports import LayerAttention
from tests.engine.attention.steps import Shape

Planner = Callable[..., list[int] | None]
HEADERS = ("attention/scheduler.cuh", "attention/heap.h", "allocator.h", "exception.h")
TILE_OF_QUERIES = "inline uint32_t FA2DetermineCtaTileQ("
HEADS = [(32, 8, 128), (64, 8, 128), (8, 1, 128), (16, 8, 128), (32, 32, 64), (40, 8, 256), (64, 2, 128), (128, 1, 64)]
"""Query heads, KV heads and head dim: Llama-3 of 8 B and 70 B, the latter shared by 8 ranks, Qwen3-0.6B, and others: of each size
of a tile."""
CARDS = (78, 114, 132)
"""Multiprocessors."""
MOST_ROWS, WINDOWS, PLANS = 512, (-1, 1_023), 60
EAGER_PLAN_BYTES = 8 * 2**20
"""What a wrapper makes itself for its schedule."""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    """plan(multiprocessors, workspace_bytes, schedule_bytes, query ends, pages, query_heads, kv_heads, dim, page_size, is_graph,
    window_left): FlashInfer's plan, or None where a workspace is too small."""
    spec, compiler = find_spec("flashinfer"), shutil.which("c++")
    if spec is None or spec.origin is None or compiler is None:
        pytest.skip("flashinfer-python or a C++ compiler is not installed")
    folder, headers = tmp_path_factory.mktemp("planner"), Path(spec.origin).parent / "data" / "include" / "flashinfer"
    for name in HEADERS:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(headers / name, folder / name)
    for name in ("cuda_runtime_api.h", "driver_types.h", "pos_enc.cuh", "utils.cuh"):
        (folder / name).touch()
    utils = (headers / "utils.cuh").read_text()
    begin = utils.index(TILE_OF_QUERIES)
    (folder / "tile_of_queries.h").write_text(utils[begin : utils.index("\n}\n", begin) + 3])
    source, built = Path(__file__).with_name("planner.cpp"), folder / "planner.so"
    options = ["-std=c++17", "-O1", "-w", "-fpermissive", "-shared", "-fPIC"]
    subprocess.run([compiler, *options, f"-I{folder}", source, "-o", built], check=True, timeout=120)
    call = ctypes.CDLL(str(built)).plan_fa2
    pointer, whole, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    call.argtypes = [whole, wide, wide, pointer, pointer, pointer, *[whole] * 7, pointer]
    schedule = np.empty(EAGER_PLAN_BYTES, dtype=np.uint8)

    def planned(sms: int, floats: int, ints: int, ends: Int64Array, pages: Int64Array, *shape: int) -> list[int] | None:
        queries, indptr = (np.concatenate([[0], numbers]).astype(np.int32) for numbers in (ends, np.cumsum(pages)))
        found = np.zeros(15, dtype=np.int64)
        pointers = (schedule.ctypes.data, queries.ctypes.data, indptr.ctypes.data, len(pages))
        failed = call(sms, floats, ints, *pointers, *shape, found.ctypes.data)
        return None if failed else found.tolist()

    return planned


@pytest.fixture
def workspace_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int, int], int, int], int]:
    """workspace_bytes(heads, page_size, multiprocessors), without the least that it is."""
    monkeypatch.setattr(flashinfer, "_LEAST_WORKSPACE_BYTES", 0)

    def of(heads: tuple[int, int, int], page_size: int, sms: int) -> int:
        query_heads, kv_heads, dim = heads
        layers = (LayerAttention(0.1),)
        memory = Shape(query_heads, kv_heads, dim, page_size, layers, torch.bfloat16, "bfloat16").memory(1)
        return float_workspace_bytes(AttentionNeeds(memory, query_heads, layers, torch.bfloat16, MOST_ROWS, 512), sms)

    return of


@pytest.mark.parametrize("heads", HEADS)
def test_the_workspace_holds_what_is_planned_for_any_chunks(
    plan: Planner, workspace_bytes: Callable[[tuple[int, int, int], int, int], int], heads: tuple[int, int, int]
) -> None:
    random, least_fits = np.random.default_rng(sum(heads)), 0
    for sms in CARDS:
        for page_size in (1, 16, 64):
            room = workspace_bytes(heads, page_size, sms)
            for _ in range(PLANS):
                chunks = random.integers(1, random.choice((2, 5, 40)))
                new = random.integers(1, random.choice((4, 130, 2_000)), chunks)
                pages = -(-(new + random.integers(0, random.choice((2, 500, 100_000)), chunks)) // page_size)
                shape = (*heads, page_size, 0, int(random.choice(WINDOWS)))
                assert plan(sms, room, EAGER_PLAN_BYTES, np.cumsum(new), pages, *shape) is not None
                least_fits += plan(sms, room // 8, EAGER_PLAN_BYTES, np.cumsum(new), pages, *shape) is not None
    assert 0 < least_fits < len(CARDS) * 3 * PLANS, "some plans need much of it, and others do not"


@pytest.mark.parametrize("heads", [heads for heads in HEADS if heads[0] // heads[1] >= 4])
def test_a_graph_of_so_many_rows_has_one_plan_whatever_their_lengths_are(
    plan: Planner, workspace_bytes: Callable[[tuple[int, int, int], int, int], int], heads: tuple[int, int, int]
) -> None:
    """On tensor cores, by the planner of FA2. The workspace and the schedule have room for the most rows."""
    random = np.random.default_rng(sum(heads))
    for sms in CARDS:
        for page_size in (1, 16, 64):
            room = workspace_bytes(heads, page_size, sms)
            for rows in (1, 8, MOST_ROWS):
                for window in WINDOWS:
                    plans = set[tuple[int, ...]]()
                    for most in (1, 200, 100_000):
                        pages = -(-random.integers(1, most + 1, rows) // page_size)
                        shape = (*heads, page_size, 1, window)
                        found = plan(sms, room, GRAPH_PLAN_BYTES, np.arange(1, rows + 1), pages, *shape)
                        assert found is not None
                        plans.add(tuple(found))
                    assert len(plans) == 1
