"""The client of the inspect service, and how its answers look in a terminal."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.config.defaults import REPLY_BYTES_MAX
from kvstore.engine import NO_BUDGET, NO_PASS, SPACE_DIGITS, NodeReport, TierReport
from kvstore.errors import AttachError, ProtocolError
from kvstore.proto import feeds, inspect_pb2 as pb
from kvstore.proto.inspect_pb2_grpc import InspectStub
from kvstore.proto.rows import Row, decode_rows
from kvstore.supervisor.listener import INSPECT_SUFFIX
from kvstore.supervisor.upgrade import no_node_at, not_yours
from kvstore.units import US_PER_MS, format_size, format_us
from kvstore.wire.load import Load

_R = TypeVar("_R", bound=Row)
TIMEOUT_S: Final = 5.0
LOAD_TIMEOUT_S: Final = 1.0
"""Timeout of queries that are repeated."""
WITH_NODES: Final = ("nodes", "unserved", "members", "engines")
SUMMARY: Final = (*WITH_NODES, "tiers", "quotas", "spaces", "leases", "jobs")
"""Topics of the summary; those of OPTIONAL are left out when empty."""
OPTIONAL: Final = ("unserved", "members", "engines", "quotas")
WIDE_COLUMNS: Final = 240
"""Width of output that is no terminal: scripts must not see a line break in a row."""


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

    def load(self) -> tuple[str, int, Load | None]:
        """Load of the node: its name in the cluster, its incarnation, the figures. Raises
        AttachError."""
        reply = _call(self._stub.Load, pb.LoadRequest(), timeout_s=LOAD_TIMEOUT_S)
        return reply.node, reply.incarnation, feeds.load_of(reply)

    def clear(self, *, space: str) -> int:
        """Forget blocks; returns how many. Raises AttachError."""
        return int(_call(self._stub.Clear, pb.ClearRequest(space=space)).blocks)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def _probe(path: Path, node_socket: Path) -> None:
    """Raise with the precise reason why no node answers: gRPC has only the fact."""
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


# ── what it looks like ───────────────────────────────────────────────────────────────────────────

_OF_DRAM: Final = (
    *("pinned_bytes", "slots_sealed", "slots_granted", "slots_quarantined", "slots_leased"),
)
_OF_FILE: Final = ("not_admitted", "over_budget", "budget_left_bytes", "reads", "writes")
_BREAKERS = {"closed": "ok", "half-open": "being tried again", "open": "off: errors"}
"""Circuit breaker of a disk → text."""
_DURATIONS: Final = {"_ms": US_PER_MS, "_us": 1}
"""Endings of fields, in microseconds."""


def show(found: dict[str, list[Row]]) -> None:
    """Print tables to stdout: one line a row, numbers to the right, sizes readable."""
    out = console()
    for number, (topic, every) in enumerate(found.items()):
        rows = [row for row in every if not _is_absent(row)]
        if number:
            out.print()
        nodes = [row for row in rows if isinstance(row, NodeReport)]
        if topic == "nodes" and not any(row.connections or row.owners for row in nodes):
            out.print(Text(topic, style="bold"), _without_engines(rows))
        elif rows:
            out.print(_columns(topic, rows) if topic == "tiers" else _table(topic, rows))
        else:
            out.print(Text(topic, style="bold"), Text("none", style="dim"))


def console() -> Console:
    """Stdout, as wide as a terminal or wide enough for scripts."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=WIDE_COLUMNS)


def table(names: Iterable[str], *, numbers: Container[str] = (), title: str | None = None) -> Table:
    """An empty one with these columns, numbers to the right."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in names:
        made.add_column(name, header_style="dim", justify="right" if name in numbers else "left")
    return made


def _without_engines(rows: Sequence[Row]) -> Text:
    """A node without engines: its other figures, in place of a row of zeros."""
    values = (pair for row in rows for pair in msgspec.structs.asdict(row).items())
    facts = [f"{_title(name)} {value}" for name, value in values if value]
    return printable(", ".join(["no engine is attached", *facts]))


def _is_absent(row: Row) -> bool:
    """A tier that this node was not given."""
    return isinstance(row, TierReport) and not row.capacity_bytes and not row.blocks


def _table(topic: str, rows: Sequence[Row]) -> Table:
    """One line a row."""
    values = [msgspec.structs.asdict(row) for row in rows]
    numbers = {_title(name) for row in values for name, value in row.items() if type(value) is int}
    made = table(map(_title, values[0]), numbers=numbers, title=topic)
    for row in values:
        made.add_row(*(_cell(name, value) for name, value in row.items()))
    return made


def _columns(topic: str, rows: Sequence[Row]) -> Table:
    """One column a row: of few rows with many fields, each for some of them only."""
    (_, *names), values = rows[0].__struct_fields__, [msgspec.structs.asdict(row) for row in rows]
    tiers = [value["tier"] for value in values]
    made = table(["", *tiers], numbers=tiers, title=topic)
    for name in names:
        cells = [
            Text("-")
            if name in (_OF_FILE if value["tier"] == "dram" else _OF_DRAM)
            else _cell(name, value[name])
            for value in values
        ]
        if any(cell.plain != "-" for cell in cells):
            made.add_row(Text(_title(name), style="dim"), *cells)
    return made


def _title(name: str) -> str:
    name = name.removesuffix("_bytes").replace("_per_", "/")
    return (name[:-3] if name[-3:] in _DURATIONS else name).replace("_", " ")


def _cell(name: str, value: object) -> Text:
    if (name, value) == ("budget_left_bytes", NO_BUDGET):
        return Text("any")
    if (name, value) in (("pinned_bytes", 0), ("scrub_age_ms", NO_PASS)):
        return Text("-")
    if name == "space" and isinstance(value, str):
        return printable(value[:SPACE_DIGITS])
    if name in ("reads", "writes") and isinstance(value, str):
        return printable(f"breaker {_BREAKERS.get(value, value)}")
    if name == "quota" and not value:
        return Text("(all others)")
    if "bytes" in name and isinstance(value, int):
        return Text(format_size(value))
    if isinstance(value, int) and (us := _DURATIONS.get(name[-3:])):
        return Text(format_us(us * value))
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    if name in ("slots_quarantined", "scrub_bad") and value:
        return Text(str(value), style="yellow")
    return printable("-" if value in ("", None) else str(value))


def printable(text: str) -> Text:
    """Engines choose their names and users the ids of requests; terminals obey some characters."""
    return Text("".join(c if c.isprintable() else "?" for c in text))
