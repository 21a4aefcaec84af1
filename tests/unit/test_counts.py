"""Counts without zeros."""

from __future__ import annotations

from kvstore.types import Counts


def test_what_comes_down_to_nothing_is_not_kept() -> None:
    counts = Counts[str]()
    counts["a"] += 3
    assert not counts.drop("a")
    assert counts == {"a": 2}
    assert counts.drop("a", 2)
    assert not counts
    assert list(counts) == []
