"""Addresses and certificates as both ends need them: HOST:PORT, three files, the names in them.

    NAME.node.kvstore       a node; it may feed an index, and speaks for NAME only
    NAME.index.kvstore      a replica of the index; with index.kvstore beside it, which all have
    NAME.client.kvstore     a router or script; it may ask

These are DNS names among the certificate's subject alternative names. A client demands the name of
its server, so that addresses need not be in certificates.

Covers: contents of the files once checked, credentials of a channel. Does not cover: the form of
these names (`kvstore.wire.identity`), reading and judging the files
(`kvstore.client.certificates`), servers, and whose certificate a caller has
(`kvstore.net.server`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.errors import ConfigError
from kvstore.wire.identity import Identity, Role

if TYPE_CHECKING:
    import grpc


ANY_INDEX: Final = "index.kvstore"
"""Name in the certificate of every replica of the index."""


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Files of this component's certificate and key, and of the CA of all components."""

    ca: Path
    cert: Path
    key: Path


class Tls(NamedTuple):
    """Contents of the files, checked."""

    ca: bytes
    """CA of the other side's certificates, PEM; empty: clients need none."""
    cert: bytes
    key: bytes
    identities: frozenset[Identity]
    ends_s: int
    """End of the certificate, in Unix time."""

    def name_as(self, role: Role) -> str:
        """The name of this component in a role; empty when it has none."""
        return next((name for its_role, name in sorted(self.identities) if its_role == role), "")

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a client that shows its certificate and demands one of the same CA."""
        import grpc  # only here: `kvstore certs` needs none

        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


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
