"""Processes that are forked from one that has loaded the product and its libraries: a start costs a hundredth of the CPU time.

Owns the process that forks, and the double of `subprocess.Popen` that asks it. A forked process runs the same module with the
same arguments and files as a new interpreter would, and finds the same environment. But its imports are there already, with what
they read of the environment of the process that forks (PYTHONPATH of an order has no effect), it has a child that waits to fork
its own children, and the kernel shows the command line and the environment of the first process that forks. Its name is its first
argument, such as a role.

    client ── order, files ──► forking process ── fork ──► go-between ── fork ──► process
    client ◄── pid ── the go-between has ended: its child is the client's, which has taken in orphans meanwhile
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import mmap
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

import msgspec

from launch.child import prepare

LOADED = (
    *("torch", "transformers", "tokenizers", "jinja2", "zmq", "safetensors.torch"),
    *("engine.backends", "engine.torch_executor", "engine.timed"),
    *("launch.local", "launch.instance_process", "launch.follower_process", "launch.router_process"),
    *("common.text.tokenizer_manager", "kv_transfer.torch_transport", "tests.kv_transfer.local_agent"),
    *("router.process", "uvloop", "uvicorn.lifespan.on", "kv_transfer.nixl"),
    *("launch.settings", "launch.batch", "launch.chat", "simulation.plan"),
    *("transformers.tokenization_utils_tokenizers", "transformers.convert_slow_tokenizer", "xgrammar"),
)
STARTING = {"common.processes.child", "engine.models.group_process", "engine.grammar.compiler_process"}
"""The modules that start processes which load the product."""
ORDER_BYTES, MOST_FILES = 2**18, 16
HIGH = 500
"""Files wait at numbers from here on until they come to those that they must have."""
MOST_PAGES = 2**14
SHOWN_BYTES = 2**13
"""Room for the command lines that the kernel shows of forked processes: it is where the forking process's own one is."""
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36


class Order(msgspec.Struct, frozen=True):
    """One process."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    files: list[int]
    """The numbers that the files that come along must have."""
    folder: str


class Forked:
    """As much of `subprocess.Popen` as the parents of children use, from any thread. Its process is a child of this one."""

    def __init__(self, pid: int, stdout: IO[str] | None, stdin: IO[str] | None = None) -> None:
        self.pid, self.stdout, self.stdin = pid, stdout, stdin
        self._status: int | None = None
        self._lock = threading.Lock()

    def poll(self, flags: int = os.WNOHANG) -> int | None:
        with self._lock:
            if self._status is None:
                pid, status = os.waitpid(self.pid, flags)
                self._status = os.waitstatus_to_exitcode(status) if pid else None
            return self._status

    def wait(self) -> int:
        status = self.poll(0)
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """A forking process as its parent sees it. asking: the socket to it."""

    def __init__(self, asking: socket.socket) -> None:
        self._asking = asking
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def forked(self) -> Iterator[None]:
        """Children that are made meanwhile are forked."""
        double = SimpleNamespace(Popen=self.popen, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
        with contextlib.ExitStack() as stack:
            for name in STARTING & sys.modules.keys():
                stack.enter_context(mock.patch(f"{name}.subprocess", double))
            yield

    def popen(self, command: Sequence[str], **options: Any) -> "Forked | subprocess.Popen[str]":
        """As `subprocess.Popen` for a child. What is no module of Python is started as ever."""
        words = [word for word in command if word != "-P"]
        if words[:2] != [sys.executable, "-m"]:
            return subprocess.Popen(command, **options)
        given, wanted = options["stdin"], options["stdout"]
        output, theirs = os.pipe() if wanted == subprocess.PIPE else (None, os.dup(wanted))
        asked, asking = os.pipe() if given == subprocess.PIPE else (_opened(given), None)
        with open(asked) as read, open(theirs, "w") as written:
            errors = written.fileno() if options.get("stderr") == subprocess.STDOUT else 2
            files = (read.fileno(), written.fileno(), errors)
            pid = self.start(words[2:], options["env"], files, options.get("pass_fds", ()))
        stdout = None
        if output is not None:
            stdout = os.fdopen(output, encoding=options.get("encoding"), errors=options.get("errors"))
        return Forked(pid, stdout, None if asking is None else os.fdopen(asking, "w"))

    def start(
        self, words: Sequence[str], environment: dict[str, str], files: Sequence[int], inherited: Sequence[int] = ()
    ) -> int:
        """The pid of a process that runs a module, which is the first of the words. files: its stdin, stdout and stderr."""
        order = Order(words[0], list(words[1:]), environment, [0, 1, 2, *inherited], os.getcwd())
        return self._ask(order, [*files, *inherited])

    def _ask(self, order: Order, files: Sequence[int]) -> int:
        """The pid of the new process."""
        with self._lock:
            _take_in_orphans(True)
            try:
                socket.send_fds(self._asking, [msgspec.json.encode(order)], list(files))
                answer = self._asking.recv(100)
            finally:
                _take_in_orphans(False)
        assert answer, "the process that forks has ended"
        return int(answer)


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Children that are made meanwhile are forked, where a process can take in orphans: on Linux."""
    with forks().forked() if sys.platform == "linux" else contextlib.nullcontext():
        yield


