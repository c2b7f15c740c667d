"""The wire as data: every type that crosses from one release to another, its fields, and what both ends compute alike.

Owns the description, its file, and the comparison of two. Knows no table of versions: `test_versions.py` says what may differ.

    python -m tests.common.wire      when a release is made: writes what it speaks to released_wire.json, with its commit

The comparison is one-sided: the later description must take in all that the earlier one may send, and send to it nothing but what
it takes in or ignores.
"""

import json
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import msgspec
import numpy as np
from msgspec import inspect
from numpy.typing import NDArray

from common.ids import ROUTER, AttemptId, RequestId, Variant, pack_ids, shard_of
from common.messages import WIRE_VERSION, DecodeInbox, DetokenizerInbox, PrefillInbox, RouterInbox
from common.messages.ranks import RankHello, RankRefused
from common.pages.host_memory import digest
from common.pages.layout import KVLayout, heads_of
from common.pages.radix_cache import BlockNames
from kv_transfer.cma import _CmaAddress
from kv_transfer.mooncake import _MooncakeAddress
from kv_transfer.torch_transport import _TorchAddress
from tests.rig.previous import RELEASED, ROOT
from tests.rig.report import say

INBOXES: dict[str, Any] = {
    "router": RouterInbox,
    "prefill": PrefillInbox,
    "decode": DecodeInbox,
    "detokenizer": DetokenizerInbox,
    "leader": RankHello,
    "follower": RankRefused,
}
"""What may come from another release. Of the ranks of one instance only the refusal does."""
DESCRIPTORS = (_CmaAddress, _MooncakeAddress, _TorchAddress)
"""What transports write into `PoolDescriptor.wire`; NIXL's is a matter of NIXL."""
Description = dict[str, Any]


def describe() -> Description:
    """The wire of this very code."""
    types: dict[str, Any] = {}
    inboxes = {name: sorted(each.__name__ for each in get_args(inbox) or (inbox,)) for name, inbox in INBOXES.items()}
    roots = [each for inbox in INBOXES.values() for each in get_args(inbox) or (inbox,)]
    waiting = list(inspect.multi_type_info([*roots, *DESCRIPTORS]))
    while waiting:
        info = waiting.pop()
        if isinstance(info, inspect.StructType | inspect.NamedTupleType) and info.cls.__name__ not in types:
            types[info.cls.__name__] = _struct(info)
        waiting += _parts(info)
    return {"version": WIRE_VERSION, "inboxes": inboxes, "types": dict(sorted(types.items())), "computed": _computed()}


def _struct(info: "inspect.StructType | inspect.NamedTupleType") -> dict[str, Any]:
    """Fields stand in their order, which counts where they have no names on the wire."""
    fields = {field.encode_name: _text(field.type) + _default(field) for field in info.fields}
    if isinstance(info, inspect.NamedTupleType):
        return {"form": "closed tuple", "fields": fields}
    form = "array" if info.array_like else "map"
    return {"form": f"{form}, closed" if info.forbid_unknown_fields else form, "tag": info.tag, "fields": fields}


def _default(field: inspect.Field) -> str:
    if field.name == "wire_version":
        return " = that of the release"
    if field.default is not msgspec.NODEFAULT:
        return f" = {_json(field.default)}"
    return "" if field.default_factory is msgspec.NODEFAULT else f" = {_json(field.default_factory())}"


def _json(value: Any) -> str:
    return json.dumps(msgspec.to_builtins(value), sort_keys=True)


def _parts(info: inspect.Type) -> Iterator[inspect.Type]:
    match info:
        case inspect.StructType() | inspect.NamedTupleType():
            yield from (field.type for field in info.fields)
        case inspect.UnionType():
            yield from info.types
        case inspect.TupleType():
            yield from info.item_types
        case inspect.DictType():
            yield from (info.key_type, info.value_type)
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType() | inspect.FrozenSetType():
            yield info.item_type
        case inspect.Metadata():
            yield info.type
        case _:
            pass


def _text(info: inspect.Type) -> str:
    """A type in one line; what it may hold is part of it."""
    match info:
        case inspect.Metadata():
            return _text(info.type)
        case inspect.StructType() | inspect.NamedTupleType():
            return info.cls.__name__
        case inspect.UnionType():
            return " | ".join(sorted(map(_text, info.types)))
        case inspect.LiteralType():
            return f"one of {', '.join(sorted(map(repr, info.values)))}"
        case inspect.TupleType():
            return f"({', '.join(map(_text, info.item_types))})"
    name = type(info).__name__.removesuffix("Type").lower()
    inside = f"[{', '.join(map(_text, _parts(info)))}]" if list(_parts(info)) else ""
    known = msgspec.structs.asdict(info)
    limits = [f"{limit} {known[limit]}" for limit in LIMITS if known.get(limit) is not None]
    return " ".join([f"{name}{inside}", *limits])


