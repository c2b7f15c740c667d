"""Hostile mail: messages of a type that decode, with values that make no sense, and messages with one value that no type allows.

Owns what is drawn. Makes everything from the types of the messages, so a new message or field is drawn without a word here. Knows
no process: whoever draws says which names, lives, requests and addresses there are.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

from common.ids import AttemptId, pack_ids

NUMBERS = [0.0, 1.0, -1.0, 5.0, 0.01, 1e-320, 1e9, 1e15, -1e15]
INTEGERS = [0, 1, 2, 3, 7, 8, 19, 64, 10**6, 2**31 - 1, 2**31, 2**63 - 1, -1, -(2**63)]
ABSURD_NUMBERS = [float("nan"), float("inf"), float("-inf"), 1e300]
ABSURD_INTEGERS = [2**63, 2**64 - 1]
TEXTS = ["", "a", "é" * 50, "x" * 2000, "\x00", "../..", "{}", "[a-z]*", "cpu", "tcp://127.0.0.1:1", "ipc:///tmp/x"]
PACKED = [b"", pack_ids([300] * 20), pack_ids([5, 2**31 - 1]), pack_ids([1, 2, 3]), pack_ids(range(8)), b"\xc1" * 40, bytes(8)]
_type_of = functools.cache(inspect.type_info)
FIRST_NAMES = {"id", "peer", "router", "sender"}
LIVES = {"incarnation", "writer"}


@dataclass
class Known:
    """What there is in the fleet: some of what is drawn must be about something real."""

    names: Sequence[str]
    lives: Sequence[str]
    keys: Sequence[AttemptId]
    addresses: Sequence[str]
    numbers: Sequence[int] = ()
    """Versions and generations that are in use."""
    structs: Sequence[msgspec.Struct] = ()
    """Real ones, to be sent by somebody else or at another time."""


class Hostile:
    """Draws messages of a type, as bytes."""

    def __init__(self, random: Random, known: Known) -> None:
        self._random, self.known = random, known
        self._broken = False
        """One value that its type does not allow is still to be drawn."""

    def body(self, kind: type[msgspec.Struct], *, broken: bool = False) -> bytes:
        """A message. broken: it holds a value that its type does not allow, if it holds any that can be so."""
        self._broken = broken
        return msgspec.msgpack.encode(self._draw(_type_of(kind), ""))

    def _draw(self, of: inspect.Type, name: str) -> Any:
        pick = self._random.choice
        match of:
            case inspect.Metadata():
                return self._draw(of.type, name)
            case inspect.UnionType():
                return self._draw(pick(of.types), name)
            case inspect.StructType():
                return self._struct(of)
            case inspect.NamedTupleType():
                return [self._draw(field.type, field.name) for field in of.fields]
            case inspect.TupleType():
                return [self._draw(item, name) for item in of.item_types]
            case inspect.VarTupleType():
                least = of.min_length or 0
                if least and self._breaks():
                    return []
                return [self._draw(of.item_type, name) for _ in range(max(least, pick([0, 1, 1, 2, 3])))]
            case inspect.DictType():
                return {pick(TEXTS): self._draw(of.value_type, name) for _ in range(pick([0, 1, 2]))}
            case inspect.IntType():
                return self._number(of, [*INTEGERS, *self.known.numbers], ABSURD_INTEGERS)
            case inspect.FloatType():
                return self._number(of, NUMBERS, ABSURD_NUMBERS)
            case inspect.StrType():
                return self._text(of, name)
            case inspect.BytesType():
                return pick(PACKED) if not self._breaks() else b"abc"
            case inspect.BoolType():
                return pick([False, True])
            case inspect.NoneType():
                return None
            case inspect.LiteralType():
                return pick(of.values) if not self._breaks() else "nothing of these"
            case _:
                raise TypeError(f"hostile mail cannot draw {of}")

    def _breaks(self) -> bool:
        breaks = self._broken and self._random.random() < 0.5
        self._broken = self._broken and not breaks
        return breaks

    def _number(self, of: inspect.IntType | inspect.FloatType, values: Sequence[float], absurd: Sequence[float]) -> float:
        below = of.ge if of.ge is not None else float("-inf")
        above = of.le if of.le is not None else float("inf") if of.lt is None else of.lt - 1
        if self._breaks():
            return self._random.choice([*absurd, *(value for value in values if not below <= value <= above)])
        return self._random.choice([below, above, *(value for value in values if below <= value <= above)])

    def _text(self, of: inspect.StrType, name: str) -> str:
        pick = self._random.choice
        if of.max_length is not None and self._breaks():
            return "x" * (of.max_length + 1)
        if name in FIRST_NAMES or name in ("left", "decodes"):
            return pick(self.known.names)
        if name in LIVES:
            return pick(self.known.lives)
        if name in ("address", "inbox", "detokenizers"):
            return pick([*self.known.addresses, *TEXTS])
        return pick([text for text in TEXTS if len(text) <= (of.max_length or 10**6)])

    def _struct(self, of: inspect.StructType) -> Any:
        pick, chance = self._random.choice, self._random.random
        if of.cls is AttemptId and chance() < 0.8:
            return pick(self.known.keys)
        real = [each for each in self.known.structs if type(each) is of.cls]
        if real and chance() < 0.5 and not self._broken:
            return pick(real)
        drawn = {field.encode_name: self._draw(field.type, field.name) for field in of.fields if field.required or chance() < 0.4}
        if of.array_like:
            values = [drawn.get(field.encode_name, field.default) for field in of.fields]
            while values and values[-1] is msgspec.NODEFAULT:
                values.pop()
            return values if of.tag is None else [of.tag, *values]
        return drawn if of.tag is None else {of.tag_field: of.tag, **drawn}
