"""Grammars, compiled for the model's vocabulary by xgrammar: off the loop, each once, the latest ones and those in use kept.

Owns the cache, the queue, and what is refused before xgrammar sees it. Does not know requests, rows or logits, nor where the
compiler runs (`grammar_process.py`). The tokenizer and the compiler are loaded for the first grammar: an instance that gets none
pays nothing.
"""

import copy
import logging
import math
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from common.engine.grammar_limits import check_size
from common.engine.json_schemas import check_regex, check_schema
from common.engine.structural_tags import check_structural_tag
from common.errors import BadRequest, Overloaded, TandemError, Unavailable
from common.messages import Failed
from common.sampling_params import Grammar

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, TokenizerInfo

K = TypeVar("K")

_log = logging.getLogger(__name__)
COMPILERS = 2
MAX_QUEUED = 256
"""So many grammars wait at most to be compiled."""
KEPT_GRAMMARS, KEPT_BYTES = 256, 512 * 2**20


class Preparation(Protocol):
    """A grammar that is being made ready."""

    @property
    def ends_s(self) -> float | None:
        """When it ends, if that is known in advance; None: its process's loop is woken then."""

    def poll(self) -> bool:
        """Whether rows with this grammar can be launched now. Raises an error of the tree when they never can."""


def take_prepared(preparing: dict[K, Preparation]) -> Iterator[tuple[K, Failed | None]]:
    """Take out those that are over, each with why it can never be used, or None when it is ready."""
    for key, preparation in list(preparing.items()):
        refused: Failed | None = None
        try:
            if not preparation.poll():
                continue
        except TandemError as error:
            refused = Failed.of(error)
        del preparing[key]
        yield key, refused


class Compiling(Protocol):
    """Compiles grammars, one at a time."""

    def compile(self, grammar: Grammar) -> "CompiledGrammar":
        """Raises BadRequest for a grammar that cannot be used, now or later, and other errors of the tree."""

    def close(self) -> None:
        """End what it does. Any thread may call it."""


