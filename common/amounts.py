"""Amounts and shares of memory, as flags write them: "512MiB", "40%", "auto".

Owns the spelling. Knows no flag and no memory.
"""

import math
import re

from common.errors import ConfigError

_SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str, flag: str = "") -> int | None:
    """Bytes of "512MiB", "40GiB", "1000000"; None for "auto". Raises ConfigError, which names the flag."""
    if text == "auto":
        return None
    digits = text.rstrip("BKMGIbkmgi ")
    unit = text[len(digits) :].strip().upper()
    try:
        number = float(digits)
    except ValueError:
        number = -1.0
    scale = _UNITS.get(unit, 0)
    if not (math.isfinite(number) and number * scale >= 1):  # false for an unknown unit too
        where = f"--{flag}: " if flag else ""
        raise ConfigError(f"{where}{text!r} is not an amount of memory: write a number with B, KiB, MiB or GiB, or auto")
    return int(number * scale)


def parse_memory(text: str, flag: str, total_bytes: int) -> int | None:
    """As `parse_bytes`, and "40%" is that share of a memory of `total_bytes`. Raises ConfigError, which names the flag."""
    percent = parse_share(text, flag)
    return parse_bytes(text, flag) if percent is None else int(total_bytes * percent / 100)


def parse_share(text: str, flag: str) -> float | None:
    """Percent of "40%"; None for what is not a share. Raises ConfigError, which names the flag."""
    share = _SHARE.fullmatch(text)
    if share is None:
        return None
    percent = float(share[1])
    if not 0 < percent <= 100:
        raise ConfigError(f"--{flag}: {text!r} is not a share of memory: write a number above 0 and up to 100 with %")
    return percent
