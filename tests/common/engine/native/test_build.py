"""C sources become libraries that work on torch's own threads, once for each source; without a compiler it is said why."""

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from common.engine.native.build import load

WHO = """
#include "parallel.h"
#include <sys/syscall.h>
#include <unistd.h>
static void note(void *ids, int thread, int threads) { ((long *)ids)[thread] = syscall(SYS_gettid); }
void who(int threads, long *ids) { parallel(threads, note, ids); }
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tandem"


def compiled(source: str, folder: Path) -> ctypes.CDLL | None:
    path = folder / "made.c"
    path.write_text(source)
    return load(path)


def test_a_library_computes_on_the_threads_that_torch_has_and_starts_none(tmp_path: Path, cache: Path) -> None:
    library = compiled(WHO, tmp_path)
    if library is None:
        pytest.skip("there is no C compiler")
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.ones(2**20).sum()  # on all of them
            there = {int(task) for task in os.listdir("/proc/self/task")}
            ids = np.zeros(threads, np.int64)
            library.who(threads, ctypes.c_void_p(ids.ctypes.data))
            assert len(set(ids.tolist())) == threads
            assert set(ids.tolist()) <= there
    finally:
        torch.set_num_threads(before)
    runtimes = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(runtimes) <= 1


def test_a_source_is_compiled_once_and_again_when_it_changes(tmp_path: Path, cache: Path) -> None:
    if compiled("int answer(void) { return 1; }", tmp_path) is None:
        pytest.skip("there is no C compiler")
    (made,) = cache.iterdir()
    was = made.stat().st_mtime_ns
    same = compiled("int answer(void) { return 1; }", tmp_path)
    assert same is not None and same.answer() == 1 and made.stat().st_mtime_ns == was
    changed = compiled("int answer(void) { return 2; }", tmp_path)
    assert changed is not None and changed.answer() == 2 and len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    ("source", "compiler", "said"),
    [
        ("int f(void) { return 1; }", "/no/such/cc", "/no/such/cc"),
        ("int f(void) { return unknown; }", "", "unknown"),
        ("extern int nowhere(void); int f(void) { return nowhere(); }", "", "nowhere"),
    ],
)
def test_where_there_can_be_no_library_the_log_says_why(
    source: str,
    compiler: str,
    said: str,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if compiler:
        monkeypatch.setenv("CC", compiler)
    assert compiled(source, tmp_path) is None
    assert said in caplog.text or "no C compiler" in caplog.text
    assert "torch computes instead" in caplog.text


def test_loading_a_library_leaves_subnormal_numbers_alone(tmp_path: Path, cache: Path) -> None:
    compiled("int f(void) { return 1; }", tmp_path)
    assert np.nextafter(np.float64(0), np.float64(1)) + np.float64(0) > 0
