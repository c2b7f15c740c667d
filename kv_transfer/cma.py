"""The CMA transport: writes straight into the memory of another process of this host (Cross Memory Attach of Linux).

Owns the system calls and the beacon. Knows no pages. `process_vm_writev` copies inside the call, to any CPU memory, without help
from the receiver. So a slice has ended when the call returns, and every failure is quiescent. UCX uses the same call on one host;
this backend does so without a library and is the reference for the others.

A process id may be used again. So each agent keeps a beacon in its memory, which is its name, and a writer reads the beacon
before and after each slice. The beacon proves that the process lives, that it is the right one, and that it still accepts writes.
An agent that closes erases its beacon.

`man 2 process_vm_writev`; the rights that it takes: `man 2 ptrace`, "Ptrace access mode checking".
"""

import ctypes
import errno
import os
import uuid
from concurrent.futures import Future
from typing import Annotated

import msgspec
import numpy as np

from common.errors import TransferError
from common.ids import Int64Array
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion
from kv_transfer.pushes import SlicedTransport, SliceFailed

SLICE_BYTES = 8 * 2**20
"""The most that one poll writes on one link; takes a millisecond or two."""
IOV_MAX = 1024
"""Runs per call, a limit of Linux."""
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1).value


class _CmaAddress(msgspec.Struct, frozen=True):
    """What a pool's descriptor says to other agents."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    beacon: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    """The address of the agent's name in its memory."""


class _Kernel:
    """The system calls, through libc. Raises TransferError where they do not exist."""

    def __init__(self) -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            self._calls = {"read": libc.process_vm_readv, "write": libc.process_vm_writev}
            self._prctl = libc.prctl
        except AttributeError as error:
            raise TransferError(f"this system has no Cross Memory Attach, which Linux has: {error}") from error
        for call in self._calls.values():
            vector = (ctypes.c_void_p, ctypes.c_ulong)
            call.argtypes, call.restype = (ctypes.c_int, *vector, *vector, ctypes.c_ulong), ctypes.c_ssize_t

    def let_peers_in(self) -> None:
        """With Yama (kernel.yama.ptrace_scope=1), only processes that we allow may write here, so allow all of this user. Without
        Yama the call fails, and nothing is needed."""
        self._prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)

    def copy(self, kind: str, pid: int, ours: Int64Array, theirs: Int64Array, lengths: Int64Array) -> None:
        """Copy runs between addresses of this process and of another, in the order of "read" or "write". Raises SliceFailed."""
        for at in range(0, len(lengths), IOV_MAX):
            part = slice(at, at + IOV_MAX)
            local = np.stack([ours[part], lengths[part]], axis=1)  # two words each: struct iovec
            remote = np.stack([theirs[part], lengths[part]], axis=1)
            copied = self._calls[kind](pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
            if copied != lengths[part].sum():
                number = ctypes.get_errno() if copied < 0 else errno.EFAULT
                raise SliceFailed(f"process {pid}: {_MEANING.get(number, os.strerror(number))}", quiescent=True)


_MEANING = {
    errno.ESRCH: "it is gone, or it is on another host or in another container",
    errno.EPERM: "the kernel does not let us write to it (another user, or a container without ptrace rights)",
    errno.EFAULT: "it has no memory at that address",
}


class _CmaLink:
    """Implements `kv_transfer.pushes.PushLink`. Raises SliceFailed when the agent's process does not show its beacon, and
    msgspec.DecodeError."""

    detail = "Linux CMA"
    ready = None

    def __init__(self, kernel: _Kernel, source: MemoryRegion, pool: PoolDescriptor) -> None:
        self._kernel, self._source, self._pool = kernel, source, pool
        self._wire = msgspec.msgpack.decode(pool.wire, type=_CmaAddress)
        self._check_beacon()

    def write(self, runs: Int64Array) -> Future[None]:
        ended: Future[None] = Future()
        try:
            self._check_beacon()
            ours, theirs = runs[:, 0] + self._source.address, runs[:, 1] + self._pool.address
            self._kernel.copy("write", self._wire.pid, ours, theirs, runs[:, 2])
            self._check_beacon()
        except SliceFailed as failed:
            ended.set_exception(failed)
        else:
            ended.set_result(None)
        return ended

    def close(self) -> None:
        """There is nothing to release."""

    def _check_beacon(self) -> None:
        name = self._pool.agent.encode()
        seen = ctypes.create_string_buffer(len(name))
        ours, theirs, length = np.array([[ctypes.addressof(seen)], [self._wire.beacon], [len(name)]], dtype=np.int64)
        self._kernel.copy("read", self._wire.pid, ours, theirs, length)
        if seen.raw != name:
            raise SliceFailed(f"process {self._wire.pid}: it is not {self._pool.agent}, or has closed", quiescent=True)


class CmaTransport(SlicedTransport):
    """Implements `kv_transfer.transport.Transport`."""

    library = "CMA"

    def __init__(self) -> None:
        super().__init__(SLICE_BYTES, slice_runs=16 * IOV_MAX, window=1)
        self._kernel = _Kernel()
        self._name = f"cma-{uuid.uuid4().hex}"
        self._beacon = ctypes.create_string_buffer(self._name.encode())

    def register(self, region: MemoryRegion) -> tuple[str, bytes]:
        _check_device(region.device)
        self._region = region
        self._kernel.let_peers_in()
        return self._name, msgspec.msgpack.encode(_CmaAddress(os.getpid(), ctypes.addressof(self._beacon)))

    def link_to(self, pool: PoolDescriptor) -> _CmaLink:
        _check_device(pool.device)
        return _CmaLink(self._kernel, self.region, pool)

    def close(self, agent: str | None = None) -> None:
        super().close(agent)
        if agent is None:
            ctypes.memset(self._beacon, 0, len(self._beacon))


def _check_device(device: str) -> None:
    if device != "cpu":
        raise TransferError(f"CMA writes CPU memory only, and the pool is on {device}: choose another --transport")
