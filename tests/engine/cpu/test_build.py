"""C sources become libraries that work on torch's own threads, once for each source; without a compiler it is said why."""

import ctypes
import logging
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import replay
from engine.cpu import attention, kernels, products
from engine.cpu.build import load

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
    (made,) = cache.glob("*.so")
    was = made.stat().st_mtime_ns
    same = compiled("int answer(void) { return 1; }", tmp_path)
    assert same is not None and same.answer() == 1 and made.stat().st_mtime_ns == was
    changed = compiled("int answer(void) { return 2; }", tmp_path)
    assert changed is not None and changed.answer() == 2 and len(list(cache.glob("*.so"))) == 2


@pytest.mark.parametrize(
    ("source", "compiler", "said"),
    [
        ("int f(void) { return 1; }", "/no/such/cc", "/no/such/cc"),
        ("int f(void) { return 1; }", 'gcc "-O2', "No closing quotation"),
        ("int f(void) { return 1; }", r"sh -c 'printf \\351chec >&2; exit 1'", "chec"),
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
    assert "slower without" in caplog.text


def test_a_cached_library_that_is_cut_short_or_overwritten_is_compiled_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a cache elsewhere: loading a path a second time would find it in memory."""
    elsewhere, sound, sources = tmp_path / "elsewhere" / "tandem", dict[str, bytes](), list[Path]()
    elsewhere.mkdir(parents=True, mode=0o700)
    for number, kept in enumerate((0.0, 0.1, 0.7, 1.0)):
        sources.append(tmp_path / f"made-{number}.c")
        sources[-1].write_text(f"const char text[200000] = {{{number}}}; int answer(void) {{ return text[0] + 1; }}")
        if load(sources[-1]) is None:
            pytest.skip("there is no C compiler")
        (name,) = {path.name for path in cache.glob("*.so")} - sound.keys()
        sound[name] = whole = (cache / name).read_bytes()
        (elsewhere / name).write_bytes(whole[: int(kept * len(whole))] if kept < 1 else bytes(len(whole)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere.parent))
    again = [load(source) for source in sources]
    assert [library and library.answer() for library in again] == [1, 2, 3, 4]
    assert caplog.text.count("compiled again") == 4
    assert {path.name: path.read_bytes() for path in elsewhere.glob("*.so")} == sound


def test_a_sound_file_that_cannot_be_loaded_is_compiled_once_more(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, loaded = ctypes.CDLL, list[str]()

    def second(path: str) -> ctypes.CDLL:
        loaded.append(path)
        if len(loaded) == 2:
            raise OSError("made for another system")
        return real(path)

    monkeypatch.setattr(ctypes, "CDLL", second)
    if compiled("int answer(void) { return 4; }", tmp_path) is None:
        pytest.skip("there is no C compiler")
    again = compiled("int answer(void) { return 4; }", tmp_path)
    assert again is not None and again.answer() == 4 and len(loaded) == 3


def test_two_that_start_at_once_compile_once_and_say_so(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, log = shutil.which("cc") or shutil.which("gcc"), tmp_path / "compilations"
    if real is None:
        pytest.skip("there is no C compiler")
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\necho one >> {log}\nsleep 0.2\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    caplog.set_level(logging.INFO)
    source = tmp_path / "made.c"
    source.write_text("int answer(void) { return 3; }")
    with ThreadPoolExecutor(2) as pool:
        made = [library and library.answer() for library in pool.map(load, [source, source])]
    assert made == [3, 3] and log.read_text() == "one\n"
    assert "compiling made.c" in caplog.text and "waiting for another process" in caplog.text


@pytest.mark.parametrize("cache_is", ["unknown", "no folder"])
def test_without_a_cache_that_can_be_written_libraries_are_kept_in_a_private_temporary_folder(
    cache_is: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "home", homeless)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", "" if cache_is == "unknown" else str(tmp_path / "file"))
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("there is no C compiler")
    assert compiled("int answer(void) { return 5; }", tmp_path) is not None
    folder = tmp_path / f"tandem-{os.geteuid()}"
    assert "which may not stay" in caplog.text and len(list(folder.glob("*.so"))) == 1 and folder.stat().st_mode & 0o77 == 0
    folder.chmod(0o777)
    assert compiled("int answer(void) { return 5; }", tmp_path) is None
    assert "not a folder of this user alone" in caplog.text


def test_loading_a_library_leaves_subnormal_numbers_alone(tmp_path: Path, cache: Path) -> None:
    compiled("int f(void) { return 1; }", tmp_path)
    assert np.nextafter(np.float64(0), np.float64(1)) + np.float64(0) > 0


def test_every_source_of_the_engine_is_there() -> None:
    """Where one is missing, torch computes instead, and tests that need C are skipped."""
    sources = (attention.SOURCE, kernels.SOURCE, products.PANEL_SOURCE, products.INT8_SOURCE, replay.SOURCE)
    assert [source.name for source in sources if not source.exists()] == []
