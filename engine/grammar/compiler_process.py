"""The compiler in a process of its own: a grammar that crashes xgrammar, or takes too long, ends that process and nothing else.

Owns the process, what it may use, and the frames between the two. Does not know the cache.

The process loads xgrammar once. For each grammar it forks, and the fork compiles: so a crash costs no new start, and every
grammar has its limits for itself. What compiles quickly there, the instance compiles again; the rest comes as text. The process
has one end of a socket as its stdin, so it ends when its parent does. A fork that compiles then ends at its limit.

    instance ── vocabulary, grammars ──► process ── fork ──► compiles, tries out
    instance ◄── started, one answer for each grammar ── process ◄── memory file ── fork
"""

import contextlib
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from common.errors import BadRequest, Unavailable
from common.processes.child import with_our_code
from common.sampling_params import Grammar
from engine.grammar.compiler import Compiler, GrammarVocabulary
from engine.grammar.grammars import check_text

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

START_S = 120.0
SOONEST_S = 0.001
"""A socket takes a timeout of 0 for none."""
"""The process loads xgrammar within this time."""
_HEAD = struct.Struct("<cQ")
"""The head of a frame: what it is, and how many bytes follow."""
_STARTED, _COMPILED, _QUICK, _REFUSED, _ENDED = b"S", b"C", b"Q", b"R", b"E"
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
"""What the kernel sends to a process for what it does itself."""
STACK_BYTES = 4 * 2**20
"""The stack of a fork: half of what a thread of the instance has, so that what fits here fits there."""


class Limits(msgspec.Struct, frozen=True):
    """What one grammar may use."""

    cpu_s: int = 12
    """Whole seconds, of all threads."""
    wall_s: float = 30.0
    """Longer than cpu_s, for a process that waits: that is no fault of the grammar."""
    memory_bytes: int = 3 * 2**30
    """More than the process has without it."""
    compiled_bytes: int = 128 * 2**20
    """The size of the compiled grammar as text."""
    quick_s: float = 0.5
    """What takes less CPU time is compiled once more by the instance, for its text may be a hundred times as large and take
    longer to read."""


class CompilerProcess:
    """The parent's half. One thread compiles; `close` may be called on any."""

    def __init__(self, vocabulary: GrammarVocabulary, limits: Limits | None = None) -> None:
        self._vocabulary = vocabulary
        self._limits = limits or Limits()
        self._process: _Process | None = None
        self._closed = False
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> "CompiledGrammar":
        """Raises BadRequest for a grammar that cannot be compiled or takes too much CPU time, and Unavailable without a process,
        or when something from outside holds it up or ends it: the grammar may be good then."""
        from xgrammar import CompiledGrammar

        process = self._started()
        try:
            process.send(_COMPILED, msgspec.msgpack.encode(grammar))
            kind, data = process.receive(self._limits.wall_s)
        except TimeoutError:
            self._end()
            raise Unavailable("the compiler of grammars does not answer") from None
        except OSError:
            self._end()
            raise Unavailable("the compiler of grammars has ended") from None
        if kind == _QUICK:
            try:
                return Compiler(self._vocabulary).compile_unchecked(grammar)
            except BadRequest as error:  # the process could do it
                raise Unavailable(f"the compiler of grammars has failed: {error}") from error
        if kind == _COMPILED:
            return CompiledGrammar.deserialize_json(data.decode(), self._vocabulary.of(grammar))
        if kind == _REFUSED:
            raise BadRequest(data.decode(), field=grammar.kind)
        raise Unavailable("the compiler of grammars was ended from outside")

    def close(self) -> None:
        self._closed = True
        self._end()

    def _started(self) -> "_Process":
        with self._lock:
            if self._closed:
                raise Unavailable("the instance stops")
            process = self._process
            if process is not None and process.is_alive:
                return process
            if process is not None:
                process.end()
            try:
                process = self._process = _Process()
            except OSError as error:
                raise Unavailable(f"the compiler of grammars cannot be started: {error}") from error
        try:
            info, special = self._vocabulary.info.serialize_json(), sorted(self._vocabulary.special)
            process.send(_STARTED, msgspec.msgpack.encode((info, special, self._limits)))
            process.receive(START_S)
        except OSError as error:
            self._end()
            raise Unavailable("the compiler of grammars does not start: its log says why") from error
        return process

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end()


