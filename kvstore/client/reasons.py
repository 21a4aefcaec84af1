"""Why a call failed, in a clause that names a flag: gRPC has only its TLS library's text.

Covers: calls of an index, a peer, a node, another router. Does not cover: a server's answers (its
own sentences).
"""

from __future__ import annotations

from typing import Final

import grpc

_CAUSES: Final = (
    (
        "CERTIFICATE_VERIFY_FAILED: certificate has expired",
        "its certificate has expired: issue a new one",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate was not issued by the CA of --ca: all components need one CA",
    ),
    ("UNKNOWN_CA", "it does not accept this certificate: all components need one CA"),
    (
        "WRONG_VERSION_NUMBER",
        "it serves without TLS (--insecure), but certificates are set here: use the same on both",
    ),
    ("is not in peer certificate", "its certificate is of another component"),
    ("Hostname Verification Check failed", "its certificate is of another component"),
    (
        "Socket closed",
        "it closed the connection: it may require (other) certificates: --ca, --cert, --key",
    ),
    ("Connection refused", "nothing listens there (connection refused)"),
    ("No route to host", "no route to host"),
)
"""Parts of gRPC's texts, specific ones before general ones."""
_OF_TLS: Final = ("handshake failed", "verification check failed")
_FAILED: Final = "failed to connect to all addresses; last error: "


def reason_of(error: Exception, *, unimplemented: str = "") -> str:
    """One clause for an error of a call. `unimplemented`: the clause for a server that does not
    have the call; empty: what gRPC says."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return "no answer in time" if isinstance(error, TimeoutError) else plain_reason(str(error))
    if unimplemented and error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return unimplemented
    return plain_reason(error.details())


def plain_reason(details: str | None) -> str:
    """One clause for gRPC's details of an error."""
    text = details or "no reason is known"
    if not (text.startswith(_FAILED) or any(part in text for part in _OF_TLS)):
        return text
    for part, cause in _CAUSES:
        if part in text:
            return cause
    return text.removeprefix(_FAILED)
