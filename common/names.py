"""Which names an instance may have, and how long those of API keys may be.

Owns the rule, and how routers and their detokenizers are called. Imports nothing heavy, so a flag can be checked before anything
is loaded.
"""

import re
import secrets

from common.errors import ConfigError

ROUTER_NAME = "router"
TAKEN_NAME = re.compile(rf"{ROUTER_NAME}([-.@].*)?|detokenizer")
"""Lives of routers, their detokenizers, and what an instance calls the router at an address."""
INSTANCE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def new_router_name() -> str:
    """The name of one life of a router. No other life of any router has it."""
    return f"{ROUTER_NAME}-{secrets.token_hex(8)}"


def check_instance_id(name: str) -> str:
    """Returns the name if an instance may have it. Raises ConfigError."""
    if INSTANCE_NAME.fullmatch(name) is None or TAKEN_NAME.fullmatch(name) is not None:
        rule = "1 to 64 letters, digits, '.', '_' or '-', and not router, router-…, router.… or detokenizer"
        raise ConfigError(f"an instance's name must be {rule}; it is {name[:80]!r}")
    return name


OWNER_CHARS = 64
"""Most characters of the name of an API key."""
