"""The form of a digest, against published check values of CRC-32."""

import numpy as np

from common.pages.host_memory import digest


def test_a_digest_is_the_crc_32_of_each_page_in_little_endian() -> None:
    """The check value of CRC-32/ISO-HDLC (reveng.sourceforge.io/crc-catalogue), and the CRC of four zeros."""
    pages = [np.frombuffer(b"123456789", dtype=np.uint8), np.zeros(4, dtype=np.uint8)]
    assert digest(pages) == bytes.fromhex("2639f4cb" + "1cdf4421")


def test_no_pages_have_no_digest() -> None:
    assert digest([]) == b""
