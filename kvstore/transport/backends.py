"""A back end by its name. Its library is loaded only when it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvstore.errors import ConfigError, ProtocolError
from kvstore.installation import is_installed, lacking
from kvstore.ports import Transport, TransportMemory
from kvstore.transport.nixl import Nixl
from kvstore.transport.tcp import Tcp
from kvstore.transport.ucx import Ucx
from kvstore.wire.transfer_worker import DESCRIPTOR_BYTES_MAX, decode_descriptor, encode

BACKENDS: Final[Mapping[str, type[Nixl | Tcp | Ucx]]] = {"nixl": Nixl, "tcp": Tcp, "ucx": Ucx}


def is_at(descriptor: bytes, address: str) -> bool:
    """Whether a peer's descriptor is a place on the machine at HOST:PORT, as far as its back end
    can check. A peer must not make others dial any address, nor pass on a descriptor that no
    transfer worker would make.
    """
    try:
        found = decode_descriptor(descriptor)
    except ProtocolError:
        return False
    # Read in one way only: a field that comes twice may be read as another by the transfer worker.
    if len(descriptor) > DESCRIPTOR_BYTES_MAX or encode(found) != descriptor:
        return False
    backend = BACKENDS.get(found.backend.partition("/")[0])
    host = address.rpartition(":")[0].strip("[]")
    return backend is None or backend.is_at(found.details, host)


def open_transport(
    backend: str, name: str, memory: TransportMemory, options: Mapping[str, str]
) -> Transport:
    """A transport of the node `name`.

    Raises:
        ConfigError: no such back end, it is not installed or takes no writes, or its options are
            wrong.
    """
    found = BACKENDS.get(backend)
    if found is None:
        raise ConfigError(f"there is no transport {backend!r}: use {', '.join(BACKENDS)}")
    refuse_absent(backend)
    if memory.landing is not None and not found.capabilities.takes_writes:
        able = [each for each, its in BACKENDS.items() if its.capabilities.takes_writes]
        raise ConfigError(f"the {backend} transport takes no writes: use {' or '.join(able)}")
    return found(name, memory, options)


def refuse_absent(backend: str) -> None:
    """Raises ConfigError if the library of a back end is not installed."""
    modules = BACKENDS[backend].capabilities.modules
    if modules and not any(map(is_installed, modules)):
        raise ConfigError(lacking(f"--transport {backend}", " or ".join(modules), backend))
