"""Which names an instance may have.

Owns the rule, and the names that are taken. Imports nothing heavy, so a flag can be checked before anything is loaded.
"""

import re

from common.errors import ConfigError

ROUTER_NAME, DETOKENIZER_NAME = "router", "detokenizer"
NAMES_TAKEN = (ROUTER_NAME, DETOKENIZER_NAME)
INSTANCE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_instance_id(name: str) -> str:
    """Returns the name if an instance may have it. Raises ConfigError."""
    if INSTANCE_NAME.fullmatch(name) is None or name in NAMES_TAKEN:
        rule = f"1 to 64 letters, digits, '.', '_' or '-', and not {' or '.join(NAMES_TAKEN)}"
        raise ConfigError(f"an instance's name must be {rule}; it is {name[:80]!r}")
    return name
