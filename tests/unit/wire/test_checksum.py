"""The checksum of a block: the same however its bytes come, another one for anything else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from kvstore.wire.record import PIECE_BYTES, checksum_of
from tests.kit import reference

HEADER = b"an address"
SIZES = (
    *(1, 100, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1),
    *(2 * PIECE_BYTES, 3 * PIECE_BYTES + 4097),
)


def payload(size: int) -> bytes:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()


def pieces(data: bytes) -> list[tuple[int, bytes]]:
    begins = range(0, len(data), PIECE_BYTES)
    return [(index, data[at : at + PIECE_BYTES]) for index, at in enumerate(begins)]


@given(size=st.sampled_from(SIZES), cuts=st.lists(st.floats(0, 1), max_size=8))
@example(size=2 * PIECE_BYTES, cuts=[0.5, 0.5, 0.25, 1.0])
def test_however_the_bytes_come(size: int, cuts: list[float]) -> None:
    data = payload(size)
    expected = reference.checksum(HEADER, data)
    at = [0, *sorted(int(cut * size) for cut in cuts), size]
    parts = [memoryview(data)[a:b] for a, b in itertools.pairwise(at)]
    assert checksum_of(HEADER, parts) == expected


def test_every_place_counts() -> None:
    """Bits on both sides of each border, order and number of pieces, address."""
    data = bytearray(payload(3 * PIECE_BYTES))
    first, second, third = (bytes(piece) for _, piece in pieces(bytes(data)))
    sums = [
        checksum_of(HEADER, its)
        for its in (
            [first, second, third],
            [second, first, third],
            [first, second],
            [first, second, third, b"\0"],
            [first],
            [],
        )
    ]
    sums.append(checksum_of(HEADER + b"\0", [data]))
    for at in (0, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES - 1, len(data) - 1):
        data[at] ^= 1
        sums.append(checksum_of(HEADER, [data]))
        data[at] ^= 1
    assert len(set(sums)) == len(sums)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (100, "49e697e7b6c5011567bb36adc30fd60c"),
        (2 * PIECE_BYTES + 100, "b4535522ff41f174d62b12767d967dfb"),
    ],
)
def test_the_form_is_the_one_of_this_version(size: int, expected: str) -> None:
    """Another value: raise RECORD_VERSION, SEGMENT_VERSION, LAYOUT_VERSION, PROTOCOL_VERSION."""
    data = np.arange(size, dtype=np.uint32).astype(np.uint8).tobytes()
    assert checksum_of(HEADER, [data]).hex() == expected
