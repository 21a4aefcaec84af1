"""Clients of a node, of the index, and of a process's pages over HTTP: a query, or one sentence why
there is no answer.

Does not cover: what answers mean (`route`, `top`), how they look (`tables`).
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import grpc
import msgspec

from kvstore.config.defaults import REPLY_BYTES_MAX
from kvstore.config.settings import AskSettings
from kvstore.errors import AttachError, ConfigError, ProtocolError
from kvstore.proto import inspect_pb2 as pb
from kvstore.proto.inspect_pb2_grpc import InspectStub
from kvstore.proto.rows import Row, decode_rows
from kvstore.supervisor.sockets import INSPECT_SUFFIX, why_no_answer

if TYPE_CHECKING:
    from kvstore.client.index import IndexClient

_R = TypeVar("_R", bound=Row)
TIMEOUT_S: Final = 5.0
STATE_TIMEOUT_S: Final = 1.0
"""Timeout of the state query, which `kvstore top` repeats."""
INDEX_TIMEOUT_S: Final = 5.0
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


# ── a node, and the index ─────────────────────────────────────────────────────────────────────────


class NodeClient:
    """Asks one node, while its `node_client` lasts."""

    def __init__(self, stub: InspectStub) -> None:
        self._stub = stub

    def rows(self, topic: str, kind: type[_R], asked: pb.Filter | None = None) -> list[_R]:
        """The rows of one topic. Raises AttachError."""
        reply = _call(self._stub.Rows, pb.RowsRequest(topic=topic, filter=asked))
        try:
            return decode_rows(kind, reply.rows)
        except ProtocolError as error:
            raise AttachError(f"{error}: use the command that is installed with the node") from None

    def state(self) -> dict[str, Any]:
        """Sections of the node's page, as its /state.json has them. Raises AttachError."""
        reply = _call(self._stub.State, pb.StateRequest(), timeout_s=STATE_TIMEOUT_S)
        return decode_state(reply.state)

    def clear(self, *, space: str) -> int:
        """Drop cached blocks of a space (empty: of all). Returns how many. Raises AttachError."""
        return int(_call(self._stub.Clear, pb.ClearRequest(space=space)).blocks)


def _call(call: Callable[..., Any], request: Any, *, timeout_s: float = TIMEOUT_S) -> Any:
    try:
        return call(request, timeout=timeout_s)
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            details = (
                f"the node did not answer within {timeout_s:.0f} s: it is stopped or overloaded"
            )
        elif code is grpc.StatusCode.UNIMPLEMENTED:
            details = "the node is of another version of kvstore: use the command installed with it"
        raise AttachError(str(details)) from None


@contextlib.contextmanager
def node_client(node_socket: Path, *, hint: str = "") -> Iterator[NodeClient]:
    """Context with a client of the node whose attach socket is `node_socket`. Raises AttachError
    for errors inside, and if there is none (the text says how to start one). `hint`: further advice
    in its text.
    """
    path = node_socket.absolute()
    path = path.with_name(path.name + INSPECT_SUFFIX)
    options = [("grpc.max_receive_message_length", REPLY_BYTES_MAX)]
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except OSError as error:  # gRPC does not report why no node answers
                why = why_no_answer(node_socket, error, f"no answer from {path}")
                raise AttachError(why) from None
        with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
            yield NodeClient(InspectStub(channel))
    except AttachError as error:
        raise AttachError(f"{error}; {hint}" if hint else str(error)) from None


@contextlib.contextmanager
def index_client(settings: AskSettings) -> Iterator[IndexClient]:
    """Context with a client of the index. Raises ConfigError, and IndexUnavailable with the
    replicas that were asked.
    """
    # Here: questions to a node do without TLS, and start in half the time.
    from kvstore.client.index import IndexClient, IndexUnavailable
    from kvstore.config.cluster import resolve_tls

    tls, replicas = resolve_tls(settings, what="the index"), settings.index or []
    try:
        with IndexClient(
            replicas, tls=tls, insecure=tls is None, timeout_s=INDEX_TIMEOUT_S
        ) as client:
            yield client
    except IndexUnavailable as error:
        raise IndexUnavailable(f"{error} ({', '.join(replicas)})") from None


# ── pages over HTTP ───────────────────────────────────────────────────────────────────────────────


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
