"""The Triton kernels in Triton's interpreter. `test_kernels` runs this file in a process of its own: Triton reads
TRITON_INTERPRET when it is first imported, and then every kernel of the process is interpreted.

To run one test: TRITON_INTERPRET=1 python -m pytest tests/engine/kernels/interpreted.py -k …
"""

import os
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from engine.gpu import triton_kernels, triton_sampling, triton_source
from engine.gpu.triton_kernels import TritonKernels
from tests.engine.kernels.contract import KernelsContract

assert os.environ.get("TRITON_INTERPRET") == "1", __doc__

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NaN and infinities are meant

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8e4nv": torch.float8_e4m3fn}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def convert(data: np.ndarray, source: object, target: object, rounding: object) -> np.ndarray:
    """Numbers as bits, from one dtype to another, rounded to nearest even as a card does."""
    wanted = TORCH[str(target)]
    numbers = torch.from_numpy(np.ascontiguousarray(data)).view(TORCH[str(source)])
    bits: np.ndarray = numbers.to(wanted).view(BITS[wanted.itemsize]).numpy()
    return bits.view(f"uint{8 * wanted.itemsize}")


@pytest.fixture(autouse=True)
def rounding_as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts bfloat16 off, loses the carry when it rounds to FP8, and multiplies matrices of bfloat16 as if their
    bits were whole numbers."""
    monkeypatch.setattr(interpreter, "_convert_float", convert)
    original = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: object, a: Any, b: Any, *rest: object) -> object:
        return original(self, _widened(a), _widened(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter puts itself in the language's place at each call of a function, which takes half of the time. What the
    kernels' own module sees is in its place when one of them is started."""

    def called(self: interpreter.InterpretedFunction, *args: object, **named: object) -> object:
        if self.fn.__module__ not in (triton_source.__name__, triton_sampling.__name__):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **named)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", called)


@pytest.fixture(autouse=True)
def few_pairs_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take several blocks."""
    monkeypatch.setattr(triton_kernels, "_PAIRS", 64)


def _widened(handle: Any) -> Any:
    if str(handle.dtype.scalar) != "bf16":
        return handle
    wide = convert(handle.data, handle.dtype.scalar, "fp32", None).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


class TestTritonKernels(KernelsContract):
    kernels = TritonKernels()
    sampled = ((3, 50), (1, 2100), (2, 7))