def module_process(
    words: Sequence[str], environment: dict[str, str], files: Sequence[int], inherited: Sequence[int] = ()
) -> "Forked | subprocess.Popen[bytes]":
    """A process that runs a module, forked where that can be: see `Forks.start`."""
    if sys.platform != "linux":
        command, (given, out, err) = [sys.executable, "-m", *words], files
        return subprocess.Popen(command, env=environment, stdin=given, stdout=out, stderr=err, pass_fds=inherited)
    return Forked(forks().start(words, environment, files, inherited), None)


def run_module(*words: str) -> subprocess.CompletedProcess[str]:
    """What became of a module that ran in a process of its own."""
    with open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        status = module_process(words, dict(os.environ), [each.fileno() for each in (nothing, out, err)]).wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, status, out.read(), err.read())


@functools.cache
def forks() -> Forks:
    """The forking process of this one, with which it ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen([sys.executable, "-m", "tests.rig.forks", SHOWN_BYTES * "-"], stdin=theirs.fileno())
    atexit.register(process.wait)
    atexit.register(ours.close)
    return Forks(ours)


def _opened(given: int) -> int:
    """A file of our own for what a process is to read: a descriptor, or nothing."""
    return os.open(os.devnull, os.O_RDONLY) if given == subprocess.DEVNULL else os.dup(given)


def _take_in_orphans(does: bool) -> None:
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(does), 0, 0, 0) == 0


# --- the process that forks ----------------------------------------------------------------------------------------------------


def _serve(asked: socket.socket) -> tuple[Order, list[int]]:
    """Returns in each process that is forked, with what it is to be. Ends with the process that asks."""
    while True:
        data, files, _, _ = socket.recv_fds(asked, ORDER_BYTES, MOST_FILES)
        if not data:
            os._exit(0)
        told, telling = os.pipe()
        if (between := os.fork()) == 0:
            go_between = os.getpid()
            if (pid := os.fork()) != 0:
                os.write(telling, str(pid).encode())
                os._exit(0)
            while os.getppid() == go_between:
                time.sleep(0.001)
            return msgspec.json.decode(data, type=Order), files
        os.waitpid(between, 0)
        asked.send(os.read(told, 100))
        for file in (told, telling, *files):
            os.close(file)


def _become(order: Order, files: Sequence[int], asking: socket.socket) -> None:
    held = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, HIGH) for file in (asking.detach(), *files)]
    os.closerange(0, HIGH)
    for file, number in zip(held[1:], order.files, strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)
    os.setsid()
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    sys.argv = [order.module, *order.arguments]
    _show([sys.executable, "-m", *sys.argv])
    ctypes.CDLL(None).prctl(_PR_SET_NAME, (order.arguments or [order.module])[0].encode(), 0, 0, 0)
    apart = mmap.mmap(-1, mmap.PAGESIZE * (1 + os.getpid() % MOST_PAGES))
    """Never written: what comes after it has other addresses than in the other processes."""
    with Forks(socket.socket(fileno=held[0])).forked():
        status = _run(order.module)
    apart.close()
    os._exit(status)


def _run(module: str) -> int:
    """The exit status. As at the end of an interpreter, threads are awaited and functions for the end are called. But nothing is
    taken apart: that would write to, and so copy, all that the process shares with the one that has loaded it."""
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            sys.stderr.write(f"{ended.code}\n")
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:  # noqa: BLE001
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
            file.flush()
    return status


def _show(command: Sequence[str]) -> None:
    """Have /proc/PID/cmdline and `ps` show this command: the kernel reads it where the first process has found its own."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[45:47])
    shown = b"".join(word.encode() + b"\0" for word in command)[: end - start]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def main() -> None:
    prepare(1)  # what libraries read when they are loaded: how long threads of OpenMP spin
    for name in LOADED:
        importlib.import_module(name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process of several threads cannot be forked"
    gc.collect()
    gc.freeze()
    order, files = _serve(socket.socket(fileno=os.dup(0)))
    while True:
        asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            asking.close()
            for file in files:
                os.close(file)
            order, files = _serve(asked)
        else:
            break
    _become(order, files, asking)


if __name__ == "__main__":
    main()
