"""The rules that every Python file keeps, each as a function from a file to what breaks it.

Owns the limits and the exceptions, each with its reason. Knows syntax only; `ruff` and `mypy` hold the rest.
"""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar, cast

FILE_LINES = 600
FUNCTION_LINES = 60
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
TYPE_NAME = re.compile(r"[A-Z]+[a-z]\w*")
BLANKET_IGNORE = re.compile(r"type:\s*ignore(?!\[)|noqa(?!:)")
PICKLES = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"})
PICKLING_CALLS = frozenset({"send_pyobj", "recv_pyobj"})

BLIND_EXCEPT_ALLOWED = {
    ("engine/torch_executor.py", "_launch_steps"): "the outermost door of a thread: the next poll raises what it caught",
    ("engine/torch_executor.py", "_complete_steps"): "the outermost door of a thread: the next poll raises what it caught",
    ("engine/grammar/grammars.py", "_work"): "the outermost door of a thread: the next poll raises what it caught",
    (
        "common/text/tokenizer_manager.py",
        "_refusing_panics",
    ): "a panic of Rust has a class that cannot be named; all else is raised again",
    ("kv_transfer/transfer_loop.py", "_run"): "the outermost door of a thread: the next call of the port raises what it caught",
    (
        "router/api/sending.py",
        "_take",
    ): "one of many streams whose news are handled together: the awaited end raises what it caught",
    ("router/api/batches.py", "_work"): "the outermost door of a batch: its owner is told that it failed",
    ("router/api/batches.py", "_response"): "the outermost door of a call: who sent the line gets what the application answered",
    ("router/api/grpc_server.py", "_serve"): "the outermost door of a call: grpcio would tell the client what it caught",
    ("router/api/sending.py", "_rest"): "it passes on what is thrown in: what runs within it meets the error",
    ("tests/router/test_endings.py", "_step_by_step"): "it passes on what is thrown in, as `_rest` does",
    ("launch/rank_setup.py", "_run"): "the outermost door of a thread: the main thread's next wait raises what it caught",
    ("tests/rig/forks.py", "_run"): "the outermost door of a process, which ends as an interpreter does",
    ("launch/child.py", "_run"): "the outermost door of a process: whoever started it must learn why it ended",
}
"""(file, function) that may catch everything, and why."""


N = TypeVar("N", bound=ast.AST)


@dataclass(frozen=True, slots=True)
class Source:
    """path: relative to the root of the repository. nodes: all of the tree's, by their class."""

    path: PurePosixPath
    text: str
    tree: ast.Module
    nodes: Mapping[type[ast.AST], Sequence[ast.AST]]

    @classmethod
    def parse(cls, path: str, text: str) -> "Source":
        tree, nodes = ast.parse(text), dict[type[ast.AST], list[ast.AST]]()
        for node in ast.walk(tree):
            nodes.setdefault(type(node), []).append(node)
        return cls(PurePosixPath(path), text, tree, nodes)

    def of(self, kind: type[N]) -> Sequence[N]:
        return cast(Sequence[N], self.nodes.get(kind, ()))

    @property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [*self.of(ast.FunctionDef), *self.of(ast.AsyncFunctionDef)]


@dataclass(frozen=True, slots=True)
class Fault:
    path: PurePosixPath
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}"


Rule = Callable[[Source], Iterator[Fault]]
FOLDERS = (
    "common",
    "engine",
    "prefill",
    "decode",
    "kv_transfer",
    "router",
    "simulation",
    "bench",
    "benchmarks",
    "launch",
    "demo",
    "tests",
)


def sources(root: Path) -> Iterator[Source]:
    """Every Python file of the product and of its tests."""
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        yield Source.parse(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))


def short_files(source: Source) -> Iterator[Fault]:
    lines = len(source.text.splitlines())
    if lines > FILE_LINES:
        yield Fault(source.path, lines, f"{lines} lines, more than {FILE_LINES}")


def short_functions(source: Source) -> Iterator[Fault]:
    for node in source.functions:
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES:
            yield Fault(source.path, node.lineno, f"{node.name} has {lines} lines, more than {FUNCTION_LINES}")


def opening_paragraph(source: Source) -> Iterator[Fault]:
    paragraph = (ast.get_docstring(source.tree) or "").strip().split("\n\n")[0]
    if len(paragraph.split()) < 2:
        yield Fault(source.path, 1, "does not open with what it owns and what it does not know")


def no_globals(source: Source) -> Iterator[Fault]:
    for node in source.of(ast.Global):
        yield Fault(source.path, node.lineno, f"global {', '.join(node.names)}")


