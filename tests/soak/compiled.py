"""FlashInfer's real modules and the Triton kernels compiled for several cards without one, and FlashInfer's run over a stand-in
for CUDA's runtime: `python -m tests.soak.compiled [--cards 8.0 9.0a] [--write]`, a part of `./check --long`.

Owns the compiler, which it installs from pip into a folder of its own; the table of registers, stack and shared memory that a
change must not worsen; and the stand-in (`cudart.c`), which writes down what is started and runs nothing. Where the compiler
cannot be had, it says so and proves nothing.
"""

import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from engine.gpu import flashinfer as backend
from engine.gpu.flashinfer import AttentionNeeds, FlashInferAttention, PrefillKernels
from engine.kv_memory import KVMemory
from engine.ports import LayerAttention, Segment, StepTokens
from engine.torch_kernels import Kernels
from tests.engine.attention.steps import Shape
from tests.engine.kernels import test_compilation
from tests.rig.report import say

CARDS = ("8.0", "8.9", "9.0a", "10.0a")
PACKAGES = (
    *(f"nvidia-cuda-{name}==13.0.*" for name in ("nvcc", "crt", "runtime", "cccl")),
    *("nvidia-nvvm==13.0.*", "nvidia-curand==10.4.0.*"),
)
TABLE = Path(__file__).with_name("compiled.json")
BF16 = torch.bfloat16
NOT_SERVED = re.compile(r"ragged|mask_[23]")
"""Sources of FlashInfer that we never run: queries without pages, and masks of one's own."""
LINKED = "-Wl,-z,lazy"
"""What is missing for that fails only when it is called."""
Table = dict[str, dict[str, list[int]]]
"""What a kernel takes, by what it was compiled in and for, and by its name: registers, bytes of stack, bytes of shared memory. Of
several variants of a kernel, the most."""


class CannotCompile(Exception):
    """There is no compiler here, and none can be installed."""


def installed(folder: Path) -> Path:
    """Where the compiler is, installed into this folder if it is not yet. Raises CannotCompile."""
    home = folder / "nvidia" / "cu13"
    if not (home / "lib" / "stubs").is_dir():
        say(f"installing nvcc into {folder}")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(folder), *PACKAGES]
        if shutil.which("c++") is None or shutil.which("ninja") is None:
            raise CannotCompile("there is no C++ compiler, or no ninja")
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
        if done.returncode:
            raise CannotCompile(f"pip cannot install nvcc: {done.stderr.strip().splitlines()[-1:]}")
        for link, target in ((home / "lib64", "lib"), (home / "lib" / "libcudart.so", "libcudart.so.13")):
            link.unlink(missing_ok=True)
            link.symlink_to(target)
        made = home / "lib" / "stubs.part"
        made.mkdir(exist_ok=True)
        _library("int cuInit(unsigned flags) { return 0; }", made / "libcuda.so", "-Wl,-soname,libcuda.so.1")
        made.rename(home / "lib" / "stubs")  # last: it says that all is there
    return home


def _library(source: str, library: Path, *options: str) -> None:
    command = ["cc", "-x", "c", "-O1", "-w", "-shared", "-fPIC", *options, "-o", str(library), "-"]
    subprocess.run(command, input=source, text=True, check=True, timeout=120)


def stub_in(folder: Path) -> Path:
    """The stand-in for CUDA's runtime, compiled into this folder."""
    library, versions = folder / "libcudart.so.13", folder / "versions"
    versions.write_text("libcudart.so.13 { global: *; };\n")
    source = Path(__file__).with_name("cudart.c").read_text()
    _library(source, library, f"-Wl,-soname,libcudart.so.13,--version-script={versions}")
    return library


