"""Back ends by their names, and where a peer may send its readers."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.transport.backends import is_at, open_transport
from kvstore.transport.tcp_ends import Address
from kvstore.wire.mover import Descriptor, encode


def told(host: str, backend: str = "tcp") -> bytes:
    details = msgspec.msgpack.encode(Address(host, 7, secure=True))
    return encode(Descriptor(backend, "b", 1 << 20, 0, details))


def test_a_peer_is_read_from_on_its_own_machine_only() -> None:
    assert is_at(told("10.0.0.7"), "10.0.0.7:9480")
    assert is_at(told("::1"), "[::1]:9480")
    assert not is_at(told("169.254.169.254"), "10.0.0.7:9480")
    assert not is_at(told("10.0.0.7"), "")


@pytest.mark.parametrize(
    "nonsense", [b"", b"nonsense", encode(Descriptor("tcp", "b", 1, 0, b"nonsense"))]
)
def test_nonsense_is_nowhere(nonsense: bytes) -> None:
    assert not is_at(nonsense, "10.0.0.7:9480")


def test_what_only_its_back_end_can_read_is_left_to_it() -> None:
    assert is_at(encode(Descriptor("nixl", "b", 1, 0, b"of its own")), "10.0.0.7:9480")


def test_a_back_end_that_is_none_is_named() -> None:
    memory = np.zeros(8, dtype=np.uint8)
    with pytest.raises(ConfigError, match="no transport 'pigeon': use nixl, tcp, ucx"):
        open_transport("pigeon", "a", arena=memory, source=memory, options={})
