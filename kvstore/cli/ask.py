"""Clients of a node and of the index: a query, or one sentence why there is no answer.

Does not cover: routers (`pages`), how answers look (`tables`).
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc

from kvstore.cli.pages import decode_state
from kvstore.config.defaults import REPLY_BYTES_MAX
from kvstore.config.settings import AskSettings
from kvstore.errors import AttachError, ProtocolError
from kvstore.proto import inspect_pb2 as pb
from kvstore.proto.inspect_pb2_grpc import InspectStub
from kvstore.proto.rows import Row, decode_rows
from kvstore.supervisor.listener import INSPECT_SUFFIX
from kvstore.supervisor.upgrade import no_node_at, not_yours

if TYPE_CHECKING:
    from kvstore.client.index import IndexClient

_R = TypeVar("_R", bound=Row)
TIMEOUT_S: Final = 5.0
STATE_TIMEOUT_S: Final = 1.0
"""Timeout of the state query, which `kvstore top` repeats."""
INDEX_TIMEOUT_S: Final = 5.0


class NodeClient:
    """Asks one node. Use as a context."""

    def __init__(self, node_socket: Path) -> None:
        """Connect to the node whose attach socket is `node_socket`.

        Raises:
            AttachError: there is none; the text says how to start one.
        """
        path = node_socket.absolute()
        path = path.with_name(path.name + INSPECT_SUFFIX)
        _probe(path, node_socket)
        self._channel = grpc.insecure_channel(
            f"unix:{path}", options=[("grpc.max_receive_message_length", REPLY_BYTES_MAX)]
        )
        self._stub = InspectStub(self._channel)

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

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def _probe(path: Path, node_socket: Path) -> None:
    """Raise AttachError with the precise reason why no node answers, which gRPC does not report."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except PermissionError:
            raise AttachError(not_yours(node_socket)) from None
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED):
                raise AttachError(f"no answer from {path}: {error.strerror}") from None
            raise AttachError(no_node_at(node_socket)) from None


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
def node_client(socket: Path, *, hint: str = "") -> Iterator[NodeClient]:
    """Context with a client of the node. Raises AttachError, also for errors inside; `hint`:
    further advice in its text.
    """
    try:
        with contextlib.closing(NodeClient(socket)) as client:
            yield client
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