def environment(home: Path, folder: Path, card: str) -> dict[str, str]:
    """The variables of a process in which FlashInfer compiles for a card. It reads them when it is imported."""
    ours = {"CUDA_HOME": str(home), "FLASHINFER_CUDA_ARCH_LIST": card, "FLASHINFER_WORKSPACE_BASE": str(folder)}
    paths = [str(home / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {**os.environ, **ours, "PATH": os.pathsep.join(paths), "PYTHONPATH": os.getcwd()}


# --- in a process for each card ----------------------------------------------------------------------------------------------


def without_what_is_not_served() -> None:
    """FlashInfer compiles only what we run, for the rest of this process."""
    from flashinfer.jit.attention import modules

    whole: Callable[..., Any] = modules.gen_jit_spec

    def served(name: str, sources: Iterable[Path], **named: Any) -> Any:
        kept = [source for source in sources if not NOT_SERVED.search(source.name)]
        return whole(name, kept, **{**named, "extra_ldflags": [*(named.get("extra_ldflags") or []), LINKED]})

    modules.gen_jit_spec = served


def build(card: str) -> None:
    """Compile the modules of attention for a card, and print where each is."""
    from flashinfer.jit.attention.modules import gen_batch_decode_module, gen_batch_prefill_module

    without_what_is_not_served()
    pairs = [(BF16, BF16)] if card == "8.0" else [(BF16, BF16), (BF16, torch.float8_e4m3fn)]
    for kv in (kv for _, kv in pairs):
        dtypes = (BF16, kv, BF16, torch.int32, 128, 128, 0, False, False)
        kinds: dict[str, Any] = {"fa2": lambda dtypes=dtypes: gen_batch_prefill_module("fa2", *dtypes, False)}
        if kv == BF16:
            kinds["decode"] = lambda dtypes=dtypes: gen_batch_decode_module(*dtypes)
            if card == "9.0a":
                kinds["fa3"] = lambda dtypes=dtypes: gen_batch_prefill_module("fa3", *dtypes, False)
        for kind, make in sorted(kinds.items()):
            spec = make()
            spec.build(False)
            say(f"built {kind}{'' if kv == BF16 else ' over fp8 pages'}\t{spec.get_library_path()}")


class Stub:
    """The stand-in for CUDA's runtime, loaded before any module that needs one."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        self._library.stub_take.restype = ctypes.c_char_p
        self.started: set[str] = set()
        """The mangled names of all kernels that were ever started."""

    def set_occupancy(self, blocks: int) -> None:
        """How many blocks of any kernel fit on a multiprocessor."""
        self._library.stub_set_occupancy(blocks)

    def take(self, *rooms: torch.Tensor) -> list[str]:
        """What was started since it was last asked: grid, block, dynamic shared memory and kernel. Every copy was into one of
        these tensors."""
        lines = self._library.stub_take().decode().splitlines()
        assert not [line for line in lines if line.startswith("refused")], lines
        for line in lines:
            if line.startswith("copy "):
                begin, size = map(int, line.split()[1:])
                inside = (room.data_ptr() <= begin and begin + size <= room.data_ptr() + room.nbytes for room in rooms)
                assert any(inside), f"{size} bytes are copied beyond the workspaces"
        launches = [line for line in lines if line.startswith("launch ")]
        self.started |= {line.split()[-1] for line in launches}
        return launches


ROWS, CONTEXT, PAGE = 256, 8192, 16
GRAPH_SIZES = (1, 2, 4, 8, 32, 100, ROWS)
HEADS = {"Llama-3-8B": (32, 8), "Qwen3-0.6B": (16, 8), "Llama-3-70B by 8 ranks": (8, 1)}
LAYERS = (LayerAttention(128**-0.5),)


class Proof:
    """`FlashInferAttention` over FlashInfer's own wrappers and compiled modules, which start kernels of the stand-in."""

    def __init__(self, stub: Stub, heads: tuple[int, int], prefill: PrefillKernels) -> None:
        import flashinfer

        query_heads, kv_heads = heads
        self.stub, self.query_heads = stub, query_heads
        self.memory: KVMemory = Shape(query_heads, kv_heads, 128, PAGE, LAYERS, BF16, "bfloat16").memory(64)
        needs = AttentionNeeds(self.memory, query_heads, LAYERS, BF16, ROWS, CONTEXT // PAGE, prefill)
        self.attention = FlashInferAttention(needs, Kernels(), flashinfer)
        self.table = torch.zeros(ROWS + 1, CONTEXT // PAGE, dtype=torch.int32)
        self.random = np.random.default_rng(7)
        stub.take()

    def eager(self, chunks: list[tuple[int, int]], decode: int) -> list[str]:
        """chunks: start and tokens of each."""
        ends = np.cumsum([0, *(tokens for _, tokens in chunks)]).tolist()
        segments = [Segment(ends[row], ends[row + 1], start, start + tokens, row) for row, (start, tokens) in enumerate(chunks)]
        lengths = self.random.integers(1, CONTEXT + 1, decode)
        rows = torch.arange(decode)
        self.attention.plan(StepTokens(segments, self.table, rows, torch.from_numpy(lengths), lengths))
        self.attention.run(0, torch.zeros(ends[-1] + decode, self.query_heads, 128, dtype=BF16))
        wrappers = [*(kind[LAYERS[0]] for kind in self.attention._prefills.values()), self.attention._decode[LAYERS[0]]]
        return self.stub.take(*(wrapper._int_workspace_buffer for wrapper in wrappers))

    def graphs(self, size: int) -> list[list[str]]:
        """What a graph of so many rows starts, for rows of different lengths. The first plan is FlashInfer's slow one."""
        graph = self.attention.for_graph(size)
        query, found = torch.zeros(size, self.query_heads, 128, dtype=BF16), []
        for most in (1, 1, 17, 300, CONTEXT, CONTEXT):
            lengths = self.random.integers(1, most + 1, size)
            graph.plan(StepTokens((), self.table, torch.arange(size), torch.zeros(0, dtype=torch.int64), lengths))
            graph.run(0, query)
            buffers = self.attention._graph_buffers
            assert buffers is not None
            found.append(self.stub.take(buffers.schedules[LAYERS[0]]))
        return found


def prove(library: Path) -> None:
    """Raises AssertionError for what a graph must not do. Prints what was proven."""
    stub = Stub(library)
    without_what_is_not_served()
    empty: Callable[..., torch.Tensor] = torch.empty

    def pageable(*size: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        return empty(*size, **named)

    with (
        mock.patch.object(torch, "empty", pageable),
        mock.patch.object(torch.cuda, "device", lambda device: nullcontext()),
        mock.patch.object(backend, "_multiprocessors", lambda device: 132),
        mock.patch("flashinfer.decode.device_support_pdl", lambda device: True),
        mock.patch("flashinfer.prefill.device_support_pdl", lambda device: True),
    ):
        for name, heads in HEADS.items():
            plans = kernels = 0
            for occupancy in (1, 2, 4, 8):
                stub.set_occupancy(occupancy)
                proof = Proof(stub, heads, "fa3")
                of_sizes = {size: proof.graphs(size) for size in GRAPH_SIZES}
                for size, found in of_sizes.items():
                    assert found[0] and all(each == found[0] for each in found), f"{name}: a graph of {size} rows changes"
                    plans += len(found)
                    kernels = max(kernels, len(found[0]))
                assert of_sizes[1][0] != of_sizes[ROWS][0], "what is compared depends on the plan"
                by_fa3, by_fa2 = proof.eager([(0, 2000), (500, 1500), (0, 1)], 0), proof.eager([(8000, 100)], 0)
                assert by_fa3 and by_fa2 and not {each.split()[-1] for each in by_fa3} & {each.split()[-1] for each in by_fa2}
                assert len({str(proof.eager([], rows)) for rows in (1, 3, ROWS)}) == 3
                assert len(proof.eager([(0, 100), (8000, 100)], 7)) > len(by_fa2)
            say(f"{name}: {plans} plans of graphs of {GRAPH_SIZES} rows start the same kernels, at most {kernels} a layer")
    say(*(f"started {name}" for name in sorted(stub.started)))


# --- the table ---------------------------------------------------------------------------------------------------------------


def resources(library: Path) -> dict[str, list[int]]:
    """What each kernel of a compiled module takes, as in `Table`, by its mangled name."""
    from triton.backends import nvidia

    cuobjdump = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
    told = subprocess.run([cuobjdump, "-res-usage", library], capture_output=True, text=True, check=True).stdout
    found: dict[str, list[int]] = {}
    for name, usage in re.findall(r"Function (\S+):\n\s*(REG:.+)", told):
        numbers = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", usage)}
        found[name] = [numbers[key] for key in ("REG", "STACK", "SHARED")]
    assert found, told
    return found


def by_name(kernels: dict[str, list[int]]) -> dict[str, list[int]]:
    """The most that the variants of each kernel take. kernels: by their mangled names."""
    told = subprocess.run(["c++filt"], input="\n".join(kernels), capture_output=True, text=True, check=True).stdout
    found: dict[str, list[int]] = {}
    for name, takes in zip(told.splitlines(), kernels.values(), strict=True):
        (short,) = re.findall(r"(\w+)<", name)[:1] or [name]
        found[short] = [max(pair) for pair in zip(found.get(short, takes), takes, strict=True)]
    return found


def triton_resources(capability: int) -> dict[str, list[int]]:
    """The same of our own kernels, as `test_compilation` starts them."""
    from triton.runtime.jit import JITFunction

    from engine.gpu import triton_source

    with pytest.MonkeyPatch.context() as patch:
        kernels = {
            name: test_compilation.Compiling(kernel, capability)
            for name, kernel in vars(triton_source).items()
            if isinstance(kernel, JITFunction) and not name.startswith("_")
        }
        for name, kernel in kernels.items():
            patch.setattr(triton_source, name, kernel)
        test_compilation.test_every_kernel_compiles_spills_nothing_and_moves_16_bytes_at_a_time(kernels, capability)
    return {
        name: [kernel.registers, kernel.stack_bytes, kernel.shared_bytes] for name, kernel in kernels.items() if kernel.programs
    }


def worsened(table: Table, found: Table) -> list[str]:
    """One line for each kernel that takes more than the table says, or is new in a module that is there."""
    faults = []
    for where, kernels in ((where, kernels) for where, kernels in found.items() if where in table):
        for name, takes in kernels.items():
            allowed = table[where].get(name)
            if allowed is None or any(now > before for now, before in zip(takes, allowed, strict=True)):
                faults.append(f"{where}: {name} takes {takes} (registers, stack, shared bytes), and the table says {allowed}")
    return faults


def written(table: Table) -> str:
    """A line for each kernel."""
    text = json.dumps(table, indent=1, sort_keys=True)
    return re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", text) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cards", nargs="+", default=CARDS, choices=CARDS, help="compute capabilities")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "tandem-nvcc", help="for what is built")
    parser.add_argument("--ours", action="store_true", help="the Triton kernels alone: a minute, without nvcc")
    parser.add_argument("--write", action="store_true", help="write the table anew, of these cards")
    parser.add_argument("--build", help=argparse.SUPPRESS)
    parser.add_argument("--prove", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.build:
        build(asked.build)
        return 0
    if asked.prove:
        prove(asked.prove)
        return 0
    os.environ["TRITON_CACHE_DIR"] = str(asked.folder / "triton")
    found = {f"Triton for {card}": triton_resources(int(card.rstrip("a").replace(".", ""))) for card in asked.cards}
    try:
        found |= {} if asked.ours else compiled(installed(asked.folder), asked.folder, asked.cards)
    except CannotCompile as error:
        say(f"nothing is proven of FlashInfer's modules, because {error}")
    table: Table = json.loads(TABLE.read_text())
    if asked.write:
        TABLE.write_text(written(table | found))
    elif missing := found.keys() - table.keys():
        say(f"not in {TABLE.name}, where --write puts it: {', '.join(sorted(missing))}")
    faults = [] if asked.write else worsened(table, found)
    say("\n".join(faults) or f"{sum(map(len, found.values()))} kernels take no more than the table says")
    return 1 if faults else 0


def compiled(home: Path, folder: Path, cards: Iterable[str]) -> Table:
    """Compile FlashInfer's modules for these cards, and run what is compiled for Hopper."""
    found: Table = {}
    for card in cards:
        again = [sys.executable, "-m", "tests.soak.compiled"]
        built = subprocess.run(
            [*again, "--build", card], env=environment(home, folder, card), stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        libraries = re.findall(r"built (.+)\t(.+)", built)
        of_kinds = {kind: resources(Path(library)) for kind, library in libraries}
        found |= {f"FlashInfer's {kind} for {card}": by_name(kernels) for kind, kernels in of_kinds.items()}
        say(f"compiled for {card}: {', '.join(kind for kind, _ in libraries)}")
        if card == "9.0a":
            (folder / "stub").mkdir(exist_ok=True)
            proving = [*again, "--prove", str(stub_in(folder / "stub"))]
            told = subprocess.run(
                proving, env=environment(home, folder, card), stdout=subprocess.PIPE, text=True, check=True
            ).stdout
            say(*(line for line in told.splitlines() if not line.startswith("started ")))
            started = set(re.findall(r"^started (\S+)$", told, re.MULTILINE))
            every = {name: takes for kernels in of_kinds.values() for name, takes in kernels.items()}
            found[f"started for {card}"] = by_name({name: every[name] for name in started})
    return found


if __name__ == "__main__":
    sys.exit(main())
