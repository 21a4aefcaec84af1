"""Which space an operator means, and that rows survive protobuf."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import grpc
import msgspec
import pytest

from kvstore.engine.engine import Engine
from kvstore.engine.explain import HashingReport, RangeReport, RequestReport
from kvstore.engine.report import (
    NO_BUDGET,
    BlockReport,
    JobReport,
    LeaseReport,
    NodeReport,
    SpaceReport,
    TierReport,
)
from kvstore.proto.convert import MESSAGES, Row, from_message, to_message
from kvstore.serve.inspect import SpaceUnknown, find_space

SPACES = [b"\xab\xcd" + bytes(30), b"\xab\xce" + bytes(30)]


def engine_with_spaces() -> Engine:
    return cast("Engine", SimpleNamespace(space_ids=lambda: SPACES))


@pytest.mark.parametrize(("prefix", "index"), [("abcd", 0), ("abce00", 1), ("abcd" + "0" * 60, 0)])
def test_a_unique_prefix_names_a_space(prefix: str, index: int) -> None:
    assert find_space(engine_with_spaces(), prefix) == SPACES[index]


@pytest.mark.parametrize(
    ("prefix", "code"),
    [("ab", grpc.StatusCode.FAILED_PRECONDITION), ("ff", grpc.StatusCode.NOT_FOUND)],
)
def test_any_other_prefix_names_none(prefix: str, code: grpc.StatusCode) -> None:
    with pytest.raises(SpaceUnknown) as caught:
        find_space(engine_with_spaces(), prefix)
    assert caught.value.code is code
    assert repr(prefix) in str(caught.value)


ROWS: list[Row] = [
    NodeReport("ff", 1, 2, 3, 4, 5),
    TierReport("dram", 2**40, 2, 3, 4, 5, 6, 7, 8, "lru", 9, NO_BUDGET),
    SpaceReport("ab", "t", "model", 1, 2, 3, 4),
    BlockReport("k", "s", "t", "layers 0-1 heads 0-1", "dram", -1, 2**63, 3),
    LeaseReport("e", 1, 2, 3, 4, -5),
    JobReport("e", 1, 2, True, 3, 4),
    RequestReport(1, "r", "e", "m", "t", "s", 2, 16, 3, 4, 5, 6, "o", "text", 7, 8, 9, 10, 11),
    RangeReport(0, 2**40, "dram", "", "loaded from dram"),
    HashingReport("s", "t", "m", 16, "sha256_cbor", "seed"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: type(row).__name__)
def test_rows_survive_protobuf(row: Row) -> None:
    sent = to_message(row).SerializeToString()
    back = MESSAGES[type(row)].FromString(sent)
    assert from_message(type(row), back) == row


def test_no_field_is_forgotten_on_either_side() -> None:
    assert {type(row) for row in ROWS} == set(MESSAGES)
    for kind, message in MESSAGES.items():
        theirs = [field.name for field in message.DESCRIPTOR.fields]
        assert theirs == [field.name for field in msgspec.structs.fields(kind)]
