"""A process of `launch`: how it is started, what it and its parent send each other, its environment, log and signals, and how it
stops.

Owns the vocabulary of orders and reports, and the meaning of an exit status. Does not know what a process does. Imports nothing
heavy. A process that a person started in a terminal has no parent to report to: it prints its reports.

A process is told to stop by SIGTERM, by SIGINT, or by end of file on the order pipe, which also comes when the parent was killed.

    the first time: stop in order; it may take long, because an instance finishes what runs there or hands it off
    a signal after that, or ORPHAN_S without a parent: end at once; HURRY_S to say goodbye, then the process is gone

A handler of signals in Python runs only when the main thread comes back to Python: a signal that arrives just before it begins to
wait is not seen until the wait is over. So a thread of its own waits for signals, and misses none.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn, TypeAlias

import msgspec

from common.config import LogConfig
from common.errors import ConfigError, TandemError
from common.host import core_count
from common.logs import JsonLines, LogThread, TextLines, flush
from common.processes import child as events
from common.processes.child import Broken, Child, IntakeClosed, JsonLine, Parent, Progress, Ready

_log = logging.getLogger(__name__)
_QUIET = ("asyncio", "httpx", "filelock", "huggingface_hub", "urllib3")
"""Libraries whose debug and info lines are about themselves."""
STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})


@contextmanager
def kept() -> Iterator[None]:
    """Within it stop signals are left to `watch`. It begins before anything is imported that starts threads, as numpy does: such
    a thread would take a signal, and the main thread that waits would not see it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@kept()
def configure(config: LogConfig, name: str) -> None:
    """Log from `config.log_level` on to stderr, each line with the process's name."""
    form = JsonLines(name) if config.log_format == "json" else TextLines(name)
    logging.basicConfig(handlers=[LogThread(form)], level=config.log_level.upper(), force=True)
    for library in _QUIET:
        logging.getLogger(library).setLevel(logging.WARNING)


def watch(on_signal: Callable[[int], object]) -> None:
    """Call `on_signal` with the number of every stop signal, on a thread. Called once, before the process starts other threads:
    they and child processes inherit that the signals are blocked, so that only this thread takes them."""

    def take() -> None:
        while True:
            on_signal(signal.sigwait(STOP_SIGNALS))

    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=take, name="signals", daemon=True).start()


BAD_FLAG = 2
"""Exit status of a process that can never run as it was started: it cannot honour a flag or a file."""


class CloseIntake(JsonLine, frozen=True):
    """To the router: drain, report IntakeClosed, and stay until told to stop."""


class MeetRouter(JsonLine, frozen=True):
    """To the detokenizer: send text to the router at this control address."""

    address: str


class MeetRouters(JsonLine, frozen=True):
    """To a router: these are the HTTP addresses of its own of the others at the same port."""

    urls: tuple[str, ...]


class KeepInstances(JsonLine, frozen=True):
    """To a router: these instances are kept alive beside it, and so many more can be."""

    names: tuple[str, ...]
    spare: int


class SpareWanted(JsonLine, frozen=True):
    """From a router: start one of the spare instances."""

    role: Literal["prefill", "decode"]


LaunchReport: TypeAlias = Progress | Ready | IntakeClosed | Broken | SpareWanted
LaunchOrder: TypeAlias = CloseIntake | MeetRouter | MeetRouters | KeepInstances


RoleEvent: TypeAlias = events.ChildEvent[LaunchReport]


def launch_command(role: str, flags: Sequence[str]) -> list[str]:
    """The command that runs a role of this very code. -P: a folder where it is started shadows none of its packages."""
    return [sys.executable, "-P", "-m", "launch.main", role, *flags]


