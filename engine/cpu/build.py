"""C sources, compiled by the system's compiler at first use, cached, and loaded through ctypes; and the one way to call them.

Owns the flags, the cache of libraries, and their tie to torch's OpenMP runtime: they are linked with none, so their calls (see
`parallel.h`) bind to the one that torch has loaded. Owns the call of a function with one structure, on torch's threads, so that
whoever records a step gets all that it computes in C. Owns as well which compilers FlashInfer and Triton find on this host, and
what to do about one that is missing. Does not know what the sources compute. Where there is no library, the caller computes with
torch.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

CUDA = Path("/usr/local/cuda")


@dataclass(frozen=True, slots=True)
class Lacking:
    """A tool that is not there, and what to do about it."""

    tool: str
    fix: str


NVCC = Lacking("nvcc", "install the CUDA toolkit and set CUDA_HOME to its folder")
NINJA = Lacking("ninja", "pip install ninja")
CXX = Lacking("C++ compiler", "install g++, or name a compiler in CXX")
CC = Lacking("C compiler", "install gcc or clang, or name one in CC")
PYTHON_H = Lacking("Python.h", "install Python's headers, as with apt install python3-dev")


def for_flashinfer() -> tuple[Lacking, ...]:
    """What FlashInfer compiles with and is missing (`flashinfer/jit/cpp_ext.py`, 0.6.4 and 0.7.2). CXX is the beginning of a
    command."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = (Path(home) / "bin" / "nvcc").exists() if home else _there("nvcc") or (CUDA / "bin" / "nvcc").exists()
    cxx = shlex.split(os.environ.get("CXX", "c++"))
    found = ((NVCC, nvcc), (NINJA, _there("ninja")), (CXX, bool(cxx) and _there(cxx[0])))
    return tuple(lacking for lacking, is_there in found if not is_there)


def for_triton() -> tuple[Lacking, ...]:
    """What Triton compiles with and is missing (`triton/runtime/build.py`, 3.8). It does not look for `cc`; CC is the name of a
    program."""
    headers, cc = Path(sysconfig.get_paths(scheme="posix_prefix")["include"]), os.environ.get("CC")
    has_cc = _there("gcc") or _there("clang") if cc is None else _there(cc)
    found = ((CC, has_cc), (PYTHON_H, (headers / "Python.h").exists()))
    return tuple(lacking for lacking, is_there in found if not is_there)


def none_of(lacking: Sequence[Lacking]) -> str:
    """As "no nvcc and no ninja"."""
    return " and ".join(f"no {each.tool}" for each in lacking)


def fixes(lacking: Sequence[Lacking]) -> str:
    return "; ".join(each.fix for each in lacking)


def _there(program: str) -> bool:
    return shutil.which(program) is not None


HEADERS = Path(__file__).parent
FLAGS = (
    *("-std=gnu11", "-O3", "-shared", "-fPIC"),
    "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native",
    # These let the compiler vectorise sums. Not -ffast-math: a library linked with it turns off subnormal numbers in the process.
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-freciprocal-math"),
)
COMPILE_S = 60.0

_log = logging.getLogger(__name__)


def load(source: Path) -> ctypes.CDLL | None:
    """The library of one C file, compiled now unless it is cached. Returns None, and logs why, where there can be none.

    Import torch before: the library may need its threads."""
    try:
        compiler = _compiler()
        name = _name(source, compiler)
        cached = _cached(name)
        if cached is not None:
            try:
                return ctypes.CDLL(str(cached))
            except OSError as error:
                _log.warning("%s cannot be loaded, and is compiled again: %s", cached, error)
                cached.unlink()
        return ctypes.CDLL(str(_made(source, compiler, name)))
    except (OSError, subprocess.SubprocessError) as error:
        # A symbol of OpenMP that is not found is an OSError as well.
        _log.warning("%s is not used, and what it is for is slower without: %s", source.name, _reason(error))
        return None


def _name(source: Path, compiler: list[str]) -> str:
    """Tells apart this source, the headers here and beside it, the flags, this compiler and this processor."""
    paths = (source, *sorted(HEADERS.glob("*.h")), *sorted(source.parent.glob("*.h")))
    parts = (*(path.read_text("utf-8") for path in paths), *FLAGS, *compiler, platform.machine(), processor_flags())
    return f"{source.stem}-{_digest(chr(0).join(parts).encode())}"


