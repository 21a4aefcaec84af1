"""Back ends by their names, and where a peer may send its readers."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.ports import TransportMemory
from kvstore.transport.backends import is_at, open_transport
from kvstore.transport.tcp import Address
from kvstore.wire.transfer_worker import DESCRIPTOR_BYTES_MAX, Descriptor, encode

HERE = "10.0.0.7"


def told(host: str, backend: str = "tcp", port: int = 7) -> bytes:
    details = msgspec.msgpack.encode(Address(host, port, secure=True))
    return encode(Descriptor(backend, "b", 1 << 20, 0, details))


def test_a_peer_is_read_from_on_its_own_machine_only() -> None:
    assert is_at(told("10.0.0.7"), "10.0.0.7:9480")
    assert is_at(told("::1"), "[::1]:9480")
    assert not is_at(told("169.254.169.254"), "10.0.0.7:9480")
    assert not is_at(told("10.0.0.7"), "")


def twice(packed: bytes, field: str, value: object) -> bytes:
    """The map `packed`, with a field that it has already: readers take the last."""
    assert packed[0] & 0xF0 == 0x80
    pair = msgspec.msgpack.encode(field) + msgspec.msgpack.encode(value)
    return bytes([packed[0] + 1]) + pair + packed[1:]


NONSENSE = {
    "nothing": b"",
    "no msgpack": b"nonsense",
    "no address": encode(Descriptor("tcp", "b", 1, 0, b"nonsense")),
    "longer than a transfer worker takes": encode(
        Descriptor("nixl", "b" * DESCRIPTOR_BYTES_MAX, 1, 0, b"of its own")
    ),
    "two back ends": twice(told(HERE), "backend", "nixl"),
    "two hosts": encode(
        Descriptor(
            "tcp",
            "b",
            1 << 20,
            0,
            twice(msgspec.msgpack.encode(Address(HERE, 7, secure=True)), "host", "10.0.0.8"),
        )
    ),
    "no port": told(HERE, port=0),
    "a negative port": told(HERE, port=-1),
    "a port too high": told(HERE, port=65536),
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_is_nowhere(nonsense: bytes) -> None:
    assert not is_at(nonsense, f"{HERE}:9480")


def test_a_name_is_no_place() -> None:
    """It would be looked up again, and could be another machine by then."""
    details = msgspec.msgpack.encode({"host": "node-7", "port": 7, "secure": True})
    assert not is_at(encode(Descriptor("tcp", "b", 1 << 20, 0, details)), "node-7:9480")


def test_what_only_its_back_end_can_read_is_left_to_it() -> None:
    assert is_at(encode(Descriptor("nixl", "b", 1, 0, b"of its own")), "10.0.0.7:9480")


def test_a_back_end_that_is_none_is_named() -> None:
    memory = np.zeros(8, dtype=np.uint8)
    with pytest.raises(ConfigError, match="no transport 'pigeon': use nixl, tcp, ucx"):
        open_transport("pigeon", "a", TransportMemory(memory, memory), {})
