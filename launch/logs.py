"""The log of a process: lines on stderr that say who speaks.

Owns the format. Does not know what is logged.
"""

import logging
import sys

from common.config import LogConfig

_QUIET = ("asyncio", "httpx", "filelock", "huggingface_hub", "urllib3")
"""Libraries whose debug and info lines are about themselves."""


def configure(config: LogConfig, name: str) -> None:
    """Log from `config.log_level` on to stderr, each line with the process's name."""
    form = f"%(asctime)s.%(msecs)03d %(levelname)-7s {name.replace('%', '%%')} %(name)s: %(message)s"
    logging.basicConfig(stream=sys.stderr, level=config.log_level.upper(), format=form, datefmt="%H:%M:%S", force=True)
    for library in _QUIET:
        logging.getLogger(library).setLevel(logging.WARNING)
