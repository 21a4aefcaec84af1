"""Rows of `kvstore.engine.report` to and from protobuf. Field names are the same on both sides."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec
from google.protobuf.message import Message

from kvstore.engine.report import (
    BlockReport,
    JobReport,
    LeaseReport,
    NodeReport,
    SpaceReport,
    TierReport,
)
from kvstore.proto import inspect_pb2 as pb

Row = NodeReport | TierReport | SpaceReport | BlockReport | LeaseReport | JobReport

MESSAGES: Final[dict[type[Row], type[Message]]] = {
    NodeReport: pb.NodeReport,
    TierReport: pb.TierReport,
    SpaceReport: pb.SpaceReport,
    BlockReport: pb.BlockReport,
    LeaseReport: pb.LeaseReport,
    JobReport: pb.JobReport,
}

_R = TypeVar("_R", bound=Row)


def to_message(row: Row) -> Message:
    """The protobuf message of a row."""
    return MESSAGES[type(row)](**msgspec.structs.asdict(row))


def from_message(kind: type[_R], message: Message) -> _R:
    """The row of a protobuf message."""
    return kind(**{name: getattr(message, name) for name in kind.__struct_fields__})
