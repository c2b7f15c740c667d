"""Grammars, compiled for the model's vocabulary by xgrammar: off the loop, each once, the latest ones and those in use kept.

Owns the cache, the threads, whose grammar is compiled next, and what is refused before xgrammar sees it: structural tags are held
to an allow-list, because xgrammar ignores a key that it does not know. Does not know requests, rows or logits, nor where the
compiler runs (`compiler_process.py`). The tokenizer and a compiler are loaded for the first grammar, or ahead of it (`warm`); a
second compiler when two grammars are there at once.

Owners take turns by the work that they ask for, and each may have only so much waiting. An owner's turn begins where its turn
before has ended, on a clock that counts work instead of time, but not in the past. The turn that begins first is next; among
equals the shorter, then the older (start-time fair queueing; Goyal, Vin and Cheng, 1996). So an owner that has asked for nothing
yet comes before all that have, however much they have waiting.
"""

import contextlib
import copy
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from common.errors import BadRequest, Overloaded, TandemError, Unavailable
from common.executor import FutureWork, ended_work
from common.sampling_params import Grammar
from engine.grammar.json_schemas import as_list, check_regex, check_schema
from engine.grammar.strings import check_size

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

    from engine.grammar.compiler import GrammarVocabulary


# --- structural tags ---------------------------------------------------------------------------------------------------------

MAX_WHITESPACE = 16
"""So many characters of white space at most between two parts of a JSON text. Without a limit, a model may write nothing else."""
# Left out are the XML forms of JSON, whose white space has no end, and keys with which parts of a schema are not enforced
# (https://xgrammar.mlc.ai/docs/tutorials/structural_tag).
_CALLS = {"tags", "at_least_one", "stop_after_first"}
_KEYS: Mapping[str, set[str]] = {
    "const_string": {"value"},
    "json_schema": {"json_schema", "style", "any_order", "max_whitespace_cnt"},
    "any_text": {"excludes", "max_tokens", "max_chars"},
    "token": {"token"},
    "exclude_token": {"exclude_tokens"},
    "any_tokens": {"exclude_tokens", "max_tokens"},
    "grammar": {"grammar"},
    "regex": {"pattern"},
    "sequence": {"elements"},
    "or": {"elements"},
    "tag": {"begin", "content", "end"},
    "triggered_tags": _CALLS | {"triggers", "excludes"},
    "token_triggered_tags": _CALLS | {"trigger_tokens", "exclude_tokens"},
    "tags_with_separator": _CALLS | {"separator"},
    "optional": {"content"},
    "plus": {"content"},
    "star": {"content"},
    "repeat": {"content", "min", "max"},
    "dispatch": {"rules", "loop", "excludes"},
    "token_dispatch": {"rules", "loop", "exclude_tokens"},
}
_ONLY: Mapping[str, Any] = {"style": "json", "any_order": False}
"""Keys with the one value that is supported."""


def check_structural_tag(tag: Any, name: str) -> None:
    """Raises BadRequest for a structural tag that answers could not be held to. name: of the field, for the message."""
    if not isinstance(tag, dict) or tag.keys() != {"type", "format"} or tag["type"] != "structural_tag":
        raise BadRequest(f'{name} must be {{"type": "structural_tag", "format": …}}', field=name)
    _check(tag["format"], name, "format")


def _check(form: Any, name: str, where: str, default: str | None = None) -> None:
    """default: the type where none is given."""

    def refusal(problem: str) -> BadRequest:
        return BadRequest(f"{name}: at {where[-256:]}: {problem}", field=name)

    if not isinstance(form, dict):
        raise refusal("a format must be an object")
    kind = form.get("type", default)
    if not isinstance(kind, str) or kind not in _KEYS:
        raise refusal(f"type {str(kind)[:64]!r} is not supported: use one of {', '.join(sorted(_KEYS))}")
    for key in sorted(form.keys() - _KEYS[kind] - {"type"}):
        raise refusal(f"{key[:64]} is not supported in a format of type {kind}: leave it out")
    for key, only in _ONLY.items():
        if form.get(key, only) != only:
            raise refusal(f"{key} is supported as {only!r}: leave it out")
    match kind:
        case "json_schema":
            spaces = form.get("max_whitespace_cnt")
            if spaces is not None and not (type(spaces) is int and 1 <= spaces <= MAX_WHITESPACE):
                raise refusal(f"max_whitespace_cnt must be 1 to {MAX_WHITESPACE}")
            check_schema(form.get("json_schema"), name)
        case "regex" if isinstance(form.get("pattern"), str):
            check_regex(form["pattern"], name)
        case "grammar" if isinstance(form.get("grammar"), str):
            check_size(name, "ebnf", form["grammar"])
    for key, each, inner in _parts(form):
        _check(each, name, f"{where}.{key}", inner)


