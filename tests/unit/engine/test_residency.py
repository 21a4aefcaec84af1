"""Rows of scopes: found, counted, and taken in slices that look at each row once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvstore.engine import engine as engine_module
from kvstore.engine.events import Clear, Cleared
from kvstore.engine.memory import residency as module
from kvstore.types import SpaceId
from kvstore.wire.messages import keys_array
from tests.unit.engine.disk import SPACE, known
from tests.unit.engine.harness import WHOLE, Node, keys, residency_of

OTHER = SpaceId(bytes(32))


@given(
    scopes=st.lists(st.integers(1, 3), max_size=30),
    gone=st.sets(st.integers(0, 29)),
    wanted=st.sets(st.integers(1, 3)),
    count_max=st.integers(0, 30),
    begin=st.integers(0, 30),
)
def test_rows_are_found_from_anywhere_on(
    scopes: list[int], gone: set[int], wanted: set[int], count_max: int, begin: int
) -> None:
    residency = residency_of(32, 1)
    for number in range(1, 4):
        assert residency.scope("t", SpaceId(bytes([number]) * 32), WHOLE) == number
    for number, scope in enumerate(scopes):
        residency.table.insert(scope, np.full((1, 4), number, dtype=np.uint64))
    rows = np.arange(len(scopes))
    residency.put_file(rows, rows.astype(np.uint64) + np.uint64(1))
    residency.drop_file(rows[[row in gone for row in rows]])
    begin = min(begin, len(scopes))
    there = [row for row, scope in enumerate(scopes) if row not in gone and scope in wanted]
    expected = [row for row in there if row >= begin] + [row for row in there if row < begin]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SCAN_ROWS", 4)
        found = residency.rows_in(wanted, count_max, begin=begin)
    assert found.tolist() == expected[:count_max]


def test_a_clear_finds_what_took_rows_that_it_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "CLEAR_ROWS_MAX", 4)
    monkeypatch.setattr(module, "SCAN_ROWS", 3)
    node = Node(slots=8, block_count_max=28)
    clear = Clear(SPACE, None)
    node.step(known(*range(20)))
    assert [node.step(clear)[-1] for _ in range(6)] == [Cleared(4)] * 5 + [Cleared(0)]
    node.step(known(*range(10)), known(*range(20, 30), space=OTHER, at=100))
    assert node.step(clear)[-1] == Cleared(4)
    node.step(known(40, 41, at=200))
    residency = node.state.residency
    rows = residency.table.find(residency.scope("t", SPACE, WHOLE), keys_array(keys(40, 41)))
    assert max(rows) < node.engine._clear_from, "they lie where the clear has been"
    assert [node.step(clear)[-1] for _ in range(3)] == [Cleared(4), Cleared(4), Cleared(0)]
    assert node.engine.blocks(space=SPACE.hex()) == []
    assert len(node.engine.blocks(space=OTHER.hex())) == 10
