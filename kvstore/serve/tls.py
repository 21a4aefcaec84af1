"""The server's end of TLS: whom it shows itself to, and who is calling.

Both ends show certificates of one CA (mTLS), or, with --insecure, neither does and everybody is
believed. TLS 1.2 is the least that gRPC speaks. Does not cover: the files, and what names mean
(`kvstore.client.tls`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import grpc

from kvstore.client.tls import Identity, Tls, identities_of

INSECURE: Final = (
    "--insecure: whoever reaches %s can read and change what is told there: no TLS, no"
    " certificates; for labs only"
)
INSECURE_NOTE: Final = "it serves without TLS (--insecure)"
_ALTERNATIVE_NAMES: Final = "x509_subject_alternative_name"


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Of a server that demands a certificate of its own CA from everybody."""
    return grpc.ssl_server_credentials(
        [(tls.key, tls.cert)], root_certificates=tls.ca, require_client_auth=True
    )


def peer_identities(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[Identity]:
    """Who calls, by the certificate that the handshake has verified."""
    names = auth_context.get(_ALTERNATIVE_NAMES, ())
    return identities_of(name.decode("ascii", "replace") for name in names)