class RoleProcess(Child[LaunchReport]):
    """A process that runs a role. What it writes appears on our stderr as well."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        on_event: Callable[[RoleEvent], object],
        environment: Mapping[str, str] | None = None,
        *,
        killed_with_us: bool = False,
        inherited: Sequence[int] = (),
    ) -> None:
        decoder = msgspec.json.Decoder[LaunchReport](LaunchReport)
        super().__init__(name, command, decoder, on_event, _echo, environment, killed_with_us=killed_with_us, inherited=inherited)


def _echo(line: str) -> None:
    """Our own stderr may be gone; the child must not block on that."""
    with suppress(OSError, ValueError):
        sys.stderr.write(line)
        sys.stderr.flush()


# --- the environment ---------------------------------------------------------------------------------------------------------

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS")
_SPINS = "1000"
"""How often a thread of GNU's OpenMP, which torch has, looks whether there is work before it sleeps: for about 50 us. The default
is 300,000 times, which is no faster on an idle host, and three times slower where anybody else wants the cores: threads that wait
then keep those from running that they wait for (docs/measurements/cpu.md)."""
_INFINIBAND = Path("/sys/class/infiniband")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def prepare(threads: int) -> None:
    """Set the environment of this process. threads: the size of a thread pool; 0 means one thread for each core.

    Settings of transports and of waiting threads that are already set stay, so a person can override ours.
    """
    find_programs()
    for name in _THREAD_VARIABLES:
        os.environ[name] = str(threads or core_count())
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    if _HUGE_PAGES.exists():  # torch asks for them, so weights take fewer lookups of addresses; it complains where there are none
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOG_minloglevel", "2")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not _INFINIBAND.exists():
        # The library that UCX loads for InfiniBand crashes at exit on a host that has none.
        os.environ.setdefault("UCX_MODULES", "^ib")


def find_programs() -> None:
    """The programs of this Python's environment are found, activated or not: FlashInfer starts `ninja` by its name."""
    ours, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    if ours not in path.split(os.pathsep):
        os.environ["PATH"] = f"{ours}{os.pathsep}{path}" if path else ours


# --- the child's half --------------------------------------------------------------------------------------------------------

ORPHAN_S = 15.0
"""How long an orderly stop may take when no parent is left to kill this process."""
HURRY_S = 1.0
"""How long a process lives on after it was told to end at once."""
RETRY_S = 0.2
"""How soon a main thread that is starting is interrupted again: the first signal may have come just before it began to wait."""


class StoppedWhileStarting(BaseException):
    """Told to stop before the process said how to stop it; raised in the main thread."""


class StoppedAtOnce(TandemError):
    """Told to end at once, during an orderly stop."""