class _Entry:
    """A grammar of the cache. holders: the grammars of the requests that need it. It is kept while one of them exists."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = Grammar(grammar.kind, grammar.text)  # its own, which keeps no request's alive
        self.future: Future[CompiledGrammar] = Future()
        self.holders: list[weakref.ref[Grammar]] = []

    @property
    def is_held(self) -> bool:
        return any(holder() is not None for holder in self.holders)

    def hold(self, grammar: Grammar) -> None:
        self.holders = [*(holder for holder in self.holders if holder() is not None), weakref.ref(grammar)]

    @property
    def bytes(self) -> int:
        """0 before it is compiled, and for one that is refused."""
        if not self.future.done() or self.future.exception() is not None:
            return 0
        return self.future.result().memory_size_bytes


class Grammars:
    """make_vocabulary: called once, for the first grammar; may take seconds. make_compiler: called once for each thread."""

    def __init__(
        self, make_vocabulary: "Callable[[], TokenizerInfo]", make_compiler: "Callable[[TokenizerInfo], Compiling]"
    ) -> None:
        self._make_vocabulary, self._make_compiler = make_vocabulary, make_compiler
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._vocabulary: TokenizerInfo | None = None
        self._compilers: list[Compiling] = []
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._threads = self._busy = 0
        self._closed = False
        self._known: OrderedDict[Grammar, _Entry] = OrderedDict()
        """By use, the latest last. Those that are being compiled too, so that equal ones are compiled once, and those that are
        refused, so that they are refused at once the next time."""

    def prepare(self, grammar: Grammar, wake: Callable[[], None]) -> "CompiledSoon":
        """Begin to compile, unless it is compiled. Waits for nothing. wake: called when it has ended, on any thread. What is
        compiled is kept while this object `grammar` exists, which is as long as its request is open."""
        future = self._future(grammar)
        future.add_done_callback(lambda _: wake())
        return CompiledSoon(future)

    def compiled(self, grammar: Grammar) -> "CompiledGrammar":
        """The compiled grammar, which was prepared. Waits for nothing. Raises BadRequest when it is not there."""
        with self._lock:
            entry = self._known.get(grammar)
        if entry is None or not entry.future.done():
            raise BadRequest(f"{grammar.kind}: it was not prepared", field=grammar.kind)
        return _outcome(entry.future)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            compilers = list(self._compilers)
        for _ in range(COMPILERS):
            self._queue.put(None)
        for compiler in compilers:
            compiler.close()

    def _future(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        with self._lock:
            entry = self._known.get(grammar)
            if entry is not None:
                self._known.move_to_end(entry.grammar)
                entry.hold(grammar)
                return entry.future
            entry = _Entry(grammar)
            entry.hold(grammar)
            if self._busy >= MAX_QUEUED:
                entry.future.set_exception(Overloaded(f"{self._busy} grammars wait to be compiled: try again"))
                return entry.future
            self._known[entry.grammar] = entry
            self._busy += 1
            if self._threads < min(COMPILERS, self._busy):
                self._threads += 1
                threading.Thread(target=self._work, name="grammars", daemon=True).start()
        self._queue.put(entry)
        return entry.future

    def _work(self) -> None:
        """Compile until the end, in the order in which grammars came. A daemon: it never delays the end of the process."""
        compiler: Compiling | None = None
        while (entry := self._queue.get()) is not None:
            compiled: CompiledGrammar | None = None
            try:
                compiler = compiler or self._new_compiler()
                if not self._is_wanted(entry):
                    raise Unavailable("its request has ended")
                compiled = compiler.compile(entry.grammar)
            except TandemError as raised:
                error = raised
            except Exception as raised:  # noqa: BLE001 - the thread's outermost door; the preparation's poll raises it
                _log.exception("a grammar could not be compiled")
                error = TandemError(f"{entry.grammar.kind}: the compiler failed: {raised}")
            with self._lock:
                self._busy -= 1
                if compiled is None and not isinstance(error, BadRequest):
                    self._forget(entry)
            if compiled is None:
                entry.future.set_exception(copy.copy(error))
            else:
                entry.future.set_result(compiled)
            with self._lock:
                self._make_room()

    def _is_wanted(self, entry: _Entry) -> bool:
        """Whether an open request needs it. If not it is forgotten at once, so a request that comes now begins anew."""
        with self._lock:
            is_wanted = entry.is_held
            if not is_wanted:
                self._forget(entry)
        return is_wanted

    def _forget(self, entry: _Entry) -> None:
        if self._known.get(entry.grammar) is entry:
            del self._known[entry.grammar]

    def _new_compiler(self) -> Compiling:
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            compiler = self._make_compiler(self._vocabulary)
        with self._lock:
            self._compilers.append(compiler)
            if self._closed:
                compiler.close()
        return compiler

    def _make_room(self) -> None:
        """Forget the oldest, but none that an open request needs."""
        excess_bytes = sum(entry.bytes for entry in self._known.values()) - KEPT_BYTES
        for key, entry in list(self._known.items()):
            if len(self._known) <= KEPT_GRAMMARS and excess_bytes <= 0:
                return
            if entry.future.done() and not entry.is_held:
                excess_bytes -= entry.bytes
                del self._known[key]


class CompiledSoon:
    """Implements `Preparation`."""

    ends_s: float | None = None

    def __init__(self, future: "Future[CompiledGrammar]") -> None:
        self._future = future

    def poll(self) -> bool:
        if not self._future.done():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Wait until it has ended. Raises what `poll` raises."""
        _outcome(self._future)


def _outcome(future: "Future[CompiledGrammar]") -> "CompiledGrammar":
    """Wait for it. An error is raised as a copy: each raise adds frames to an error, and the cache would keep what they hold."""
    error = future.exception()
    if error is not None:
        raise copy.copy(error)
    return future.result()


class AnythingGoes:
    """The preparations of an executor that has no grammars. Only one can be met: that of any text."""

    def __init__(
        self, grammar: Grammar, executor: str, ends_s: float | None = None, clock: Callable[[], float] = lambda: math.inf
    ) -> None:
        """ends_s: when the preparation ends, on the clock."""
        self._grammar = grammar
        self._executor = executor
        self.ends_s = ends_s
        self._clock = clock

    def poll(self) -> bool:
        if self.ends_s is not None and self._clock() < self.ends_s:
            return False
        if self._grammar != ANY_TEXT:
            message = f"{self._grammar.kind}: {self._executor} knows no grammars: serve a model to use them"
            raise BadRequest(message, field=self._grammar.kind)
        return True


ANY_TEXT = Grammar("regex", ".*")


def check_text(grammar: Grammar, name: str | None = None) -> None:
    """Raises BadRequest for what would take too long to compile, and for a schema that answers could not be held to. name: of the
    field that brought it; None: its kind."""
    kind, text, name = grammar.kind, grammar.text, name or grammar.kind
    if kind == "regex":
        check_regex(text, name)
        return
    check_size(name, kind, text)
    if kind != "ebnf":
        try:
            parsed: Any = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise BadRequest(f"{name} is not JSON: {error}", field=name) from error
        check_schema(parsed, name) if kind == "json_schema" else check_structural_tag(parsed, name)
