"""What is kept of what was learned: it comes back as it was, or it is nothing."""

from __future__ import annotations

import contextlib

import pytest
import xxhash
from hypothesis import example, given, strategies as st

from kvstore.types import PAGE_BYTES
from kvstore.wire.load import (
    LEARNED_BYTES_MAX,
    SPACES_MAX,
    Learned,
    NotLearned,
    SpacePace,
    Spent,
    decode_learned,
    encode_learned,
    still_spent,
    within_bounds,
)

LEARNED = Learned(
    500_000,
    (SpacePace("t", "ab" * 32, 50_000, 900), SpacePace("u", "0f" * 32)),
    Spent(3 << 30, 1_800_000_000),
)


def test_it_comes_back_as_it_was() -> None:
    text = encode_learned(LEARNED)
    assert len(text) == PAGE_BYTES
    assert decode_learned(text) == LEARNED
    assert decode_learned(encode_learned(Learned())) == Learned()


def test_the_longest_there_is_fits() -> None:
    spaces = tuple(
        SpacePace("\0" * 255, f"{n:064x}", 10**18, 10**18) for n in range(SPACES_MAX + 9)
    )
    text = encode_learned(within_bounds(Learned(10**18, spaces, Spent(2**62, 2**62))))
    assert len(text) <= LEARNED_BYTES_MAX
    assert len(decode_learned(text).spaces) == SPACES_MAX


@given(st.integers(0, 400), st.integers(1, 255))
@example(18, 1)
def test_a_flipped_bit_is_noticed_or_lies_in_the_padding(at: int, flip: int) -> None:
    text = bytearray(encode_learned(LEARNED))
    text[at] ^= flip
    with contextlib.suppress(NotLearned):
        assert decode_learned(bytes(text)) == LEARNED


@pytest.mark.parametrize("text", [b"", b"{}", b"[" * 100_000, b"\xff" * 4096, b'{"magic": 1}'])
def test_what_is_something_else_is_nothing(text: bytes) -> None:
    with pytest.raises(NotLearned, match="damaged"):
        decode_learned(text)


def test_another_version_is_nothing_and_says_so() -> None:
    text = encode_learned(LEARNED).replace(b'"version":1', b'"version":2')
    with pytest.raises(NotLearned, match="version 2"):
        decode_learned(text)


def test_absurd_numbers_are_moved_into_bounds() -> None:
    absurd = Learned(10**18, (SpacePace("t", "ab" * 32, 2**70 % 2**63 + 2**62, -5),))
    found = decode_learned(encode_learned(absurd))
    assert found == Learned(10**12, (SpacePace("t", "ab" * 32, 100_000_000, 1),))
    absurd = Learned(1, (SpacePace("t", "ab" * 32, 1, 10**18),))
    found = within_bounds(absurd)
    assert found == Learned(10_000, (SpacePace("t", "ab" * 32, 1_000, 100_000_000),))


def test_what_an_earlier_version_kept_is_read_without_what_it_did_not_know() -> None:
    body = b'{"disk_ns_per_mib":500000,"spaces":[]}'
    sum_ = xxhash.xxh3_128_hexdigest(body).encode()
    text = b'{"magic":"kvstore learned","version":1,"checksum":"%s","learned":%s}' % (sum_, body)
    assert decode_learned(text) == Learned(500_000)


@given(
    spent=st.builds(Spent, st.integers(-(2**62), 2**62), st.integers(-(2**62), 2**62)),
    day_bytes=st.integers(0, 2**50),
    now_s=st.integers(0, 2**40),
)
def test_whatever_was_kept_no_more_is_spent_than_there_is(
    spent: Spent, day_bytes: int, now_s: int
) -> None:
    left = decode_learned(encode_learned(Learned(spent=spent))).spent
    assert 0 <= still_spent(left, day_bytes=day_bytes, now_s=now_s) <= day_bytes
