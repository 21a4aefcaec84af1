"""Bodies for Envoy, in pieces; and the messages' numbers on the wire."""

from __future__ import annotations

import pytest

from kvstore.proto import picker_pb2 as pb
from kvstore.router.picker import PIECE_BYTES, pieces, refusal


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES])
def test_pieces_are_small_and_only_the_last_ends_the_stream(size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    made = [
        each.request_body.response.body_mutation.streamed_response for each in pieces(body[:size])
    ]
    assert b"".join(each.body for each in made) == body[:size]
    assert max(len(each.body) for each in made) <= 62_000
    assert [each.end_of_stream for each in made] == [False] * (len(made) - 1) + [True]


def test_bytes_are_those_of_envoys_own_messages() -> None:
    """By hand, from field numbers of ext_proc v3: 7 immediate response, 1 status, 1 code."""
    made = refusal(503, "b", "d").SerializeToString()
    assert made.startswith(b"\x3a")
    assert b"\x0a\x03\x08\xf7\x03" in made
    # 2 request headers { 1 map { 1 header { 1 key, 3 raw value } }, 3 end of stream }
    header = b"\x0a\x01a\x1a\x01b"
    inner = b"\x0a" + bytes([len(header)]) + header
    message = b"\x0a" + bytes([len(inner)]) + inner + b"\x18\x01"
    read = pb.ProcessingRequest.FromString(b"\x12" + bytes([len(message)]) + message)
    assert read.request_headers.end_of_stream
    assert read.request_headers.headers.headers[0].raw_value == b"b"
