"""How many may be connected to a gRPC server that others reach, and how long they may be silent.

Whoever reaches the port can connect, before any certificate is shown. Without these limits each
takes a descriptor for minutes, until the node has none left for its pages and files. Does not
cover: who is believed (`tls`); how much a caller may ask (the servers).
"""

from __future__ import annotations

import resource
from typing import Final

HANDSHAKE_TIMEOUT_MS: Final = 10_000
"""For the certificates and the first words of HTTP/2, on a machine that is busy at either end."""
CONNECTIONS_MAX: Final = 4096
DESCRIPTORS_SHARE: Final = 4
"""One part in so many of the process's descriptors, if that is less: a node may have two servers,
and needs the others."""


def limits() -> list[tuple[str, int]]:
    """As options of a server."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = CONNECTIONS_MAX
    if descriptors != resource.RLIM_INFINITY:
        count = max(1, min(count, descriptors // DESCRIPTORS_SHARE))
    return [
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_allowed_incoming_connections", count),
    ]