class _Frames:
    """Frames to and from the other process. Raises TimeoutError, and another OSError when that is gone or the end is closed."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._using = threading.Lock()
        """Held while the socket is used: it is closed after that."""

    def send(self, kind: bytes, data: bytes = b"") -> None:
        with self._using:
            self._socket.sendall(_HEAD.pack(kind, len(data)) + data)

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, bytes]:
        """timeout_s: within which the whole frame must come; None: however long it takes."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._using:
            kind, size = _HEAD.unpack(self._read(_HEAD.size, until))
            return kind, self._read(size, until)

    def close(self) -> None:
        with self._using:
            self._socket.close()

    def _read(self, size: int, until: float | None) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(None if until is None else max(until - time.monotonic(), SOONEST_S))
            part = self._socket.recv(size - len(data))
            if not part:
                raise ConnectionError("the other process has ended")
            data += part
        return bytes(data)


class _Process(_Frames):
    """A running process. Raises OSError when it cannot be started."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engine.grammar.compiler_process"],
                stdin=theirs.fileno(),
                stdout=2,  # what libraries print
                env=with_our_code({**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}),
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def is_alive(self) -> bool:
        """It is not reaped here: its pid, by which it is ended, stays its own."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.close()


@dataclass(slots=True)
class _Served:
    """The process's half."""

    vocabulary: GrammarVocabulary
    limits: Limits

    def answer(self, grammar: Grammar) -> tuple[bytes, bytes]:
        """Compile in a fork. Returns the kind and the data of the frame that answers."""
        with open(os.memfd_create("grammar"), "r+b") as memory:
            fork = os.fork()
            if fork == 0:
                status = 1
                try:
                    memory.write(b"".join(self._compile(grammar)))
                    memory.flush()
                    status = 0
                except Exception:
                    traceback.print_exc()
                    raise
                finally:
                    os._exit(status)
            _, status, used = os.wait4(fork, 0)
            memory.seek(0)
            answer = memory.read()
        if status == 0:
            return answer[:1], answer[1:]
        if os.WTERMSIG(status) == signal.SIGXCPU or used.ru_utime + used.ru_stime >= self.limits.cpu_s:
            return _REFUSED, f"{grammar.kind}: it takes too long to compile: send a simpler one".encode()
        if os.WTERMSIG(status) in _CRASHES:
            return _REFUSED, f"{grammar.kind}: xgrammar cannot compile it: send a simpler one".encode()
        if os.WIFEXITED(status):  # an error of ours, which would come again wherever the grammar is sent
            return _REFUSED, f"{grammar.kind}: the compiler fails with it: write it differently".encode()
        return _ENDED, b""

    def _compile(self, grammar: Grammar) -> tuple[bytes, bytes]:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (_address_bytes() + self.limits.memory_bytes,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (self.limits.cpu_s, self.limits.cpu_s + 1))
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
        too_large = f"{grammar.kind}: it needs too much memory: send a simpler one".encode()
        try:
            compiler = Compiler(self.vocabulary)
            check_text(grammar)
            begun = time.process_time()
            compiled = compiler.compile_unchecked(grammar)
            is_quick = time.process_time() - begun < self.limits.quick_s
            compiler.try_out(grammar, compiled)
            if is_quick:
                return _QUICK, b""
            data = compiled.serialize_json().encode()
        except (BadRequest, RuntimeError, MemoryError) as error:
            is_large = isinstance(error, MemoryError) or "bad_alloc" in str(error)
            return _REFUSED, too_large if is_large else str(error).encode(errors="replace")
        return (_COMPILED, data) if len(data) <= self.limits.compiled_bytes else (_REFUSED, too_large)


def _address_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def main() -> None:
    from xgrammar import TokenizerInfo

    frames = _Frames(socket.socket(fileno=0))
    with contextlib.suppress(ConnectionError):
        _, first = frames.receive()
        info, special, limits = msgspec.msgpack.decode(first, type=tuple[str, list[int], Limits])
        served = _Served(GrammarVocabulary(TokenizerInfo.deserialize_json(info), special), limits)
        frames.send(_STARTED)
        while True:
            _, order = frames.receive()
            frames.send(*served.answer(msgspec.msgpack.decode(order, type=Grammar)))


if __name__ == "__main__":
    main()
