"""Every Python file of the product and its tests keeps the rules of `tests/shape/rules.py`, and each rule can be broken."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import pytest

from tests.shape import rules
from tests.shape.rules import Rule, Source

ROOT = Path(__file__).resolve().parents[2]
OPENING = '"""Owns nothing. Knows nothing."""\n'


def _name(rule: Rule) -> str:
    return rule.__name__


@dataclass
class Found:
    """What the files are found to be."""

    files: int = 0
    faults: dict[Rule, list[str]] = field(default_factory=lambda: {rule: [] for rule in rules.RULES})
    twice: list[str] = field(default_factory=list)
    catches_all: set[tuple[str, str]] = field(default_factory=set)
    """(file, function)."""


@pytest.fixture(scope="module")
def found() -> Iterator[Found]:
    """One file after the other: the nodes of all would be millions."""
    found, first = Found(), dict[str, PurePosixPath]()
    gc.disable()
    try:
        for source in rules.sources(ROOT):
            found.files += 1
            for rule, faults in found.faults.items():
                faults += map(str, rule(source))
            found.twice += map(str, rules.names_used_twice(source, first))
            blind = (function for function, handler in rules.handlers(source) if rules.is_blind(handler))
            found.catches_all |= {(str(source.path), function) for function in blind}
    finally:
        gc.enable()
    assert found.files > 50, "the files are not where they were"
    yield found


@pytest.mark.parametrize("rule", rules.RULES, ids=_name)
def test_every_file_keeps_the_rule(rule: Rule, found: Found) -> None:
    assert not found.faults[rule], "\n" + "\n".join(found.faults[rule])


def test_no_class_or_type_of_the_product_is_defined_in_two_files(found: Found) -> None:
    assert not found.twice, "\n" + "\n".join(found.twice)
    first, text = dict[str, PurePosixPath](), OPENING + "class Answer: ...\nLine = list[str]\n"
    twice = [rules.names_used_twice(Source.parse(path, text), first) for path in ("router/a.py", "common/b.py", "tests/c.py")]
    assert [str(fault) for faults in twice for fault in faults] == [
        "common/b.py:2: class Answer is defined in router/a.py too",
        "common/b.py:3: type Line is defined in router/a.py too",
    ]


def test_every_exception_to_a_rule_is_still_needed(found: Found) -> None:
    assert found.catches_all >= rules.BLIND_EXCEPT_ALLOWED.keys()


BROKEN: list[tuple[Rule, str, str, int]] = [
    (rules.short_files, "a.py", OPENING + "x = 1\n" * 600, 601),
    (rules.short_functions, "a.py", OPENING + "def f():\n" + "    x = 1\n" * 60, 2),
    (rules.opening_paragraph, "a.py", "x = 1\n", 1),
    (rules.opening_paragraph, "a.py", '"""Words"""\n', 1),
    (rules.no_globals, "a.py", OPENING + "def f():\n    global x\n    x = 1\n", 3),
    (rules.no_guessed_attributes, "a.py", OPENING + "hasattr(x, 'y')\n", 2),
    (rules.no_guessed_attributes, "a.py", OPENING + "getattr(x, 'y', 3)\n", 2),
    (rules.no_blind_except, "a.py", OPENING + "def f():\n    try:\n        g()\n    except:\n        pass\n", 5),
    (rules.no_blind_except, "a.py", OPENING + "try:\n    g()\nexcept Exception:\n    pass\n", 4),
    (rules.no_blind_except, "a.py", OPENING + "try:\n    g()\nexcept (ValueError, BaseException):\n    pass\n", 4),
    (rules.no_drawer, "common/utils.py", OPENING, 1),
    (rules.nothing_unfinished, "a.py", OPENING + "x = 1  # TO" + "DO: more\n", 2),
    (rules.full_sentences, "a.py", OPENING + 'x = 1\n"""Of an answer."""\n', 3),
    (rules.names_given_once, "a.py", OPENING + "LIMIT_S = 5.0\nLIMIT_S: float = 0.5\n", 3),
    (rules.no_pickle, "a.py", OPENING + "import pickle\n", 2),
    (rules.no_pickle, "a.py", OPENING + "from pickle import loads\n", 2),
    (rules.no_pickle, "a.py", OPENING + "socket.recv_pyobj()\n", 2),
    (rules.no_blanket_ignore, "a.py", OPENING + "x = 1  # type: " + "ignore\n", 2),
]


@pytest.mark.parametrize(("rule", "path", "text", "line"), BROKEN, ids=[f"{row[0].__name__}-{n}" for n, row in enumerate(BROKEN)])
def test_a_broken_rule_is_found_with_its_file_and_line(rule: Rule, path: str, text: str, line: int) -> None:
    (fault,) = rule(Source.parse(path, text))
    assert str(fault).startswith(f"{path}:{line}: ")


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (rules.no_guessed_attributes, "getattr(x, name)\n"),
        (rules.no_blind_except, "try:\n    g()\nexcept (ValueError, OSError):\n    pass\n"),
        (rules.no_blind_except, "try:\n    g()\nexcept Exception:\n    count()\n    raise\n"),
        (rules.no_blanket_ignore, "x = 1  # noqa: E501\ny = 'type: " + "ignore'\n"),
        (rules.nothing_unfinished, "x = 'todo lists'\n"),
    ],
)
def test_what_is_allowed_is_not_a_fault(rule: Rule, text: str) -> None:
    assert not list(rule(Source.parse("a.py", OPENING + text)))
