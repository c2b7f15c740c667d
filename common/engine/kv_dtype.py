"""The data type of KV pages: what `--kv-dtype` means.

Owns that choice. Imports no torch. Which backends of attention read such pages is in `common/engine/attention/choice.py`.
"""

from typing import assert_never

from common.config import EngineConfig
from common.errors import ConfigError
from common.pages.layout import KVDtype


def kv_dtype_of(engine: EngineConfig, dtype: KVDtype) -> KVDtype:
    """dtype: of the weights, as they are before they are quantised. Raises ConfigError.

    Float32 in int8 gets bfloat16 pages: on CPU a long context waits for the reading of its pages, and their error, at most 2^-8
    of each number, is far below that of the weights.
    """
    match engine.kv_dtype:
        case "auto":
            return "bfloat16" if engine.quantization == "int8" and dtype == "float32" else dtype
        case "float32":
            if dtype != "float32":
                raise ConfigError(
                    f"--kv-dtype float32 with --dtype {dtype}: keys and values are computed in {dtype}, so such pages are larger "
                    f"and no more exact: give --kv-dtype auto"
                )
            return "float32"
        case "bfloat16":
            if dtype == "float16":
                raise ConfigError(
                    "--kv-dtype bfloat16 with --dtype float16: such pages are as large as float16, and less exact: "
                    "give --kv-dtype auto"
                )
            return "bfloat16"
        case "fp8_e4m3":
            return "float8_e4m3fn"
        case _:
            assert_never(engine.kv_dtype)