def _cached(name: str) -> Path | None:
    """The library in a folder of the cache. Its own digest stands in the file's name: a file that a crash cut short would end the
    process when it is loaded, so it is removed."""
    folders = [_temporary_folder()] if _is_private(_temporary_folder()) else []
    with contextlib.suppress(RuntimeError):
        folders.insert(0, _user_cache())
    for library in (path for folder in folders for path in folder.glob(f"{name}-*.so")):
        with contextlib.suppress(OSError):
            if library.stem == f"{name}-{_digest(library.read_bytes())}":
                return library
            _log.warning("%s is damaged, and is compiled again", library)
            library.unlink()
    return None


def _made(source: Path, compiler: list[str], name: str) -> Path:
    """Compiles, unless another process does so at the moment: then it waits for that one's library."""
    folder = _writable_folder()
    with _locked(folder / f"{name}.lock"), tempfile.TemporaryDirectory(dir=folder) as scratch:
        cached = _cached(name)
        if cached is not None:
            return cached
        _log.info("compiling %s into %s, which may take half a minute", source.name, folder)
        made = Path(scratch) / "made.so"
        command = [*compiler, *FLAGS, f"-I{HEADERS}", str(source), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, encoding="utf-8", errors="replace", timeout=COMPILE_S)
        library = folder / f"{name}-{_digest(made.read_bytes())}.so"
        with made.open("rb") as written:
            os.fsync(written.fileno())
        made.replace(library)
    return library


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock. It goes on without after the longest compilation: two that compile at once do no harm."""
    deadline, waits = time.monotonic() + COMPILE_S, False
    with path.open("w") as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waits:
                    _log.info("waiting for another process that is compiling %s", path.stem)
                waits = True
                time.sleep(0.05)
        yield


def _writable_folder() -> Path:
    """The user's cache, or a folder among the temporary files. Raises OSError, which says why neither can be used."""
    try:
        cache = _user_cache()
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return cache
    except (OSError, RuntimeError) as error:
        temporary = _temporary_folder()
        with contextlib.suppress(FileExistsError):
            temporary.mkdir(mode=0o700)
        if not _is_private(temporary):
            raise PermissionError(f"{error}; and {temporary} is not a folder of this user alone") from error
        _log.warning("compiled C is kept in %s, which may not stay: %s", temporary, error)
        return temporary


def _user_cache() -> Path:
    """Raises RuntimeError where there is neither HOME nor an entry for the user on this host."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"tandem-{os.geteuid()}"


def _is_private(folder: Path) -> bool:
    """What lies in the folder runs in this process, so nobody else may be able to write there."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:20]


def _compiler() -> list[str]:
    """Its command. Raises OSError."""
    asked = os.environ.get("CC", "")
    try:
        words = shlex.split(asked)
    except ValueError as error:
        raise OSError(f"CC is {asked!r}, which is no command: {error}") from error
    found = words or [path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))][:1]
    if not found:
        raise FileNotFoundError("there is no C compiler; install gcc or clang, or name one in CC")
    return found


def processor_flags() -> str:
    """What the processor can do, on which -march=native depends, in one line; empty where the system does not say."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        said = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines()
        return f"{error}: {said[0]}" if said else str(error)
    return str(error)


class CallListener(Protocol):
    """Gets the calls of one thread in place of the functions."""

    def called(self, address: int, call: ctypes.Structure) -> None:
        """address: of the function. call: its argument; the memory that this points to may be gone later."""


class _Listening(threading.local):
    to: CallListener | None = None


LISTENING = _Listening()
"""What listens to the calls of this thread, if anything does."""


class NativeFunction:
    """`void name(const call *, int threads)` of a library. pointers, counts, floats, ints: the names of the structure's fields,
    in this order; the C source says what each is."""

    def __init__(
        self, library: ctypes.CDLL, name: str, pointers: str, counts: str = "", floats: str = "", ints: str = ""
    ) -> None:
        function = library[name]  # by index: each time a function of its own
        self._function = function
        self._address = ctypes.cast(function, ctypes.c_void_p).value or 0
        kinds = (
            (ctypes.c_void_p, pointers), (ctypes.c_int64, counts), (ctypes.c_float, floats), (ctypes.c_int, ints)
        )  # fmt: skip
        fields = [(field, kind) for kind, names in kinds for field in names.split()]
        self._structure: Any = type(name, (ctypes.Structure,), {"_fields_": fields})
        function.argtypes, function.restype = [ctypes.POINTER(self._structure), ctypes.c_int], None

    def __call__(self, *values: Tensor | float | None) -> None:
        """values: of all fields. A plain tensor stands for its address, and None for no address."""
        call = self._structure(*[value.data_ptr() if type(value) is Tensor else value for value in values])
        listener = LISTENING.to
        if listener is not None:
            listener.called(self._address, call)
            return
        # Asked at each call: torch's number follows the cores that other instances lend, and the runtime has one pool for both.
        self._function(call, torch.get_num_threads())
