"""One Hello with numbers that no model has is one refusal: others are told all they ask."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvstore.proto.rows import encode_rows
from kvstore.wire.messages import HelloRank, Refused, encode
from tests.faults.door import Door, Guest, Line
from tests.unit.engine.harness import Hellos


@pytest.mark.parametrize(
    ("field", "value"),
    [("hash_block_tokens", 2**63), ("hash_block_tokens", -1), ("block_tokens", -16)],
)
def test_an_absurd_hello_is_refused_and_inspect_goes_on(
    tmp_path: Path, field: str, value: int
) -> None:
    absurd = Hellos("absurd")
    hello = absurd.rank_hello(0)
    assert isinstance(hello, HelloRank)
    (group,) = hello.groups
    space = msgspec.structs.replace(group.space, **{field: value})
    hello = msgspec.structs.replace(hello, groups=(msgspec.structs.replace(group, space=space),))
    with Door(tmp_path) as door:
        Guest(door, "bystander")
        scheduler, rank = Line(door), Line(door)
        scheduler.introduce(encode(absurd.scheduler_hello()))
        rank.introduce(encode(hello))
        (refused,) = rank.hear()
        assert isinstance(refused, Refused)
        assert refused.permanent
        assert f"space.{field}" in refused.reason
        assert encode_rows(door.engine.explain.hashings()) != "[]"
        assert encode_rows(door.engine.spaces()) != "[]"
