"""Transports by name. Owns the names; a backend's library is imported only when it is chosen."""

from typing import assert_never

from common.config import TransportName
from kv_transfer.transport import Transport


def make_transport(name: TransportName) -> Transport:
    """A transport of this process. Raises TransferError when its library cannot be loaded."""
    match name:
        case "nixl":
            from kv_transfer.nixl import NixlTransport

            return NixlTransport()
        case _:
            assert_never(name)
