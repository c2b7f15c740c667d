"""The compilers that FlashInfer and Triton start on this host: which of them lack, and what to do for it.

Owns where those libraries look for them. Starts none. What our own C is compiled with is in `native/build.py`.
"""

import os
import shlex
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CUDA = Path("/usr/local/cuda")


@dataclass(frozen=True, slots=True)
class Lacking:
    """tool: what is not there. fix: what to do for it."""

    tool: str
    fix: str


NVCC = Lacking("nvcc", "install the CUDA toolkit and set CUDA_HOME to its folder")
NINJA = Lacking("ninja", "pip install ninja")
CXX = Lacking("C++ compiler", "install g++, or name a compiler in CXX")
CC = Lacking("C compiler", "install gcc or clang, or name one in CC")
PYTHON_H = Lacking("Python.h", "install Python's headers, as with apt install python3-dev")


def for_flashinfer() -> tuple[Lacking, ...]:
    """Of what FlashInfer compiles with (`flashinfer/jit/cpp_ext.py`, 0.6.4 and 0.7.2). CXX is the beginning of a command."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = (Path(home) / "bin" / "nvcc").exists() if home else _there("nvcc") or (CUDA / "bin" / "nvcc").exists()
    cxx = shlex.split(os.environ.get("CXX", "c++"))
    found = ((NVCC, nvcc), (NINJA, _there("ninja")), (CXX, bool(cxx) and _there(cxx[0])))
    return tuple(lacking for lacking, is_there in found if not is_there)


def for_triton() -> tuple[Lacking, ...]:
    """Of what Triton compiles with (`triton/runtime/build.py`, 3.8). It does not look for `cc`; CC is the name of a program."""
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