def _parts(form: dict[str, Any]) -> list[tuple[str, Any, str | None]]:
    """The formats in a format: where, what, and the type of one that gives none. What is no format at all xgrammar refuses."""
    parts: list[tuple[str, Any, str | None]] = [("content", form["content"], None)] if "content" in form else []
    parts += [(key, form[key], "token") for key in ("begin", "end") if isinstance(form.get(key), dict)]
    for key, default in (("elements", None), ("tags", "tag")):
        parts += [(f"{key}[{at}]", each, default) for at, each in enumerate(as_list(form.get(key)))]
    for at, rule in enumerate(as_list(form.get("rules"))):
        parts.append((f"rules[{at}][1]", rule[1] if isinstance(rule, list) and len(rule) == 2 else None, None))
    return parts


# --- whose grammar is next, and what is kept ---------------------------------------------------------------------------------

T = TypeVar("T")

MAX_OWNED, MAX_OWNED_S = 64, 120.0
"""So many grammars of one owner wait at most, and so much work, as it is estimated."""
LEAST_WORK_S, CHARACTER_S = 0.02, 1e-4
"""Estimated work of a grammar: its least, and what each character adds."""


def work_of(grammar: Grammar) -> float:
    """The estimated work of compiling it, in seconds of a processor."""
    return LEAST_WORK_S + CHARACTER_S * len(grammar.text)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A grammar that waits. serial: counts all of them, in the order in which they came."""

    work_s: float
    serial: int


@dataclass(slots=True, eq=False)
class _Owner(Generic[T]):
    waiting: dict[T, _Waiting] = field(default_factory=dict)
    """First come, first served."""
    begins_s: float = 0.0
    """When its next turn begins, on the clock of work."""
    compiling: int = 0


class CompileQueue(Generic[T]):
    """Items that wait for one of so many compilers. One that several owners wait for is compiled at the first of their turns.

    The owner "" stands for everybody when nobody has a key: it has no bounds of its own, and all compilers. Every other owner
    leaves one compiler to the others, where there are several: what it has there may take long."""

    def __init__(self, compilers: int) -> None:
        self._compilers = compilers
        self._owners: dict[str, _Owner[T]] = {}
        self._taken: dict[T, tuple[str, float]] = {}
        """What is being compiled: at whose turn, and the work that was estimated."""
        self._now_s = 0.0
        self._serial = 0

    def __len__(self) -> int:
        """How many wait or are being compiled."""
        return len({item for owner in self._owners.values() for item in owner.waiting}) + len(self._taken)

    def join(self, item: T, owner: str, work_s: float) -> None:
        """Wait for a compiler. An item that waits for this owner already, or is being compiled, stays where it is. Raises
        Overloaded when the owner has too much waiting."""
        mine = self._owners.setdefault(owner, _Owner())
        if item in mine.waiting or item in self._taken:
            return
        waiting, waiting_s = len(mine.waiting), sum(asked.work_s for asked in mine.waiting.values())
        if owner and (waiting >= MAX_OWNED or (waiting and waiting_s + work_s > MAX_OWNED_S)):
            bounds = f"{waiting} grammars wait to be compiled for the API key {owner}, about {waiting_s:.0f} s of work"
            raise Overloaded(f"{bounds}: send this one when they are done, or send smaller ones")
        self._serial += 1
        mine.waiting[item] = _Waiting(work_s, self._serial)

    def drop(self, leaves: Callable[[T, str], bool]) -> list[T]:
        """Take out the turns for which this holds. Returns the items that have none left."""
        dropped = [(item, owner) for name, owner in self._owners.items() for item in owner.waiting if leaves(item, name)]
        for item, owner in dropped:
            del owner.waiting[item]
        items = dict.fromkeys(item for item, _ in dropped)
        return [item for item in items if not any(item in owner.waiting for owner in self._owners.values())]

    def take(self) -> T | None:
        """The next one, which is compiled now; None while there is none that may be."""
        ready = [
            (max(owner.begins_s, self._now_s), asked.work_s, asked.serial, name)
            for name, owner in self._owners.items()
            if owner.waiting and owner.compiling < self._most_compilers(name)
            for asked in [next(iter(owner.waiting.values()))]
        ]
        if not ready:
            return None
        self._now_s, work_s, _, name = min(ready)
        mine = self._owners[name]
        item = next(iter(mine.waiting))
        for owner in self._owners.values():
            owner.waiting.pop(item, None)
        mine.begins_s = self._now_s + work_s
        mine.compiling += 1
        self._taken[item] = name, work_s
        return item

    def finish(self, item: T, spent_s: float) -> None:
        """It is compiled, or never will be. spent_s: the work that it was, which is counted in place of the estimate."""
        name, work_s = self._taken.pop(item)
        mine = self._owners[name]
        mine.compiling -= 1
        mine.begins_s += spent_s - work_s
        if len(self) == 0:
            self._owners.clear()
            self._now_s = 0.0

    def _most_compilers(self, owner: str) -> int:
        return max(1, self._compilers - 1) if owner else self._compilers


_log = logging.getLogger(__name__)
COMPILERS = 2
MAX_QUEUED = 256
"""So many grammars wait at most to be compiled."""
KEPT_GRAMMARS, KEPT_BYTES = 256, 512 * 2**20


class Compiling(Protocol):
    """Compiles grammars, one at a time."""

    def compile(self, grammar: Grammar) -> "CompiledGrammar":
        """Raises BadRequest for a grammar that cannot be used, now or later, and other errors of the tree."""

    def close(self) -> None:
        """End what it does. Any thread may call it."""


class _Entry:
    """A grammar of the cache. holders: the grammars of the requests that need it, by owner. It is kept while one of them
    exists."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = Grammar(grammar.kind, grammar.text)  # its own, which keeps no request's alive
        self.future: Future[CompiledGrammar] = Future()
        self.holders: dict[str, list[weakref.ref[Grammar]]] = {}

    @property
    def is_held(self) -> bool:
        return any(map(self.is_held_by, self.holders))

    def is_held_by(self, owner: str) -> bool:
        return any(holder() is not None for holder in self.holders.get(owner, ()))

    def hold(self, grammar: Grammar, owner: str) -> None:
        held = [holder for holder in self.holders.get(owner, ()) if holder() is not None]
        self.holders[owner] = [*held, weakref.ref(grammar)]

    @property
    def bytes(self) -> int:
        """0 before it is compiled, and for one that is refused."""
        if not self.future.done() or self.future.exception() is not None:
            return 0
        return self.future.result().memory_size_bytes


