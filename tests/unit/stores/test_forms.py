"""Records of nodes, as they are and as they were."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.errors import ProtocolError
from kvstore.stores.forms import Body, decode, encode
from kvstore.types import Incarnation
from kvstore.wire.load import Load

BODY = Body(Incarnation(1), (), "n:1", 7, is_open=True, is_exact=True, is_short=False)
BEFORE_LOADS = [1, [], "n:1", 7, True, True, False]


def test_a_record_that_was_written_before_there_were_loads_is_read() -> None:
    body = decode(Body, msgspec.msgpack.encode(BEFORE_LOADS))
    assert body == BODY
    assert body.load is None


def test_a_load_of_a_version_that_tells_more_or_less_is_read() -> None:
    count = len(Load.__struct_fields__)
    body = decode(Body, msgspec.msgpack.encode([*BEFORE_LOADS, list(range(count + 3))]))
    assert body.load is not None
    assert list(msgspec.structs.astuple(body.load)) == list(range(count))
    assert decode(Body, encode(body)) == body
    fewer = decode(Body, msgspec.msgpack.encode([*BEFORE_LOADS, [5]]))
    assert fewer.load == Load(at_ms=5)


def test_a_load_of_what_no_node_tells_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode(Body, msgspec.msgpack.encode([*BEFORE_LOADS, [-1]]))
