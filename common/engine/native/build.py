"""C sources, compiled by the system's compiler at first use, cached, and loaded through ctypes.

Owns the flags, the cache of libraries, and their tie to torch's OpenMP runtime: they are linked with none, so their calls (see
`parallel.h`) bind to the one that torch has loaded. Does not know what the sources compute. Where there is no library, the caller
computes with torch.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

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
        return ctypes.CDLL(str(_compiled(source)))
    except (OSError, subprocess.SubprocessError) as error:
        # A symbol of OpenMP that is not found is an OSError as well.
        _log.warning("%s: torch computes instead, which is slower: %s", source.name, _reason(error))
        return None


def _compiled(source: Path) -> Path:
    """The library for this source, the headers here and beside it, the flags, this compiler and this processor."""
    compiler = _compiler()
    texts = [path.read_text() for path in (source, *sorted(HEADERS.glob("*.h")), *sorted(source.parent.glob("*.h")))]
    parts = (*texts, *FLAGS, *compiler, platform.machine(), processor_flags())
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"
    library = folder / f"{source.stem}-{name}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / library.name
        command = [*compiler, *FLAGS, f"-I{HEADERS}", str(source), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_S)
        made.replace(library)  # atomic: two processes may compile at once
    return library


def _compiler() -> list[str]:
    """Its command. Raises FileNotFoundError."""
    asked = shlex.split(os.environ.get("CC", ""))
    found = asked or [path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))][:1]
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
        said = [line for line in error.stderr.splitlines() if "error" in line]
        return f"{error}: {said[0]}" if said else str(error)
    return str(error)
