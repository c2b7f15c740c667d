"""What the proofs over compiled kernels stand on: a stand-in for CUDA's runtime, and a table that a change must not worsen."""

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.soak import compiled
from tests.soak.compiled import Stub, stub_in, worsened


class Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class Runtime:
    """Calls of CUDA's runtime as a compiled module makes them, with one kernel."""

    def __init__(self, folder: Path) -> None:
        library = stub_in(folder)
        self.stub, self._calls = Stub(library), ctypes.CDLL(str(library))
        self._kernel = ctypes.c_char_p(b"the kernel")
        register = self._calls["__cudaRegisterFunction"]  # Python would give it the name of the class
        register(None, self._kernel, None, b"kernel", 0, *[None] * 5)

    def start(self, grid: Dim3, block: Dim3, shared_bytes: int = 0) -> int:
        arguments = (self._kernel, grid, block, None, ctypes.c_size_t(shared_bytes), None)
        return int(self._calls.cudaLaunchKernel(*arguments))

    def allow_shared(self, size: int) -> int:
        return int(self._calls.cudaFuncSetAttribute(self._kernel, 8, size))

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        pointers = (ctypes.c_void_p(each.data_ptr()) for each in (to, source))
        self._calls.cudaMemcpyAsync(*pointers, ctypes.c_size_t(source.nbytes), 1, None)


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    made = Runtime(tmp_path)
    made.stub.take()
    yield made
    made.stub.take()


def test_the_stand_in_writes_down_what_is_started_and_copies(runtime: Runtime) -> None:
    assert runtime.start(Dim3(3, 2, 1), Dim3(32, 4, 1), 100) == 0
    room, numbers = torch.zeros(8), torch.arange(4.0)
    runtime.copy(room[2:], numbers)
    assert runtime.stub.take(room) == ["launch 3,2,1 32,4,1 100 kernel"]
    assert room[2:6].tolist() == numbers.tolist() and runtime.stub.take() == []


def test_a_copy_beyond_the_workspaces_is_found(runtime: Runtime) -> None:
    room = torch.zeros(8)
    runtime.copy(room[2:], torch.ones(4))
    with pytest.raises(AssertionError, match="beyond the workspaces"):
        runtime.stub.take(room[:5])


@pytest.mark.parametrize("grid", [Dim3(0, 1, 1), Dim3(1, 65_536, 1), Dim3(1, 1, 65_536)])
def test_a_grid_that_no_card_has_is_refused(runtime: Runtime, grid: Dim3) -> None:
    assert runtime.start(grid, Dim3(32, 1, 1)) != 0
    with pytest.raises(AssertionError, match="refused"):
        runtime.stub.take()


def test_a_block_gets_much_shared_memory_only_if_it_asked_for_it(runtime: Runtime) -> None:
    assert runtime.start(Dim3(1, 1, 1), Dim3(1025, 1, 1)) != 0
    assert runtime.allow_shared(60_000) == 0 and runtime.start(Dim3(1, 1, 1), Dim3(32, 1, 1), 60_000) == 0
    assert runtime.start(Dim3(1, 1, 1), Dim3(32, 1, 1), 60_001) != 0
    assert runtime.allow_shared(232_449) != 0, "no block of a Hopper card has so much"
    with pytest.raises(AssertionError, match="refused"):
        runtime.stub.take()


def test_a_kernel_that_takes_more_than_the_table_says_is_named() -> None:
    table = {"FlashInfer's decode for 9.0a": {"Decode": [56, 0, 1024], "Merge": [40, 8, 0]}}
    assert worsened(table, table) == []
    found = {"FlashInfer's decode for 9.0a": {"Decode": [55, 1, 1024], "Merge": [40, 0, 0], "New": [1, 0, 0]}}
    first, second = worsened(table, found)
    assert "Decode takes [55, 1, 1024]" in first and "[56, 0, 1024]" in first and "New takes" in second


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_compiled_modules_start_the_same_kernels_for_every_plan_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["compiled", "--cards", "9.0a"])
    assert compiled.main() == 0
