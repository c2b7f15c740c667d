"""The table of wire versions against the code: what the released version sends is taken in, and what is new is told and bearable.

The released version is described in `released_wire.json`; its real code, from the project's history, judges the messages too.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from common.messages import OLDEST, SINCE, VERSIONS, WIRE_VERSION, AnyMessage, DoTask, FlushCache, since
from common.messages.variants import ReadWeight
from tests.common.test_messages import SAMPLES
from tests.common.wire import INBOXES, Description, describe, differences
from tests.rig.previous import RELEASED, NoHistory, run_python, unpack_previous

HOW = "from tests.common.wire import *; print(json.dumps(describe()))"
TYPES = dict(SINCE)
FIELDS = {field: number for number, version in VERSIONS.items() for field in version.fields}
CURRENT, FORMER = VERSIONS[WIRE_VERSION], WIRE_VERSION - 1


def released() -> Description:
    description: Description = json.loads(RELEASED.read_text())
    return description


def test_the_released_version_works_with_this_one() -> None:
    assert list(differences(released(), describe(), TYPES, FIELDS)) == []


def test_the_table_follows_on_the_released_version_and_names_what_is_there() -> None:
    assert released()["version"] == FORMER, "after a release: python -m tests.common.wire, then raise WIRE_VERSION"
    assert max(VERSIONS) == WIRE_VERSION and all(version.words for version in VERSIONS.values())
    types = describe()["types"]
    assert set(CURRENT.types) <= types.keys() - released()["types"].keys()
    for field in CURRENT.fields:
        name, _, of_it = field.partition(".")
        assert of_it in types[name]["fields"] and of_it not in released()["types"][name]["fields"]


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return unpack_previous(tmp_path_factory.mktemp("previous"))
    except NoHistory as error:
        pytest.skip(str(error))


def test_the_released_code_says_what_its_description_says(previous: Path) -> None:
    """Described by the same script, over the other code."""
    for name in ("tests/common/wire.py", "tests/rig/previous.py"):
        (previous / name).write_text((RELEASED.parents[2] / name).read_text())
    described = json.loads(run_python(previous, HOW))
    assert {"commit": released()["commit"], **described} == released()


JUDGE = """
import sys
import msgspec
from common.messages import AnyMessage
frames = msgspec.msgpack.decode(sys.stdin.buffer.read())
taken = [msgspec.msgpack.encode(msgspec.msgpack.decode(frame, type=AnyMessage)) for frame in frames]
sys.stdout.buffer.write(msgspec.msgpack.encode(taken))
"""


def test_the_released_code_takes_in_every_message_that_may_be_sent_to_it_and_what_it_sends_is_taken_in(previous: Path) -> None:
    """Ranks are of one release, so theirs are left out."""
    between = {type_ for inbox in INBOXES.values() for type_ in get_args(inbox)}
    samples = [each for each in SAMPLES if type(each) in between and since(each) <= FORMER]
    assert len({type(each) for each in samples}) == len(between) - len(TYPES.keys() & {each.__name__ for each in between})
    frames = msgspec.msgpack.encode([msgspec.msgpack.encode(each) for each in samples])
    for sample, back in zip(samples, msgspec.msgpack.decode(run_python(previous, JUDGE, frames)), strict=True):
        new = {field.partition(".")[2] for field in FIELDS if field.startswith(f"{type(sample).__name__}.")}
        kept = {name: value for name, value in msgspec.structs.asdict(sample).items() if name not in new}
        taken = msgspec.structs.asdict(msgspec.msgpack.decode(back, type=AnyMessage))
        assert {name: value for name, value in taken.items() if name not in new} == kept


def test_a_message_is_as_new_as_what_it_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    task = DoTask(number=1, task=ReadWeight(name="w", rows=1))
    assert since(task) == since(FlushCache()) == OLDEST
    monkeypatch.setitem(SINCE, "ReadWeight", WIRE_VERSION)
    monkeypatch.setitem(SINCE, "FlushCache", WIRE_VERSION)
    assert since(task) == since(FlushCache()) == WIRE_VERSION


def test_what_is_carried_in_messages_that_were_there_before_is_looked_at_before_it_is_sent() -> None:
    """`since` looks into one message only. `parts` is a new field, which older readers ignore with all that is in it."""
    before, now = released()["types"], describe()["types"]
    carriers = {
        f"{name}.{field}"
        for name in before
        for field, text in now[name]["fields"].items()
        if set(CURRENT.types) & set(text.partition(" = ")[0].split(" | "))
    }
    assert carriers <= {"DoTask.task", "ExpectAnswer.parts"}


OLD: Description = {
    "version": FORMER,
    "inboxes": {"router": ["Ping"]},
    "computed": {"sum": 3},
    "types": {
        "Ping": {"form": "map", "tag": "Ping", "fields": {"sent": "int = 0", "kind": "Left | Right"}},
        "Pair": {"form": "array", "tag": None, "fields": {"a": "int", "b": "int"}},
        "Name": {"form": "closed tuple", "fields": {"id": "str"}},
    },
}


def changed(change: Callable[[dict[str, Any]], object]) -> Description:
    new = copy.deepcopy(OLD)
    change(new)
    return new


def fields(new: Description, name: str) -> dict[str, str]:
    of_it: dict[str, str] = new["types"][name]["fields"]
    return of_it


BREAKS: dict[str, tuple[Callable[[Description], object], str]] = {
    "a field that is gone": (lambda new: fields(new, "Ping").pop("sent"), "Ping.sent is gone"),
    "a type that is narrower": (lambda new: fields(new, "Ping").update(sent="int ge 0 = 0"), "Ping.sent was `int = 0`"),
    "another default": (lambda new: fields(new, "Ping").update(sent="int = 1"), "Ping.sent was `int = 0`"),
    "a field that is not told": (lambda new: fields(new, "Ping").update(more="int = 0"), "Ping.more is new: name it"),
    "a field without a default": (lambda new: fields(new, "Ping").update(told="int"), "Ping.told is new and has no default"),
    "a longer tuple": (lambda new: fields(new, "Name").update(told="int = 0"), "Name.told is new in a closed tuple"),
    "a field in between": (
        lambda new: new["types"]["Pair"].update(fields={"a": "int", "told": "int = 0", "b": "int"}),
        "Pair has its fields in another order",
    ),
    "another tag": (lambda new: new["types"]["Ping"].update(tag="Pong"), "Ping was a map with the tag Ping"),
    "a union with a member that is not told": (
        lambda new: fields(new, "Ping").update(kind="Left | Middle | Right"),
        "Ping.kind was `Left | Right`",
    ),
    "a message that is not told": (lambda new: new["inboxes"]["router"].append("Pong"), "Pong is new for the router"),
    "a message that is gone": (lambda new: new["inboxes"]["router"].clear(), "Ping comes from version"),
    "a type that is not told": (lambda new: new["types"].update(More=OLD["types"]["Pair"]), "More is a new type"),
    "something else computed": (lambda new: new["computed"].update(sum=4), "sum: both ends compute it"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_would_break_the_neighbour_is_named(name: str) -> None:
    change, words = BREAKS[name]
    told = {"Ping.told": WIRE_VERSION, "Pair.told": WIRE_VERSION, "Name.told": WIRE_VERSION}
    (found,) = differences(OLD, changed(change), {}, told)
    assert found.startswith(words)


def test_what_is_added_and_told_breaks_nobody() -> None:
    def change(new: Description) -> None:
        fields(new, "Ping").update(told="int = 0", kind="Left | Middle | Right")
        fields(new, "Pair").update(told="int = 0")
        new["types"]["Middle"] = new["types"]["Pong"] = OLD["types"]["Ping"]
        new["inboxes"]["router"].append("Pong")
        new["computed"]["product"] = 2

    told = {"Ping.told": WIRE_VERSION, "Pair.told": WIRE_VERSION}
    assert list(differences(OLD, changed(change), {"Middle": WIRE_VERSION, "Pong": WIRE_VERSION}, told)) == []
