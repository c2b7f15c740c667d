"""The Triton kernels compile for a Hopper card, and with --soak for others, which needs no card: as they are started for real
models.

Owns a stand-in for a kernel that compiles what it is started with, and starts nothing.
"""

import inspect
import re
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
import torch
from torch import Tensor

from engine.ports import AdaptedTokens, HeadNorm, LowRankStack, PagePlaces, Rotation, RowSampling

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
BF16 = torch.bfloat16
MOST_REGISTERS = 64
"""Each thread takes at most so many, so that a multiprocessor holds 1,024 of them."""


class Compiling:
    """Stands in for a kernel of `triton_source`; keeps the PTX of each start, and the most that one takes: registers and bytes of
    stack of a thread, and bytes of shared memory. capability: of the card, 90 for 9.0."""

    def __init__(self, kernel: object, capability: int) -> None:
        self._kernel, self._capability = kernel, capability
        self.programs: list[str] = []
        self.registers = self.stack_bytes = self.shared_bytes = 0

    def __getitem__(self, grid: tuple[int, ...]) -> "Compiling":
        return self

    def __call__(self, *given: object, **options: int) -> None:
        import triton
        from triton.backends import nvidia
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
        compiled = triton.compile(source, target=GPUTarget("cuda", self._capability, 32), options=options)
        self.programs.append(compiled.asm["ptx"])
        self.shared_bytes = max(self.shared_bytes, compiled.metadata.shared)
        with NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            cuobjdump = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
            told = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        used = re.search(r"REG:(\d+) STACK:(\d+)", told)
        assert used is not None, told
        self.registers, self.stack_bytes = max(self.registers, int(used[1])), max(self.stack_bytes, int(used[2]))


@pytest.fixture(params=[90, *(pytest.param(each, marks=pytest.mark.soak) for each in (80, 89, 100, 120))])
def capability(request: pytest.FixtureRequest) -> int:
    """The compute capability of Hopper; with --soak, of Ampere, Ada and two kinds of Blackwell."""
    assert isinstance(request.param, int)
    return request.param


@pytest.fixture
def compiled(capability: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Compiling]:
    """Each is compiled once for its source: Triton keeps what it has compiled in a cache of the user's."""
    pytest.importorskip("triton", reason="needs the package triton, which is there with torch for CUDA")
    from engine.gpu import triton_source

    names = ["decode_inputs", "rotation", "rms_norm", "add_rms_norm", "silu_and_mul", "quantise", "rotate_and_write"]
    names += ["route", "sort_pairs", "combine", "page_indices", "shrink", "expand"]
    names += ["slice_maxima", "slice_sums", "last_places", "slice_samples", "best_of_slices"]
    kernels = {name: Compiling(getattr(triton_source, name), capability) for name in names}
    for name, kernel in kernels.items():
        monkeypatch.setattr(triton_source, name, kernel)
    return kernels


def test_every_kernel_compiles_spills_nothing_and_moves_16_bytes_at_a_time(
    compiled: dict[str, Compiling], capability: int
) -> None:
    """Those for FP8 do not compile for cards before 8.9: it is refused there."""
    from engine.gpu.triton_kernels import TritonKernels

    kernels = TritonKernels()
    x, weight = torch.empty(2, 4096, dtype=BF16), torch.empty(4096, dtype=BF16)
    kernels.rms_norm(x, weight, 1e-6)
    kernels.rms_norm(x, weight, 1e-6, x)
    kernels.silu_and_mul(x)
    tokens = torch.zeros(2, dtype=torch.int64)
    kernels.decode_inputs(tokens, tokens, tokens, torch.empty(3, 512, dtype=torch.int32), 16, 2)
    kernels.rotation(tokens, torch.empty(64), 1.0)
    routing = kernels.route(x[:, :128], 8, range(128), normalised=True)
    kernels.combine(x, routing)
    heads, angles = torch.empty(2, 48, 128, dtype=BF16), torch.empty(2, 64)
    places = [
        PagePlaces(pages, pages, tokens, tokens)
        for pages in (torch.empty(3, 8, 16, 128, dtype=dtype) for dtype in (BF16, torch.float8_e4m3fn))
    ]
    kernels.rotate_and_write(heads, Rotation(angles, angles), HeadNorm(weight[:128], weight[:128], 1e-6), places[0])
    wide = torch.empty(2, 2 * 28672, dtype=BF16)
    in_fp8 = (
        lambda: kernels.quantise(x),
        lambda: kernels.rms_norm_fp8(x, weight, 1e-6),
        lambda: kernels.rms_norm_fp8(x, weight, 1e-6, x),
        lambda: kernels.silu_and_mul_fp8(wide),
        lambda: kernels.rotate_and_write(heads, Rotation(angles, angles), None, places[1]),
    )
    for start in in_fp8:
        if capability >= 89:
            start()
            continue
        with pytest.raises(Exception, match="fp8e4nv not supported in this architecture"):
            start()
    share = torch.empty(2)
    kernels.sample(torch.empty(2, 151_936, dtype=BF16), RowSampling(share, tokens, share, share, tokens, tokens))
    kernels.page_indices(torch.empty(2, 512, dtype=torch.int32), tokens, torch.empty(3, dtype=torch.int32), tokens.int())
    adapted = AdaptedTokens(tokens, tokens, tokens, tokens, tokens)
    stack = LowRankStack(x.new_empty(4, 3, 64, 4096), x.new_empty(4, 64, 6144), tokens, (4096, 5120, 6144), tokens)
    kernels.add_low_rank(x.new_empty(2, 6144), x, stack, adapted)
    # A thread of last_places moves 8 bytes: with 16 it would take 100 registers.
    few_bytes = ("decode_inputs", "rotation", "route", "sort_pairs", "best_of_slices", "page_indices", "last_places")
    for name, kernel in compiled.items():
        assert kernel.programs or (name == "quantise" and capability < 89), name
        if not kernel.programs:
            continue
        assert kernel.registers <= MOST_REGISTERS and kernel.stack_bytes == 0, name
        moves = any("ld.global.v4.b32" in program or "cp.async.cg" in program for program in kernel.programs)
        assert moves or name in few_bytes, name
    for name in ("slice_sums", "last_places", "slice_samples"):
        assert not any("fma." in program for program in compiled[name].programs), "each operation is rounded"