class Grammars:
    """make_vocabulary: called once, for the first grammar; may take seconds. make_compiler: called once for each thread."""

    def __init__(
        self, make_vocabulary: "Callable[[], GrammarVocabulary]", make_compiler: "Callable[[GrammarVocabulary], Compiling]"
    ) -> None:
        self._make_vocabulary, self._make_compiler = make_vocabulary, make_compiler
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._vocabulary: GrammarVocabulary | None = None
        self._compilers: list[Compiling] = []
        self._queue: CompileQueue[_Entry] = CompileQueue(COMPILERS)
        self._changed = threading.Condition(self._lock)
        """Notified when the queue has changed."""
        self._threads = 0
        self._closed = False
        self._known: OrderedDict[Grammar, _Entry] = OrderedDict()
        """By use, the latest last. Those that are being compiled too, so that equal ones are compiled once, and those that are
        refused, so that they are refused at once the next time."""

    def warm(self) -> FutureWork["CompiledGrammar"]:
        """Load the vocabulary and a compiler before a request needs them. Waits for nothing."""
        return self.prepare(ANY_TEXT, lambda: None)

    def prepare(self, grammar: Grammar, wake: Callable[[], None], owner: str = "") -> FutureWork["CompiledGrammar"]:
        """Begin to compile, unless it is compiled. Waits for nothing. wake: called when it has ended, on any thread. What is
        compiled is kept while this object `grammar` exists, which is as long as its request is open. owner: at whose turn."""
        with self._lock:
            unwanted = self._drop(_is_unwanted)
            entry = self._known.get(grammar) or _Entry(grammar)
            try:
                self._wait_in_line(entry, owner)
            except TandemError as error:
                entry = _Entry(grammar)
                entry.future.set_exception(error)
            else:
                entry.hold(grammar, owner)
                self._known[entry.grammar] = entry
                self._known.move_to_end(entry.grammar)
        _end(unwanted)
        return FutureWork(entry.future, wake, lambda _: READY)

    def compiled(self, grammar: Grammar) -> "CompiledGrammar":
        """The compiled grammar, which was prepared. Waits for nothing. Raises BadRequest when it is not there."""
        with self._lock:
            entry = self._known.get(grammar)
        if entry is None or not entry.future.done():
            raise BadRequest(f"{grammar.kind}: it was not prepared", field=grammar.kind)
        return FutureWork(entry.future).wait()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            compilers, waiting = list(self._compilers), self._drop(lambda entry, owner: True)
            self._changed.notify_all()
        for compiler in compilers:
            compiler.close()
        for entry in waiting:
            entry.future.set_exception(Unavailable("the instance stops"))

    def _wait_in_line(self, entry: _Entry, owner: str) -> None:
        """Until it is compiled, if it is not. Raises Overloaded when too many wait, Unavailable."""
        if entry.future.done():
            return
        if self._closed:
            raise Unavailable("the instance stops")
        waiting = len(self._queue)
        if waiting >= MAX_QUEUED and entry.grammar not in self._known:
            raise Overloaded(f"{waiting} grammars wait to be compiled: try again")
        self._queue.join(entry, owner, work_of(entry.grammar))
        if self._threads < min(COMPILERS, len(self._queue)):
            self._threads += 1
            threading.Thread(target=self._work, name="grammars", daemon=True).start()
        self._changed.notify()

    def _work(self) -> None:
        """Compile until the end. A daemon: it never delays the end of the process."""
        compiler: Compiling | None = None
        with contextlib.suppress(Exception):  # what fails here fails for the first grammar, which says so
            compiler = self._new_compiler()
            compiler.compile(ANY_TEXT)
        while (entry := self._next()) is not None:
            compiled: CompiledGrammar | None = None
            begun_s = time.monotonic()
            try:
                compiler = compiler or self._new_compiler()
                compiled = compiler.compile(entry.grammar)
            except TandemError as raised:
                error = raised
            except Exception as raised:  # noqa: BLE001 - the thread's outermost door; the preparation's poll raises it
                _log.exception("a grammar could not be compiled")
                error = TandemError(f"{entry.grammar.kind}: the compiler failed: {raised}")
            with self._lock:
                if compiled is None and not isinstance(error, BadRequest):
                    self._forget(entry)
            if compiled is None:
                entry.future.set_exception(copy.copy(error))
            else:
                entry.future.set_result(compiled)
            with self._lock:
                self._queue.finish(entry, time.monotonic() - begun_s)
                self._make_room()

    def _next(self) -> _Entry | None:
        """Wait for the next grammar that an open request needs; None at the end. One that none needs gives up its turn. It is
        forgotten at once, so a request that comes now begins anew."""
        while True:
            with self._lock:
                unwanted = self._drop(_is_unwanted)
                taken = self._queue.take()
                if taken is None and not unwanted and not self._closed:
                    self._changed.wait()
                    continue
            _end(unwanted)
            if taken is not None or self._closed:
                return taken

    def _drop(self, leaves: Callable[[_Entry, str], bool]) -> list[_Entry]:
        """Take out the turns for which this holds. Returns the grammars that have none left, which are forgotten."""
        dropped = self._queue.drop(leaves)
        for entry in dropped:
            self._forget(entry)
        return dropped

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


def _is_unwanted(entry: _Entry, owner: str) -> bool:
    return not entry.is_held_by(owner)


def _end(unwanted: list[_Entry]) -> None:
    for entry in unwanted:
        entry.future.set_exception(Unavailable("its request has ended"))


READY = "ready"
"""The result of making a grammar ready."""


def anything_goes(grammar: Grammar, executor: str) -> FutureWork[str]:
    """The preparation of an executor that has no grammars. Only one can be met: that of any text."""
    if grammar == ANY_TEXT:
        return ended_work(READY)
    message = f"{grammar.kind}: {executor} knows no grammars: serve a model to use them"
    return ended_work(BadRequest(message, field=grammar.kind))


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
