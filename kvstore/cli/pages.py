"""Questions to a process over HTTP, and one sentence for each way to get no answer.

Does not cover: what answers mean (`route`, `top_view`).
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvstore.errors import AttachError, ConfigError

PAGE_BYTES_MAX: Final = 8 << 20
LATE: Final = "no answer in time"
NO_STATE: Final = (
    "its /state.json is not one of this version of kvstore: give the URL of --metrics, and use the"
    " command that is installed there"
)
_OTHER_NAME: Final = (62, 64)
"""OpenSSL's verify codes for a certificate of another host, and of another IP address."""
_SENTENCES: Final = (
    (ConnectionRefusedError, "connection refused: is it running, with {0.flag} at this address?"),
    (ssl.SSLError, "it does not speak TLS: use http://, as {0.flag} does"),
    (TimeoutError, LATE),
    (socket.gaierror, "its host has no address"),
    ((ValueError, http.client.InvalidURL), "this is no URL, such as http://{0.example}"),
    (http.client.HTTPException, "it does not speak HTTP: is it https:// there?"),
    (OSError, "{1}"),
)
"""Failure → sentence: the first that fits."""


def decode_state(text: str | bytes) -> dict[str, Any]:
    """Sections of a /state.json, which are not checked. Raises AttachError: the text is none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise AttachError(NO_STATE) from None


class Site(NamedTuple):
    """A process with pages, and the words for sentences about it."""

    url: str
    context: ssl.SSLContext
    """TLS for https:// URLs."""
    example: str
    """HOST:PORT as an example of such a URL."""
    flag: str
    """The flag of the process for this address."""
    ca: str
    """Advice for a certificate whose CA is not accepted."""
    name: str
    """Advice for a certificate that names another host."""
    server_name: str | None = None
    """Name in its certificate; None: the host of the URL."""
    is_anonymous: bool = False
    """https:// is used without a client certificate, although one could be given."""

    def ask(
        self, path: str, body: bytes | None = None, *, timeout_s: float, **headers: str
    ) -> tuple[int, bytes]:
        """(HTTP status, content) of a path; GET without a body, else POST. Raises AttachError: one
        sentence.
        """
        until_s = time.monotonic() + timeout_s
        try:
            with contextlib.closing(self._connection(timeout_s)) as connection:
                path = urlsplit(self.url).path.rstrip("/").removesuffix("/metrics") + path
                connection.request("GET" if body is None else "POST", path, body, headers)
                answer = connection.getresponse()
                content = bytearray()
                while piece := answer.read1(1 << 16):
                    content += piece
                    if time.monotonic() > until_s:
                        raise TimeoutError
                    if len(content) > PAGE_BYTES_MAX:
                        raise AttachError("its page is too large to be one of kvstore")
                return answer.status, bytes(content)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise AttachError(self._why(error)) from None

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """A connection to the process. Raises OSError, and ValueError: no URL."""
        parts = urlsplit(self.url)
        host, port = parts.hostname, parts.port
        if parts.scheme not in ("http", "https") or not host:
            raise ValueError
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        if parts.scheme == "https":
            raw = socket.create_connection((host, port or 443), timeout=timeout_s)
            name = self.server_name or host
            connection.sock = self.context.wrap_socket(raw, server_hostname=name)
        return connection

    def _why(self, error: Exception) -> str:
        """Why there is no answer, and what helps."""
        if isinstance(error, ssl.SSLCertVerificationError):
            advice = self.name if error.verify_code in _OTHER_NAME else self.ca
            return f"its certificate is refused ({error.verify_message.rstrip('.')}): {advice}"
        hung_up = isinstance(error, (ssl.SSLError, ConnectionError))
        if self.is_anonymous and hung_up and not isinstance(error, ConnectionRefusedError):
            return "it demands a certificate: give --cert and --key, issued by its --listen-ca"
        sentence = next(text for kind, text in _SENTENCES if isinstance(error, kind))
        return sentence.format(self, (getattr(error, "strerror", None) or str(error)).lower())


def tls_context(flags: Mapping[str, Path | None]) -> ssl.SSLContext:
    """TLS of a client. Raises ConfigError: a file is not usable.

    Args:
        flags: flag → file, in this order: CA (None: the CAs of the system), certificate (None: no
            certificate), key.
    """
    ca, cert, key = (*flags.values(), None, None)[:3]
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except OSError as error:
        given = " ".join(f"{flag} {path}" for flag, path in flags.items() if path is not None)
        no_pem = "no PEM" if cert is None else "no PEM, or no pair"
        why = no_pem if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"{given} cannot be used: {why}") from None
    return context
