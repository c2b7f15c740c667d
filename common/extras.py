"""How an extra of the package is installed. The package is on no index, so it is installed from a checkout.

Owns the sentence, which every message, help text and page has.
"""


def install_command(extra: str) -> str:
    """To run in the folder of a checkout. extra: a name of pyproject.toml's optional dependencies."""
    return f".venv/bin/python -m pip install -c constraints.txt -e '.[{extra}]'"
