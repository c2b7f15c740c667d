"""The layout's arithmetic, compared with numpy's for an array of that shape; and the form of page digests."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.pages.host_memory import digest
from common.pages.layout import ITEM_BYTES, KVDtype, KVLayout, PageOrder

SMALL = st.integers(1, 5)
NUMPY_TYPES: dict[KVDtype, str] = {
    "float32": "float32",
    "bfloat16": "uint16",
    "float16": "float16",
    "float8_e4m3fn": "uint8",
    "uint8": "uint8",
}

LAYOUTS = st.builds(
    KVLayout,
    layers=SMALL,
    kv_heads=SMALL,
    head_dim=SMALL,
    page_size=SMALL,
    dtype=st.sampled_from(list(ITEM_BYTES)),
    order=st.sampled_from(["layer", "head"]),
)


def a_page(layout: KVLayout) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """A page as numpy makes it, its axes in the order (layer, key-or-value, head, token, dim)."""
    dtype = NUMPY_TYPES[layout.dtype]
    if layout.order == "layer":
        return np.zeros((layout.layers, 2, layout.kv_heads, layout.page_size, layout.head_dim), dtype)
    drawn = np.zeros((layout.kv_heads, layout.layers, 2, layout.page_size, layout.head_dim), dtype)
    return drawn.transpose(1, 2, 0, 3, 4)


@given(LAYOUTS)
def test_sizes_and_strides_are_those_of_the_array_that_is_drawn(layout: KVLayout) -> None:
    page = a_page(layout)
    assert layout.page_bytes == page.nbytes
    assert layout.slot_bytes == page[0, 0, 0, 0].nbytes
    of_numpy = [stride // page.itemsize for stride in page.strides]
    long_axes = [axis for axis in range(5) if page.shape[axis] > 1]  # numpy may choose any stride for an axis of one
    assert [layout.strides[axis] for axis in long_axes] == [of_numpy[axis] for axis in long_axes]


@given(LAYOUTS)
def test_the_strides_reach_every_element_of_a_page_once(layout: KVLayout) -> None:
    shape = (layout.layers, 2, layout.kv_heads, layout.page_size, layout.head_dim)
    offsets = (np.indices(shape).reshape(5, -1).T * np.array(layout.strides)).sum(axis=1)
    assert sorted(offsets) == list(range(layout.page_bytes // ITEM_BYTES[layout.dtype]))


@pytest.mark.parametrize(("order", "contiguous"), [("layer", 0), ("head", 2)])
def test_the_outer_axis_of_each_order_is_one_run(order: PageOrder, contiguous: int) -> None:
    layout = KVLayout(layers=3, kv_heads=4, head_dim=2, page_size=5, dtype="float32", order=order)
    sizes = (3, 2, 4, 5, 2)
    assert layout.strides[contiguous] * sizes[contiguous] == 3 * 2 * 4 * 5 * 2


@given(LAYOUTS, st.integers(0, 100))
def test_pages_hold_their_tokens_and_none_is_empty(layout: KVLayout, tokens: int) -> None:
    pages = layout.pages_for(tokens)
    assert pages * layout.page_size >= tokens
    assert (pages - 1) * layout.page_size < tokens or tokens == pages == 0


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "page_size"])
def test_a_size_below_1_is_refused_by_name(name: str) -> None:
    valid = KVLayout(layers=1, kv_heads=1, head_dim=1, page_size=1, dtype="float32")
    with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
        msgspec.structs.replace(valid, **{name: 0})
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.convert({**msgspec.to_builtins(valid), name: 0}, KVLayout)


def test_a_layout_survives_the_wire_and_layouts_that_differ_are_unequal() -> None:
    layout = KVLayout(layers=2, kv_heads=2, head_dim=4, page_size=16, dtype="bfloat16", order="head")
    data = msgspec.msgpack.encode(layout)
    assert msgspec.msgpack.decode(data, type=KVLayout) == layout
    assert layout != KVLayout(layers=2, kv_heads=2, head_dim=4, page_size=16, dtype="float16", order="head")
    with pytest.raises(msgspec.ValidationError, match="dtype"):
        msgspec.msgpack.decode(data.replace(b"bfloat16", b"float128"), type=KVLayout)


def test_a_digest_is_the_crc_32_of_each_page_in_little_endian() -> None:
    """The check value of CRC-32/ISO-HDLC (reveng.sourceforge.io/crc-catalogue), and the CRC of four zeros."""
    pages = [np.frombuffer(b"123456789", dtype=np.uint8), np.zeros(4, dtype=np.uint8)]
    assert digest(pages) == bytes.fromhex("2639f4cb" + "1cdf4421")


def test_no_pages_have_no_digest() -> None:
    assert digest([]) == b""
