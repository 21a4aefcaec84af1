"""A back end by its name. Each is loaded only when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ConfigError, ProtocolError
from kvstore.ports import Landing, Transport
from kvstore.transport.tcp_ends import Address
from kvstore.wire.mover import DESCRIPTOR_BYTES_MAX, decode_descriptor, encode

NAMES: Final = ("nixl", "tcp", "ucx")


def is_at(descriptor: bytes, address: str) -> bool:
    """Whether what a peer describes is a place on the machine at HOST:PORT, as far as the back end
    tells: a peer must not have others dial whom it likes, nor give a mover what none would."""
    try:
        found = decode_descriptor(descriptor)
        # Read in one way only: a field that comes twice may be read as another by the mover.
        if len(descriptor) > DESCRIPTOR_BYTES_MAX or encode(found) != descriptor:
            return False
        if found.backend != "tcp":
            return True
        told = msgspec.msgpack.decode(found.details, type=Address)
    except (ProtocolError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    host = address.rpartition(":")[0].strip("[]")
    return msgspec.msgpack.encode(told) == found.details and told.host == host


def open_transport(
    backend: str,
    name: str,
    *,
    arena: NDArray[np.uint8],
    source: NDArray[np.uint8],
    landing: Landing | None = None,
    options: Mapping[str, str],
) -> Transport:
    """A transport of the node `name`, which moves into and out of `arena` and lets peers read
    `source`, the same bytes in a mapping that cannot be written through, and write to `landing`.

    Raises:
        ConfigError: no such back end, it is not installed or takes no writes, or its options are
            wrong.
    """
    match backend:
        case "nixl":
            from kvstore.transport.nixl import Nixl

            return Nixl(name, arena=arena, source=source, landing=landing, options=options)
        case "tcp":
            from kvstore.transport.tcp import Tcp

            return Tcp(name, arena=arena, source=source, landing=landing, options=options)
        case "ucx":
            from kvstore.transport.ucx import Ucx

            return Ucx(name, arena=arena, source=source, landing=landing, options=options)
        case _:
            raise ConfigError(f"there is no transport {backend!r}: use {', '.join(NAMES)}")