def no_guessed_attributes(source: Source) -> Iterator[Fault]:
    for node in source.of(ast.Call):
        if isinstance(node.func, ast.Name):
            if node.func.id == "hasattr":
                yield Fault(source.path, node.lineno, "hasattr: ports are trusted")
            if node.func.id == "getattr" and len(node.args) + len(node.keywords) > 2:
                yield Fault(source.path, node.lineno, "getattr with a default: ports are trusted")


def no_blind_except(source: Source) -> Iterator[Fault]:
    for function, handler in handlers(source):
        if is_blind(handler) and (str(source.path), function) not in BLIND_EXCEPT_ALLOWED:
            yield Fault(source.path, handler.lineno, f"{function} catches everything: name the errors")


def no_drawer(source: Source) -> Iterator[Fault]:
    if source.path.stem in ("utils", "util", "helpers", "misc"):
        yield Fault(source.path, 1, "a drawer: name the file for what it owns")


def nothing_unfinished(source: Source) -> Iterator[Fault]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if found := UNFINISHED.search(line):
            yield Fault(source.path, number, f"{found.group()}: finish it, or say what does not work in the README")


def no_pickle(source: Source) -> Iterator[Fault]:
    for call in source.of(ast.Attribute):
        if call.attr in PICKLING_CALLS:
            yield Fault(source.path, call.lineno, f"{call.attr} unpickles what a peer sends")
    imports: list[ast.Import | ast.ImportFrom] = [*source.of(ast.Import), *source.of(ast.ImportFrom)]
    for node in imports:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for name in PICKLES.intersection(name.split(".")[0] for name in names):
            yield Fault(source.path, node.lineno, f"import of {name}: what it reads can run code")


def no_blanket_ignore(source: Source) -> Iterator[Fault]:
    """An ignore names the error that it silences. Only comments count, so that a text may speak of them."""
    if not BLANKET_IGNORE.search(source.text):
        return
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and BLANKET_IGNORE.search(token.string):
            yield Fault(source.path, token.start[0], "an ignore that does not name what it silences")


def full_sentences(source: Source) -> Iterator[Fault]:
    """A docstring is a sentence with a noun of its own."""
    for node in source.of(ast.Expr):
        if not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str) and node.value.value.lstrip().startswith("Of "):
            yield Fault(source.path, node.lineno, "a docstring that begins with “Of”: say what it is, then of what")


def names_used_twice(source: Source, first: dict[str, PurePosixPath]) -> Iterator[Fault]:
    """One name, one thing: no class and no type of the product is defined in two files. first: where each was seen, to which this
    adds."""
    if source.path.parts[0] == "tests":
        return
    for node in source.of(ast.ClassDef):
        if first.setdefault(node.name, source.path) != source.path:
            yield Fault(source.path, node.lineno, f"class {node.name} is defined in {first[node.name]} too")
    for name, line in _named_types(source.tree):
        if first.setdefault(name, source.path) != source.path:
            yield Fault(source.path, line, f"type {name} is defined in {first[name]} too")


def _named_types(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The types to which a file gives a name, such as unions, with their lines. Constants have names of another form."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and TYPE_NAME.fullmatch(target.id):
            yield target.id, node.lineno


def names_given_once(source: Source) -> Iterator[Fault]:
    """A file gives each of its names one value: what reads the first would get the second, without a word."""
    first: dict[str, int] = {}
    for node in source.tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and first.setdefault(target.id, node.lineno) != node.lineno:
                yield Fault(source.path, node.lineno, f"{target.id} has a value already, in line {first[target.id]}")


RULES: tuple[Rule, ...] = (
    short_files,
    short_functions,
    opening_paragraph,
    no_globals,
    no_guessed_attributes,
    no_blind_except,
    no_drawer,
    nothing_unfinished,
    no_pickle,
    no_blanket_ignore,
    full_sentences,
    names_given_once,
)


def handlers(source: Source) -> Iterator[tuple[str, ast.ExceptHandler]]:
    """Every handler, with the innermost function that it stands in."""
    for handler in source.of(ast.ExceptHandler):
        around = [each for each in source.functions if each.lineno <= handler.lineno <= (each.end_lineno or 0)]
        yield max(around, key=lambda each: each.lineno).name if around else "<module>", handler


def is_blind(handler: ast.ExceptHandler) -> bool:
    """Whether it catches everything and keeps it: one that ends in `raise` passes it on."""
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return False
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(name, ast.Name) and name.id in ("Exception", "BaseException") for name in caught)
