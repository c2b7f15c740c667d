"""Transports by name. Owns the names; a backend's library is imported only when it is chosen.

nixl       UCX: RDMA, TCP, NVLink and shared memory, chosen link by link
mooncake   Mooncake's transfer engine: RDMA or TCP
torch      torch.distributed: Gloo on CPU, NCCL on CUDA; needs nothing but torch
cma        Linux's cross memory attach, between processes of one host, on CPU; needs nothing at all
"""

from typing import assert_never

from common.addresses import LOOPBACK
from common.config import TransportName
from kv_transfer.transport import Transport


def make_transport(name: TransportName, host: str = LOOPBACK) -> Transport:
    """A transport of this process. host: the address at which peers can reach this host, for backends that listen.
    Raises TransferError when its library cannot be loaded."""
    match name:
        case "nixl":
            from kv_transfer.nixl import NixlTransport

            return NixlTransport()
        case "mooncake":
            from kv_transfer.mooncake import MooncakeTransport

            return MooncakeTransport(host)
        case "torch":
            from kv_transfer.torch_transport import TorchTransport

            return TorchTransport(host)
        case "cma":
            from kv_transfer.cma import CmaTransport

            return CmaTransport()
        case _:
            assert_never(name)
