"""Pieces are the same bytes after joining and cutting, and nothing outside gets through."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvstore.errors import TransportError
from kvstore.ports import Pieces
from kvstore.transport.pieces import (
    check_pieces,
    cut,
    joined,
    make_pieces,
    total_bytes,
)
from kvstore.wire.transfer_worker import Descriptor, Direction

ARENA = 64
PEER = Descriptor("loopback", "b", ARENA, 0, b"")

pieces_lists = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 8)), max_size=12
)


def _made(rows: list[tuple[int, int, int]]) -> Pieces:
    return make_pieces(*([row[at] for row in rows] for at in range(3)))


def _moves(*several: Pieces) -> list[tuple[int, int]]:
    """Every byte that is moved, in order: from, to."""
    return [
        (at + n, to + n)
        for pieces in several
        for to, at, length in zip(*map(np.ndarray.tolist, pieces), strict=True)
        for n in range(length)
    ]


@given(pieces_lists)
def test_joined_pieces_move_the_same_bytes(rows: list[tuple[int, int, int]]) -> None:
    pieces = _made(rows)
    found = joined(pieces)
    assert _moves(found) == _moves(pieces)
    assert (found.length > 0).all()
    assert len(joined(found).length) == len(found.length)


def test_neighbours_are_one() -> None:
    found = joined(make_pieces([0, 4, 8, 32], [64, 68, 72, 76], [4, 4, 4, 4]))
    assert _moves(found) == _moves(make_pieces([0, 32], [64, 76], [12, 4]))
    assert found.length.tolist() == [12, 4]


@given(pieces_lists, st.integers(1, 50))
def test_what_is_cut_is_all_of_it(rows: list[tuple[int, int, int]], limit: int) -> None:
    pieces = _made([row for row in rows if row[2]])
    head, tail = cut(pieces, limit)
    assert total_bytes(head) == min(limit, total_bytes(pieces))
    assert _moves(head, tail) == _moves(pieces)
    assert (head.length > 0).all()
    assert (tail.length > 0).all()


@pytest.mark.parametrize(
    "row",
    [(0, 60, 5), (60, 0, 5), (65, 0, 0), (0, 2**64 - 4, 8), (2**64 - 1, 0, 1), (0, 0, 2**64 - 1)],
)
def test_a_piece_outside_is_refused(row: tuple[int, int, int]) -> None:
    with pytest.raises(TransportError, match="outside"):
        check_pieces(_made([(0, 0, 1), row]), Direction.READ, local_bytes=ARENA, found=PEER)


def test_the_last_byte_is_inside() -> None:
    pieces = _made([(63, 63, 1), (64, 64, 0)])
    check_pieces(pieces, Direction.READ, local_bytes=ARENA, found=PEER)
    assert total_bytes(_made([(63, 63, 1)])) == 1


@pytest.mark.parametrize("row", [(0, 7, 1), (0, 7, 2), (0, 0, 8), (0, 16, 1), (0, 8, 9)])
def test_a_write_outside_of_the_landing_memory_is_refused(row: tuple[int, int, int]) -> None:
    landing = msgspec.structs.replace(PEER, landing_begin=8, landing_bytes=8)
    check_pieces(_made([(0, 8, 8)]), Direction.WRITE, local_bytes=ARENA, found=landing)
    with pytest.raises(TransportError, match="outside of the peer's landing memory"):
        check_pieces(_made([row]), Direction.WRITE, local_bytes=ARENA, found=landing)


def test_a_peer_without_landing_memory_takes_no_writes() -> None:
    with pytest.raises(TransportError, match="b takes no writes: it has no landing memory"):
        check_pieces(_made([(0, 0, 1)]), Direction.WRITE, local_bytes=ARENA, found=PEER)
