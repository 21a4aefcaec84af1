"""A back end by its name. Each is loaded only when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ConfigError
from kvstore.ports import Transport

NAMES: Final = ("nixl", "tcp", "ucx")


def open_transport(
    backend: str,
    name: str,
    *,
    arena: NDArray[np.uint8],
    source: NDArray[np.uint8],
    options: Mapping[str, str],
) -> Transport:
    """A transport of the node `name`, which reads into `arena` and lets peers read `source`, the
    same bytes in a mapping that cannot be written through.

    Raises:
        ConfigError: no such back end, it is not installed, or its options are wrong.
    """
    match backend:
        case "nixl":
            from kvstore.transport.nixl import Nixl

            return Nixl(name, arena=arena, source=source, options=options)
        case "tcp":
            from kvstore.transport.tcp import Tcp

            return Tcp(name, arena=arena, source=source, options=options)
        case "ucx":
            from kvstore.transport.ucx import Ucx

            return Ucx(name, arena=arena, source=source, options=options)
        case _:
            raise ConfigError(f"there is no transport {backend!r}: use {', '.join(NAMES)}")