LIMITS = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern")


def _computed() -> dict[str, Any]:
    """What two processes compute from the same, and must find the same."""
    key = AttemptId(RequestId("request-7"), 2, ROUTER)
    layout = KVLayout(layers=2, kv_heads=4, head_dim=8, page_size=16, dtype="bfloat16", order="head")
    names = BlockNames.of(pack_ids(range(300)), 16, Variant(), "salt")
    return {
        "the detokenizer of a key": [shard_of(key, shards) for shards in (1, 2, 7)],
        "the names of a prompt's blocks": zlib.crc32(json.dumps(list(names.names)).encode()),
        "the bytes of a page, and its strides": [layout.page_bytes, list(layout.strides), layout.version],
        "the heads of a rank": [list(heads_of(rank, 4, 2)) for rank in range(4)],
        "the digest of pages": digest([_page(3), _page(4)]).hex(),
    }


def _page(seed: int) -> NDArray[np.uint8]:
    return (np.arange(64) * seed % 256).astype(np.uint8)


def differences(old: Description, new: Description, types: Mapping[str, int], fields: Mapping[str, int]) -> Iterator[str]:
    """What a peer that speaks `old` would not bear, each with what to do. types and fields: those that are told to be added, as
    `Type` and `Type.field`, with the version that added them."""
    fix = "common/messages/__init__.py"
    for inbox, names in old["inboxes"].items():
        gone = sorted(set(names) - set(new["inboxes"][inbox]))
        yield from (f"{name} comes from version {old['version']} to the {inbox}: take it for one release more" for name in gone)
        added = sorted(set(new["inboxes"][inbox]) - set(names) - types.keys())
        yield from (f"{name} is new for the {inbox}: name it in VERSIONS of {fix}, among the types" for name in added)
    for name, value in new["computed"].items():
        if name in old["computed"] and value != old["computed"][name]:
            yield f"{name}: both ends compute it, and version {old['version']} does so in another way: keep that"
    for name, type_ in new["types"].items():
        if name not in old["types"]:
            if name not in types:
                yield f"{name} is a new type: name it in VERSIONS of {fix}, among the types"
        else:
            yield from _field_differences(name, old["types"][name], type_, types, fields)


def _field_differences(
    name: str, old: Mapping[str, Any], new: Mapping[str, Any], types: Mapping[str, int], fields: Mapping[str, int]
) -> Iterator[str]:
    keep = "keep it as it is, and add a field with a default instead"
    if (old["form"], old.get("tag")) != (new["form"], new.get("tag")):
        yield f"{name} was a {old['form']} with the tag {old.get('tag')}: {keep}"
    for field, text in old["fields"].items():
        if field not in new["fields"]:
            yield f"{name}.{field} is gone: the neighbour sends it and may need it: keep it for one release more"
        elif _without(new["fields"][field], types) != text:
            yield f"{name}.{field} was `{text}`, and is `{new['fields'][field]}`: {keep}"
    added = [field for field in new["fields"] if field not in old["fields"]]
    for field in added:
        if "closed" in old["form"]:
            yield f"{name}.{field} is new in a {old['form']}: the neighbour refuses what is longer: make another type"
        elif f"{name}.{field}" not in fields:
            yield f"{name}.{field} is new: name it in VERSIONS of common/messages/__init__.py, among the fields"
        elif " = " not in new["fields"][field]:
            yield f"{name}.{field} is new and has no default: the neighbour does not send it"
    if new["form"] == "array" and list(new["fields"])[: len(old["fields"])] != list(old["fields"]):
        yield f"{name} has its fields in another order, and they have no names on the wire: new ones come last"


def _without(text: str, types: Mapping[str, int]) -> str:
    """A field's text with the added members of its union left out."""
    union, equals, default = text.partition(" = ")
    return " | ".join(part for part in union.split(" | ") if part not in types) + equals + default


def main() -> int:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    RELEASED.write_text(json.dumps({"commit": commit, **describe()}, indent=1) + "\n")
    say(f"wrote {RELEASED}: the wire of version {WIRE_VERSION}, commit {commit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
