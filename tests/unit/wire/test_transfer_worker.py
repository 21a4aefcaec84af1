"""Messages between a node and its transfer worker: there and back, and every way to be broken is
refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvstore.errors import ProtocolError
from kvstore.wire import transfer_worker as wire

READ, WRITE = wire.Direction.READ, wire.Direction.WRITE
ARRAY = wire.words(np.array([1, 2**40], np.uint64))

FROM_NODE = [
    wire.Begin("nixl", "a", 4096, {"plugin": "UCX"}, paced=False),
    wire.Connect("b", b"x" * 100),
    wire.MovePieces(7, "b", ARRAY, ARRAY, ARRAY, WRITE, last=False),
    wire.Forget("b"),
]
FROM_MOVER = [
    wire.Registered(b"d", ends_forgotten=True),
    wire.Unable("why"),
    wire.Unreachable("b", "why"),
    wire.Done(7),
    wire.Failed(7, "why"),
    wire.Limbo(7),
    wire.Beat(3),
]


def test_what_either_says_arrives_at_the_other_only() -> None:
    sides = (
        (FROM_NODE, wire.decode_from_node, wire.decode_from_transfer_worker),
        (FROM_MOVER, wire.decode_from_transfer_worker, wire.decode_from_node),
    )
    for messages, decode, other in sides:
        for message in messages:
            assert decode(wire.encode(message)) == message
            with pytest.raises(ProtocolError):
                other(wire.encode(message))


def test_the_largest_datagram_has_room() -> None:
    full = bytes(8 * wire.PIECES_PER_DATAGRAM_MAX)
    data = wire.encode(wire.MovePieces(2**63 - 1, "b" * 255, full, full, full, WRITE))
    assert len(data) <= wire.DATAGRAM_BYTES_MAX
    assert isinstance(wire.decode_from_node(data), wire.MovePieces)
    longer = wire.MovePieces(1, "b", full + bytes(8), full, full, READ)
    with pytest.raises(ProtocolError):
        wire.decode_from_node(wire.encode(longer))


@pytest.mark.parametrize(
    "arrays",
    [(ARRAY, ARRAY, ARRAY[:8]), (ARRAY[:9], ARRAY[:9], ARRAY[:9]), (b"", ARRAY, ARRAY)],
)
def test_arrays_that_do_not_fit_are_refused(arrays: tuple[bytes, bytes, bytes]) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_from_node(wire.encode(wire.MovePieces(1, "b", *arrays, READ)))


@given(st.binary(max_size=200))
def test_noise_is_refused_with_a_protocol_error(data: bytes) -> None:
    for decode in (wire.decode_from_node, wire.decode_from_transfer_worker, wire.decode_descriptor):
        try:
            found: object = decode(data)
        except ProtocolError:
            continue
        assert isinstance(found, (wire.TransferWorkerMessage, wire.Descriptor))


def test_a_descriptor_arrives_whole_or_not_at_all() -> None:
    descriptor = wire.Descriptor("nixl/UCX", "a", 4096, 2**47, b"details")
    data = wire.encode(descriptor)
    assert wire.decode_descriptor(data) == descriptor
    for bad in (data[:-1], data + b"x", msgspec.msgpack.encode({"backend": "nixl"})):
        with pytest.raises(ProtocolError):
            wire.decode_descriptor(bad)


@pytest.mark.parametrize("count", [0, 1, 4096, 4097, 9000])
def test_a_transfer_goes_in_parts_of_which_one_is_the_last(count: int) -> None:
    numbers = np.arange(count, dtype=np.uint64)
    arrays = (numbers, numbers + np.uint64(1), numbers + np.uint64(2))
    parts = wire.parts_of(7, "b", arrays, WRITE)
    assert len(parts) == max(1, -(-count // 4096))
    assert {part.direction for part in parts} == {WRITE}
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    for at, field in enumerate(("local", "remote", "length")):
        joined = b"".join(getattr(part, field) for part in parts)
        assert wire.array_of(joined).tolist() == (numbers + np.uint64(at)).tolist()
