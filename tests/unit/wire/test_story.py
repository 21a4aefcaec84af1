"""The datagram that ends a request: what it may hold, and that nothing else passes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvstore.errors import ProtocolError
from kvstore.wire.messages import (
    ASKS_PER_LOOKUP_MAX,
    REQUEST_BYTES_MAX,
    Story,
    decode_from_engine,
    encode,
)

FULL = Story(
    request="r" * REQUEST_BYTES_MAX,
    age_ns=1,
    prompt_tokens=2,
    local_tokens=3,
    loaded_tokens=4,
    file_tokens=5,
    outcome="o" * 32,
    detail="d" * 255,
    session=6,
    leases=list(range(ASKS_PER_LOOKUP_MAX)),
    first_block=7,
    queued_ns=8,
    lookup_ns=9,
    promotion_ns=10,
    load_ns=11,
    stored_blocks=12,
    first_token_ns=13,
    transfer="t" * 255,
    admitted_ns=14,
    total_ns=15,
    traceparent="0" * 55,
)


@pytest.mark.parametrize("story", [FULL, Story(request="r")])
def test_it_comes_back_as_it_was(story: Story) -> None:
    assert decode_from_engine(encode(story)) == story


@pytest.mark.parametrize(
    "change",
    [
        {"request": ""},
        {"request": "r" * (REQUEST_BYTES_MAX + 1)},
        {"outcome": "o" * 33},
        {"detail": "d" * 256},
        {"transfer": "t" * 256},
        {"traceparent": "0" * 56},
        {"leases": list(range(ASKS_PER_LOOKUP_MAX + 1))},
        {"leases": [-1]},
        {"unknown": 1},
    ],
    ids=str,
)
def test_anything_else_is_refused(change: dict[str, Any]) -> None:
    fields = {**msgspec.structs.asdict(FULL), "type": "Story", **change}
    with pytest.raises(ProtocolError):
        decode_from_engine(msgspec.msgpack.encode(fields))
