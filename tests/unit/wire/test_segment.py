"""The on-disk form: what is written is read, and every way to be broken is seen; the checksum of a
block is the same however its bytes come, and another one for anything else."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from kvstore.types import PAGE_BYTES, Shard
from kvstore.wire.record import (
    PAGE_COVERED,
    PIECE_BYTES,
    BlockPage,
    Scope,
    Void,
    checksum_of,
    page_is_whole,
    parse_page,
    parse_prefix,
    seal_page,
    void_page,
    write_block_page,
)
from kvstore.wire.segment import (
    SegmentHead,
    Table,
    footer,
    footer_bytes_max,
    parse_footer,
    parse_segment_page,
    parse_store_page,
    parse_trailer,
    place_of,
    segment_page,
    store_page,
)
from tests.kit import reference
from tests.kit.reference import table_of

ID = b"i" * 16
HEAD = SegmentHead(b"d" * 16, ID, 7)
SCOPES = (
    Scope("t", b"s" * 32, Shard(0, 4, 0, 2), 5_000),
    Scope("ü" * 100, b"x" * 32, Shard(4, 8, 0, 2), 70_000),
)
shards = st.builds(Shard, *[st.integers(0, 2**32 - 1)] * 4)
tenants = st.text(max_size=60).filter(lambda name: len(name.encode()) <= 255)
scopes = st.builds(
    Scope, tenants, st.binary(min_size=32, max_size=32), shards, st.integers(1, 1 << 30)
)


def block_page(
    scope: Scope = SCOPES[0], *, place: int = 5, over: bytes = bytes(PAGE_BYTES)
) -> bytes:
    page = bytearray(over)
    write_block_page(
        memoryview(page),
        prefix=scope.prefix(),
        key=b"k" * 32,
        checksum=b"c" * 16,
        segment_id=ID,
        place=place,
    )
    return bytes(page)


def table(count: int = 3) -> Table:
    pages, scope_of, page = [], [], 1
    for row in range(count):
        pages.append(page)
        scope_of.append(row % 2)
        page += (3, 19)[row % 2]
    keys = b"".join(n.to_bytes(32, "big") for n in range(count))
    sums = b"".join(n.to_bytes(16, "big") for n in range(count))
    voids = [Void("t", None, 9)]
    return table_of(SCOPES, voids, pages=pages, scope_of=scope_of, keys=keys, checksums=sums)


def closed(what: Table, *, first_page: int) -> tuple[bytes, int]:
    """Footer bytes, and the size of the file that they end."""
    data = footer(HEAD, what, first_page=first_page)
    return data, first_page * PAGE_BYTES + len(data)


def parsed(data: bytes, size: int) -> Table | None:
    place = parse_trailer(data[-PAGE_BYTES:], HEAD, file_bytes=size)
    return None if place is None else parse_footer(data[: place.table_bytes], place, HEAD)


def test_nothing_of_an_earlier_page_stays() -> None:
    """Names of other tenants are on disk only beside their own blocks."""
    assert block_page(SCOPES[0], over=block_page(SCOPES[1])) == block_page(SCOPES[0])


@given(scopes)
def test_a_prefix_is_read_back(scope: Scope) -> None:
    assert parse_prefix(scope.prefix()) == scope
    assert parse_prefix(scope.prefix() + b"x") is None
    assert parse_prefix(scope.prefix()[:-1]) is None


@given(scopes, st.integers(1, 2**63 - 1))
def test_a_block_page_is_read_back_at_its_place_only(scope: Scope, place: int) -> None:
    page = block_page(scope, place=place)
    found = parse_page(page, segment_id=ID, place=place)
    assert found == BlockPage(scope, b"k" * 32, b"c" * 16)
    assert parse_page(page, segment_id=ID, place=place - 1) is None
    assert parse_page(page, segment_id=b"j" * 16, place=place) is None


@given(
    st.none() | tenants,
    st.none() | st.binary(min_size=32, max_size=32),
    st.integers(0, 2**63 - 1),
)
def test_a_void_page_is_read_back(tenant: str | None, space: bytes | None, before: int) -> None:
    void = Void(tenant, space, before)
    page = void_page(void, segment_id=ID, place=3)
    assert parse_page(page, segment_id=ID, place=3) == void


@pytest.mark.parametrize(
    "page", [block_page(), void_page(Void("t", None, 1), segment_id=ID, place=5)]
)
def test_every_flipped_byte_of_a_page_is_seen(page: bytes) -> None:
    for at in range(PAGE_BYTES):
        broken = page[:at] + bytes([page[at] ^ 0x10]) + page[at + 1 :]
        assert parse_page(broken, segment_id=ID, place=5) is None


@given(st.binary(max_size=600))
def test_a_sealed_page_of_anything_raises_nothing(data: bytes) -> None:
    """Somebody who can write the disk can also seal a page."""
    page = bytearray(block_page())
    start = random.Random(len(data)).randrange(600)
    page[4 + start : 4 + start + len(data)] = data
    page = page[:PAGE_BYTES]
    page[PAGE_COVERED:] = seal_page(page)
    assert page_is_whole(bytes(page))
    parse_page(bytes(page), segment_id=ID, place=5)
    parse_segment_page(bytes(page))
    parse_store_page(bytes(page))
    parse_trailer(bytes(page), HEAD, file_bytes=1 << 20)


def test_identity_pages() -> None:
    assert parse_segment_page(segment_page(HEAD)) == HEAD
    assert parse_store_page(store_page(ID)) == ID
    assert parse_segment_page(store_page(ID)) is None
    assert parse_store_page(segment_page(HEAD)) is None
    assert parse_store_page(b"") is None


@pytest.mark.parametrize("count", [0, 1, 2, 501])
def test_a_footer_is_read_back(count: int) -> None:
    made = table(count)
    data, size = closed(made, first_page=1 + 11 * count + 11)
    found = parsed(data, size)
    assert found is not None
    assert (found.scopes, found.voids) == (made.scopes, made.voids)
    assert found.rows.tobytes() == made.rows.tobytes()
    most = footer_bytes_max(record_count=count, scope_count=2, void_count=1)
    assert len(data) <= most


def test_every_flipped_byte_of_a_footer_is_seen() -> None:
    data, size = closed(table(), first_page=30)
    place = parse_trailer(data[-PAGE_BYTES:], HEAD, file_bytes=size)
    assert place is not None
    used = [*range(place.table_bytes), *range(len(data) - PAGE_BYTES, len(data))]
    for at in used[::7]:
        broken = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        assert parsed(broken, size) is None


def test_a_footer_of_another_file_or_length_is_none() -> None:
    data, size = closed(table(), first_page=30)
    assert parsed(data, size) is not None
    assert parsed(data, size + PAGE_BYTES) is None
    for other in (SegmentHead(HEAD.store_id, b"j" * 16, 7), SegmentHead(HEAD.store_id, ID, 8)):
        assert parse_trailer(data[-PAGE_BYTES:], other, file_bytes=size) is None


@pytest.mark.parametrize(
    ("pages", "scope_of"),
    [([0, 4], [0, 0]), ([4, 1], [0, 0]), ([1, 3], [0, 0]), ([1, 4], [0, 2]), ([1, 28], [0, 0])],
)
def test_records_that_do_not_fit_are_no_table(pages: list[int], scope_of: list[int]) -> None:
    made = table_of(SCOPES, (), pages=pages, scope_of=scope_of, keys=bytes(64), checksums=bytes(32))
    assert parsed(*closed(made, first_page=30)) is None


def test_voids_cover_what_is_older_and_meant() -> None:
    made = table(4)
    all_void = Void(None, None, place_of(7, int(made.rows["page"][2])))
    assert made.living(7, ()).tolist() == [True] * 4, "its own void is of another segment"
    assert made.living(7, [all_void]).tolist() == [False, False, True, True]
    second = Void(SCOPES[1].tenant, None, place_of(8, 0))
    assert made.living(7, [second]).tolist() == [True, False, True, False]
    assert made.living(9, [second]).tolist() == [True] * 4


def test_the_bytes_of_version_2_are_still_read() -> None:
    folder = Path(__file__).parents[2] / "golden" / "file_v2"
    assert parse_store_page((folder / "store").read_bytes()) == bytes(range(16))
    data = (folder / "seg-00000001.kv").read_bytes()
    head = parse_segment_page(data[:PAGE_BYTES])
    assert head == SegmentHead(bytes(range(16)), bytes(range(16, 32)), 1)
    place = parse_trailer(data[-PAGE_BYTES:], head, file_bytes=len(data))
    assert place is not None
    begin = place.first_page * PAGE_BYTES
    found = parse_footer(data[begin : begin + place.table_bytes], place, head)
    assert found is not None
    assert found.rows["page"].tolist() == [1, 3]
    assert found.scopes == (Scope("golden", b"g" * 32, Shard(0, 2, 0, 1), 100),)
    open_data = (folder / "seg-00000002.kv").read_bytes()
    pages = [open_data[at : at + PAGE_BYTES] for at in range(0, len(open_data), PAGE_BYTES)]
    head = parse_segment_page(pages[0])
    assert head is not None
    records = [
        parse_page(page, segment_id=head.segment_id, place=place_of(2, index))
        for index, page in enumerate(pages)
    ]
    assert records[1] == Void("golden", None, place_of(1, 3))
    assert isinstance(records[2], BlockPage)
    assert records[2].key == b"\2" * 32


# ── the checksum of a block ───────────────────────────────────────────────────────────────────────


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
