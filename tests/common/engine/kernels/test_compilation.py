"""The Triton kernels compile for a Hopper card, which needs no card: as they are started for real models.

Owns a stand-in for a kernel that compiles what it is started with, and starts nothing.
"""

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.engine.kernels.port import HeadNorm, PagePlaces, Rotation

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
BF16 = torch.bfloat16


class Compiling:
    """Stands in for a kernel of `triton_source`; keeps the PTX of each start."""

    def __init__(self, kernel: object) -> None:
        self._kernel = kernel
        self.programs: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> "Compiling":
        return self

    def __call__(self, *given: object, **options: int) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature, constants, aligned = {}, {}, {}
        parameters = inspect.signature(self._kernel.fn).parameters.values()  # type: ignore[attr-defined]
        for at, (parameter, value) in enumerate(zip(parameters, given, strict=True)):
            if parameter.annotation is not inspect.Parameter.empty:
                signature[parameter.name], constants[(at,)] = "constexpr", value
                continue
            signature[parameter.name] = (
                TYPES[value.dtype] if isinstance(value, Tensor) else "i32" if isinstance(value, int) else "fp32"
            )
            if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                aligned[(at,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=self._kernel, signature=signature, constexprs=constants, attrs=aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert compiled.asm["cubin"]
        self.programs.append(compiled.asm["ptx"])


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Compiling]:
    pytest.importorskip("triton", reason="needs the package triton, which is there with torch for CUDA")
    from common.engine.kernels import triton_source

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = ["rms_norm", "add_rms_norm", "silu_and_mul", "quantise", "rotate_and_write"]
    names += ["slice_maxima", "slice_samples", "best_of_slices", "page_indices"]
    kernels = {name: Compiling(getattr(triton_source, name)) for name in names}
    for name, kernel in kernels.items():
        monkeypatch.setattr(triton_source, name, kernel)
    return kernels


def test_every_kernel_compiles_for_a_hopper_and_moves_16_bytes_at_a_time(compiled: dict[str, Compiling]) -> None:
    from common.engine.kernels.triton_kernels import TritonKernels

    kernels = TritonKernels()
    x, weight = torch.empty(2, 4096, dtype=BF16), torch.empty(4096, dtype=BF16)
    kernels.rms_norm(x, weight, 1e-6)
    kernels.add_rms_norm(x, x, weight, 1e-6)
    kernels.silu_and_mul(x)
    kernels.quantise(x)
    tokens = torch.zeros(2, dtype=torch.int64)
    heads, angles = torch.empty(2, 48, 128, dtype=BF16), torch.empty(2, 64)
    for norm, page_dtype in ((HeadNorm(weight[:128], weight[:128], 1e-6), BF16), (None, torch.float8_e4m3fn)):
        pages = torch.empty(3, 8, 16, 128, dtype=page_dtype)
        kernels.rotate_and_write(heads, Rotation(angles, angles), norm, PagePlaces(pages, pages, tokens, tokens))
    kernels.sample(torch.empty(2, 151_936), torch.empty(2), tokens, tokens)
    kernels.page_indices(torch.empty(2, 512, dtype=torch.int32), tokens, torch.empty(3, dtype=torch.int32), tokens.int())
    for name, kernel in compiled.items():
        assert kernel.programs, name
        moves = any("ld.global.v4.b32" in program for program in kernel.programs)
        assert moves or name in ("best_of_slices", "page_indices"), name
