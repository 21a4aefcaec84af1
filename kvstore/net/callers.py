"""Limits of a gRPC server in the network: number of connections, and their silence.

Any host that reaches the port can connect, before any certificate is shown. Without these limits
each connection takes a descriptor for minutes, until the node has none left for its pages and
files. Does not cover: authentication (`tls`); limits of one caller's requests (the servers).
"""

from __future__ import annotations

import resource
from typing import Final

HANDSHAKE_TIMEOUT_MS: Final = 10_000
"""For the TLS handshake and the preface of HTTP/2, also between busy machines."""
CONNECTIONS_MAX: Final = 4096
DESCRIPTORS_SHARE: Final = 4
"""One part in so many of the process's descriptors, if that is less: a node may have two servers,
and needs the other descriptors."""


def limits() -> list[tuple[str, int]]:
    """The limits as options of a server."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = CONNECTIONS_MAX
    if descriptors != resource.RLIM_INFINITY:
        count = max(1, min(count, descriptors // DESCRIPTORS_SHARE))
    return [
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_allowed_incoming_connections", count),
    ]
