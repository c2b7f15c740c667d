"""Every number that a message can carry has its bounds in its type, and packed ids are checked where they arrive."""

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect, structs

from common.ids import pack_ids
from common.messages import AnyMessage
from common.ranges import Amount, Count, Integer, Interval, Number, Size, TokenId
from tests.common.test_messages import SAMPLES

NO_IDS = {"wire", "packed", "embedding", "stored", "gone", "digests"}
"""Bytes that are no ids: who reads them compares their length with what it has."""


def inner(of: inspect.Type) -> list[inspect.Type]:
    """What a type is made of. A structure is not looked into."""
    match of:
        case inspect.Metadata():
            return [of.type]
        case inspect.UnionType():
            return list(of.types)
        case inspect.TupleType():
            return list(of.item_types)
        case inspect.CollectionType():
            return [of.item_type]
        case inspect.DictType():
            return [of.key_type, of.value_type]
        case inspect.NamedTupleType():
            return [field.type for field in of.fields]
        case _:
            return []


def fields() -> Iterator[tuple[type, str, inspect.Type]]:
    """Each field of each structure that messages are made of, with each type in it."""
    left, seen = [inspect.type_info(AnyMessage)], set[type]()
    while left:
        each = left.pop()
        left += inner(each)
        if isinstance(each, inspect.StructType) and each.cls not in seen:
            seen.add(each.cls)
            for field in each.fields:
                parts = [field.type]
                for part in parts:
                    parts += inner(part)
                    yield each.cls, field.name, part
                left.append(field.type)


def structures(value: object) -> Iterator[msgspec.Struct]:
    """All that are within it."""
    if isinstance(value, msgspec.Struct):
        yield value
        value = structs.astuple(value)
    if isinstance(value, tuple):
        for each in value:
            yield from structures(each)


def test_every_number_of_every_message_has_a_type_that_bounds_it_on_both_sides() -> None:
    loose = {
        f"{kind.__name__}.{name}"
        for kind, name, part in fields()
        if isinstance(part, inspect.IntType | inspect.FloatType)
        and ((part.ge is None and part.gt is None) or (part.le is None and part.lt is None))
    }
    assert not loose, "give them a type of common/ranges.py: Count, Size, TokenId, Seconds, Moment …"


@pytest.mark.parametrize("kind", [Amount, Number, Interval], ids=["Amount", "Number", "Interval"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e16, -1e16])
def test_what_is_no_finite_number_is_refused(kind: Any, value: float) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)


@pytest.mark.parametrize("kind", [Count, Size, TokenId, Integer], ids=["Count", "Size", "TokenId", "Integer"])
@pytest.mark.parametrize("value", [2**63, 2**64 - 1, 1.0, True])
def test_what_fits_no_signed_word_or_is_no_integer_is_refused(kind: Any, value: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)


def test_packed_ids_are_whole_and_not_negative() -> None:
    packed = {(kind, name) for kind, name, part in fields() if isinstance(part, inspect.BytesType) and name not in NO_IDS}
    seen = set()
    for each in (part for sample in SAMPLES for part in structures(sample)):
        for name in (name for kind, name in packed if kind is type(each)):
            seen.add((type(each), name))
            for wrong in (b"abc", pack_ids([1, -2])):
                with pytest.raises(ValueError, match=r"multiple|below"):
                    structs.replace(each, **{name: wrong})
    assert seen == packed
