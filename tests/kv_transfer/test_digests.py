"""Digests of pages, compared with what was sent."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.handoff_target import corrupt_pages

WORDS = st.lists(st.integers(0, 2**32 - 1), max_size=8)


def packed(digests: list[int]) -> bytes:
    return b"".join(digest.to_bytes(4, "little") for digest in digests)


@given(sent=WORDS, landed=WORDS)
def test_a_page_is_corrupt_when_its_digests_differ_or_one_is_missing(sent: list[int], landed: list[int]) -> None:
    alike = sum(ours == theirs for ours, theirs in zip(sent, landed, strict=False))
    assert corrupt_pages(packed(sent), packed(landed)) == max(len(sent), len(landed)) - alike


@given(digests=WORDS)
def test_pages_that_landed_as_they_were_sent_are_sound(digests: list[int]) -> None:
    assert corrupt_pages(packed(digests), packed(digests)) == 0


@pytest.mark.parametrize("byte", range(8))
def test_every_byte_of_a_digest_counts(byte: int) -> None:
    landed = np.arange(8, dtype=np.uint8)
    sent = landed.copy()
    sent[byte] ^= 1
    assert corrupt_pages(sent.tobytes(), landed.tobytes()) == 1


def test_an_incomplete_digest_counts_as_missing() -> None:
    assert corrupt_pages(packed([1]) + packed([2])[:3], packed([1, 2])) == 1
