"""Grammars, compiled for the model's vocabulary by xgrammar: on threads of their own, each once, the latest ones kept.

Owns the cache, and what is refused before xgrammar sees it. Does not know requests, rows or logits. xgrammar and the tokenizer
are loaded for the first grammar, on one of these threads: an instance that gets none pays nothing.
"""

import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, assert_never

import msgspec

from common.engine.grammar_limits import check_size
from common.engine.json_schemas import check_regex, check_schema, check_structural_tag
from common.errors import BadRequest
from common.sampling_params import Grammar

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler

THREADS = 2
KEPT_GRAMMARS, KEPT_BYTES = 256, 512 * 2**20
MAX_WHITESPACE = 16
"""So many characters of white space at most between two parts of a JSON text. Without a limit, a model may write nothing else."""


class Preparation(Protocol):
    """A grammar that is being made ready."""

    @property
    def ends_s(self) -> float | None:
        """When it ends, if that is known in advance; None: its process's loop is woken then."""

    def poll(self) -> bool:
        """Whether rows with this grammar can be launched now. Raises BadRequest when they never can."""


class Vocabulary(Protocol):
    def __call__(self) -> "GrammarCompiler":
        """Make the compiler for the vocabulary. Takes seconds."""


class Grammars:
    def __init__(self, make_compiler: Vocabulary) -> None:
        self._make_compiler = make_compiler
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammars")
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._known: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        """By use, the latest last. Those that are being compiled too, so that equal ones are compiled once."""

    def prepare(self, grammar: Grammar, wake: Callable[[], None]) -> "CompiledSoon":
        """Begin to compile, unless it is compiled. Waits for nothing. wake: called when it has ended, on any thread."""
        future = self._future(grammar)
        future.add_done_callback(lambda _: wake())
        return CompiledSoon(future)

    def compiled(self, grammar: Grammar) -> "CompiledGrammar":
        """The compiled grammar. Waits for it if it is not there, which is so when too many others came after its preparation.
        Raises BadRequest."""
        return self._future(grammar).result()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _future(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        with self._lock:
            future = self._known.get(grammar)
            if future is not None:
                self._known.move_to_end(grammar)
                return future
            future = self._known[grammar] = self._threads.submit(self._compile, grammar)
        future.add_done_callback(partial(self._done, grammar))
        return future

    def _done(self, grammar: Grammar, future: "Future[CompiledGrammar]") -> None:
        with self._lock:
            if future.cancelled() or future.exception() is not None:
                self._known.pop(grammar, None)
            done = [each for each in self._known.values() if each.done() and not each.cancelled() and each.exception() is None]
            excess_bytes = sum(each.result().memory_size_bytes for each in done) - KEPT_BYTES
            for kept in list(self._known):
                known = self._known[kept]
                if kept == grammar or known not in done or (len(self._known) <= KEPT_GRAMMARS and excess_bytes <= 0):
                    continue
                excess_bytes -= known.result().memory_size_bytes
                del self._known[kept]

    def _compile(self, grammar: Grammar) -> "CompiledGrammar":
        check_text(grammar)
        with self._making:
            if self._compiler is None:
                self._compiler = self._make_compiler()
        try:
            return _compile(self._compiler, grammar)
        except (RuntimeError, ValueError, TypeError) as error:
            raise BadRequest(f"{grammar.kind}: {_reason(str(error))}", field=grammar.kind) from error


class CompiledSoon:
    """Implements `Preparation`."""

    ends_s: float | None = None

    def __init__(self, future: "Future[CompiledGrammar]") -> None:
        self._future = future

    def poll(self) -> bool:
        if not self._future.done():
            return False
        self._future.result()
        return True


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


def compiler_of(path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> "GrammarCompiler":
    """The compiler for a checkpoint's vocabulary. vocab_size: the model's, which may have more ids than its tokenizer."""
    from transformers import PreTrainedTokenizerFast
    from xgrammar import GrammarCompiler, TokenizerInfo

    if not eos_token_ids:
        raise BadRequest("a grammar needs a model with an end-of-text token, and this model has none", field="grammar")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids))
    return GrammarCompiler(info, max_threads=THREADS, cache_enabled=False)


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


def _compile(compiler: "GrammarCompiler", grammar: Grammar) -> "CompiledGrammar":
    match grammar.kind:
        case "json_schema":
            return compiler.compile_json_schema(grammar.text, max_whitespace_cnt=MAX_WHITESPACE)
        case "regex":
            return compiler.compile_regex(grammar.text)
        case "ebnf":
            return compiler.compile_grammar(grammar.text)
        case "structural_tag":
            return compiler.compile_structural_tag(json.dumps(_with_bounded_space(json.loads(grammar.text))))
        case _:
            assert_never(grammar.kind)


def _with_bounded_space(tag: Any) -> Any:
    """The structural tag with the limit on white space in each of its JSON schemas that has none."""
    match tag:
        case list():
            return [_with_bounded_space(each) for each in tag]
        case {"type": "json_schema"}:
            return {"max_whitespace_cnt": MAX_WHITESPACE} | tag
        case dict():
            return {key: _with_bounded_space(each) for key, each in tag.items()}
        case _:
            return tag


_WHERE_IN_XGRAMMAR = re.compile(r"^\[[\d:]+\] \S+: (Check failed: \(.*?\) is false: )?", re.DOTALL)


def _reason(message: str) -> str:
    """xgrammar's message without the line of its source: "[07:15:38] /project/cpp/regex_converter.cc:83: Regex parsing …"."""
    return " ".join(_WHERE_IN_XGRAMMAR.sub("", message).split())[:500]
