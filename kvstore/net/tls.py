"""The server's end of TLS: credentials, names of callers, end of the certificate.

Both ends show certificates of one CA (mTLS), or, with --insecure, neither does and nothing is
authenticated. gRPC speaks TLS 1.2 or later. Does not cover: the files, and the meaning of names
(`kvstore.client.tls`).
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Final

import grpc

from kvstore.client.tls import Tls
from kvstore.errors import ConfigError
from kvstore.obs.metrics import Family, family
from kvstore.wire.identity import Identity, identities_of
from kvstore.wording import cannot_listen

INSECURE: Final = (
    "--insecure: every client that reaches %s can read and change its contents: no TLS, no"
    " authentication; for labs only"
)
INSECURE_NOTE: Final = "it serves without TLS (--insecure)"
WARNING_DAYS: Final = 30
"""A component warns at its start if fewer days of its certificate remain."""
_DAY_S: Final = 24 * 60 * 60
_DNS_NAMES: Final = "peer_dns"
"""Key of the DNS names of a certificate in gRPC's auth context, which has another list with
alternative names of all kinds.
"""

_log = logging.getLogger(__name__)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Credentials of a server that demands a certificate of its own CA from every client."""
    return grpc.ssl_server_credentials(
        [(tls.key, tls.cert)], root_certificates=tls.ca, require_client_auth=True
    )


def listen(server: grpc.aio.Server, address: str, tls: Tls | None, option: str) -> int:
    """Have a server listen on HOST:PORT, without TLS if `tls` is None. Returns the port.

    Raises:
        ConfigError: the address, which is that of `option`, cannot be listened on.
    """
    try:
        if tls is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, server_credentials(tls)))
    except RuntimeError:
        raise ConfigError(cannot_listen(option, address)) from None


def peer_identities(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[Identity]:
    """Names of the caller in the certificate that the handshake has verified."""
    names = auth_context.get(_DNS_NAMES, ())
    return identities_of(("DNS", name.decode("ascii", "replace")) for name in names)


def certificate_ends(tls: Tls | None) -> Family:
    """Metric of the end of this component's certificate; without a value if there is none."""
    return family(
        "kvstore_certificate_expires_timestamp_seconds", [((), tls.ends_s)] if tls else []
    )


def warn_of_its_end(tls: Tls | None, *, renewal: str) -> None:
    """Log a warning at the start if the certificate ends within WARNING_DAYS. `renewal`: how to
    load another one.
    """
    if tls is None or (left_s := tls.ends_s - time.time()) >= WARNING_DAYS * _DAY_S:
        return
    _log.warning(
        "the certificate of %s ends at %s UTC, in %.1f days: replace it; %s",
        min(map(str, tls.identities), default="this component"),
        datetime.datetime.fromtimestamp(tls.ends_s, datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        left_s / _DAY_S,
        renewal,
    )
