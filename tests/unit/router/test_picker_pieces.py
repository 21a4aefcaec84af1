"""Bodies for Envoy, in pieces; and the messages' numbers on the wire."""

from __future__ import annotations

import pytest

from kvstore.proto import picker_pb2 as pb
from kvstore.router.picker import DESTINATION, PIECE_BYTES, chosen, pieces, refusal


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES])
def test_pieces_are_small_and_only_the_last_ends_the_stream(size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    made = [
        each.request_body.response.body_mutation.streamed_response for each in pieces(body[:size])
    ]
    assert b"".join(each.body for each in made) == body[:size]
    assert max(len(each.body) for each in made) <= 62_000
    assert [each.end_of_stream for each in made] == [False] * (len(made) - 1) + [True]


def test_an_edited_body_has_its_new_length() -> None:
    for length, expected in ((None, {}), (7, {"content-length": b"7"})):
        made = chosen("10.0.0.1:80,10.0.0.2:80", length)
        common = made.request_headers.response
        headers = {e.header.key: e.header.raw_value for e in common.header_mutation.set_headers}
        assert headers == {DESTINATION: b"10.0.0.1:80,10.0.0.2:80"} | expected
        assert common.clear_route_cache
        lb = made.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION]
        assert lb.string_value == "10.0.0.1:80,10.0.0.2:80"


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
