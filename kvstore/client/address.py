"""HOST:PORT as operators write it, where HOST may be a name."""

from __future__ import annotations

from typing import Final

from kvstore.errors import ConfigError

PORT_MAX: Final = 65535


def address_parts(endpoint: str, *, what: str = "index") -> tuple[str, int]:
    """(host, port) of HOST:PORT. Raises ConfigError."""
    host, colon, port = endpoint.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) <= PORT_MAX
    if not colon or not host or "/" in host or not is_port or (":" in host) != (host[0] == "["):
        raise ConfigError(
            f"{what} {endpoint!r} must be HOST:PORT, such as index.example:9470 or [::1]:9470"
        )
    return host.strip("[]"), int(port)
