"""What can be told of a model and its flags before anything is started: whether it is there, and what its config rules out.

Owns which questions come first. Reads config.json only, and imports nothing heavy: a wrong flag costs neither the start of a
process nor a word from each of them. A name of Hugging Face is left to those who download it.
"""

from common.config import EngineConfig, ModelConfig
from common.errors import ConfigError
from common.model_path import model_folder
from engine.models.shape import DEFAULTS, check_ranks, read_architecture, read_shape, refuse_ranks


def check_model(model: ModelConfig, engine: EngineConfig, ranks: int, *, on_cpu: bool) -> None:
    """ranks: of one instance. Raises ConfigError."""
    folder = model_folder(model.model)
    if engine.executor != "torch":
        return
    if engine.quantization == "fp8" and on_cpu:
        raise ConfigError("--quantization fp8 needs a GPU that computes in FP8, and this runs on CPU: give --quantization int8")
    if folder is None:
        return
    architecture = read_architecture(folder)
    if architecture in DEFAULTS:
        check_ranks(read_shape(folder), ranks, engine.quantization)
    elif ranks > 1:
        refuse_ranks(architecture, ranks)