class ChildProcess:
    """This process, and how it is stopped. Create it once, in the main thread, before other threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._stop_asked = False
        self._hurried: str | None = None
        self._ended = threading.Event()
        self._on_stop: Callable[[], object] | None = None
        self._early_orders: list[LaunchOrder] = []
        self._on_order: Callable[[LaunchOrder], object] = self._early_orders.append
        self._on_sudden_end: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self.parent: Parent[LaunchOrder] = Parent(msgspec.json.Decoder[LaunchOrder](LaunchOrder))
        """Whoever started this process and hears its reports; it does not exist when a person did, in a terminal."""

    def listen(self) -> None:
        """Start to listen for signals and orders. The main thread calls this; from now on it may raise StoppedWhileStarting."""
        signal.signal(signal.SIGUSR1, self._interrupted)
        watch(self._ask_to_stop)
        if self.parent.exists:
            threading.Thread(target=self._read_orders, name="orders", daemon=True).start()

    def report(self, report: LaunchReport) -> None:
        """Tell the parent, or say it here when there was none from the start. Any thread may call it."""
        if self.parent.exists:
            self.parent.report(report)
        else:
            _print(self.name, report)

    def progress(self, text: str) -> None:
        self.report(Progress(text=text))

    def on_stop(self, stop: Callable[[], object]) -> None:
        """From now on, call `stop` on another thread instead of raising StoppedWhileStarting in the main thread.

        `stop` is called again when the process is told to end at once, so that the main thread gets to `check_hurry`.
        """
        with self._lock:
            self._on_stop = stop
            asked = self._stop_asked
        if asked:
            stop()

    @property
    def hurried(self) -> bool:
        """Whether the process was told to end at once."""
        return self._hurried is not None

    def check_hurry(self) -> None:
        """Raises StoppedAtOnce when the process was told to end at once."""
        if self._hurried is not None:
            raise StoppedAtOnce(self._hurried)

    def end_within(self, timeout_s: float, reason: str, more: Callable[[], str] | None = None) -> threading.Timer:
        """End this process with status 1 and that reason after `timeout_s`, unless the timer is cancelled: for calls into
        libraries that may hang and that nothing can interrupt. more: asked then, on another thread, for the end of the reason."""

        def end() -> None:
            self.end_now(reason if more is None else reason + more())

        timer = threading.Timer(timeout_s, end)
        timer.daemon = True
        timer.start()
        return timer

    def on_sudden_end(self, act: Callable[[], object]) -> None:
        """Call this too, from any thread, when the process ends without its threads. It must not wait."""
        self._on_sudden_end.append(act)

    def end_now(self, reason: str) -> NoReturn:
        """End this process with status 1 and that reason, without asking its threads and libraries."""
        _log.critical("%s", reason)
        self.report(Broken(reason=reason))
        for act in self._on_sudden_end:
            act()
        flush()
        os._exit(1)

    def ended(self) -> None:
        """The main thread is done, and must not be interrupted any more."""
        self._ended.set()

    def on_order(self, act: Callable[[LaunchOrder], object]) -> None:
        """From now on, call `act` with every order, on a thread of its own; with earlier orders at once, on this thread."""
        with self._lock:
            self._on_order = act
            for order in self._early_orders:
                act(order)
            self._early_orders.clear()

    def _ask_to_stop(self, number: int | None) -> None:
        """number: of the signal; None when the order pipe ended. A signal after an earlier request to stop means: at once."""
        with self._lock:
            again, self._stop_asked = self._stop_asked, True
        if not again:
            threading.Thread(target=self._stop, name="stop", daemon=True).start()
        elif number is not None:
            self._hurry(f"told again to stop, by {signal.Signals(number).name}")

    def _hurry(self, reason: str) -> None:
        """Give the main thread, the only one that can say goodbye, HURRY_S to do so."""
        self.end_within(HURRY_S, reason)
        with self._lock:
            self._hurried = reason
            stop = self._on_stop
        if stop is not None:
            stop()

    def _stop(self) -> None:
        """Stop the main thread with its `on_stop` function; until it has set one, interrupt it again and again."""
        while not self._ended.is_set():
            with self._lock:
                stop = self._on_stop
            if stop is not None:
                stop()
                return
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            self._ended.wait(RETRY_S)

    def _interrupted(self, _number: int, _frame: FrameType | None) -> None:
        if self._on_stop is None and not self._ended.is_set():
            raise StoppedWhileStarting

    def _read_orders(self) -> None:
        while (orders := self.parent.read_orders()) is not None:
            for order in orders:
                with self._lock:
                    self._on_order(order)
        self._ask_to_stop(None)
        threading.Event().wait(ORPHAN_S)
        self._hurry(f"an orderly stop took longer than {ORPHAN_S:g} s, and the parent is gone")


def run_process(name: str, log: LogConfig, threads: int, body: Callable[[ChildProcess], None]) -> int:
    """Run the body as this process, with its environment, log and signals. The body does the heavy imports. threads: the size of
    a thread pool; 0: one for each core. Returns the exit status."""
    prepare(threads)
    configure(log, name)
    return run_child(name, body)


def run_child(name: str, body: Callable[[ChildProcess], None]) -> int:
    """Run a process's body; the outermost door of the process. Returns its exit status: 0, 1, or BAD_FLAG.

    Import heavy modules in the body, where the process can be stopped while it imports.
    """
    process = ChildProcess(name)
    try:
        process.listen()
        return _run(process, body)
    except StoppedWhileStarting:
        return 0
    finally:
        process.ended()


def _run(process: ChildProcess, body: Callable[[ChildProcess], None]) -> int:
    try:
        body(process)
    except TandemError as error:
        if not process.parent.exists:  # a parent says it, once
            _log.error("%s", error)
        process.report(Broken(reason=str(error)))
        return BAD_FLAG if isinstance(error, ConfigError) and not error.retryable else 1
    except Exception as error:  # noqa: BLE001  whoever started this process must learn why it ended, whatever the reason
        _log.critical("%s failed", process.name, exc_info=error)
        process.report(Broken(reason=f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _print(name: str, report: LaunchReport) -> None:
    match report:
        case Progress():
            _log.info("%s", report.text)
        case Ready():
            print(f"{name}: ready, " + ", ".join(f"{use} {address}" for use, address in report.addresses.items()), flush=True)
        case IntakeClosed() | Broken() | SpareWanted():
            return
