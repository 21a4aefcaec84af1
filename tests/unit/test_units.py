"""Figures as people read them, in one form in all commands; counts without zeros."""

from __future__ import annotations

import pytest

from kvstore.types import Counts
from kvstore.units import GIB, KIB, MIB, TIB, format_size, format_us, parse_size


@pytest.mark.parametrize(
    ("us", "text"),
    [
        *((0, "0.0 ms"), (940, "0.9 ms"), (12_345, "12.3 ms"), (99_960, "100 ms")),
        *((987_654, "988 ms"), (1_500_000, "1.5 s"), (-1_500_000, "-1.5 s")),
        *((3_599_000_000, "3599 s"), (5_400_000_000, "1.5 h")),
    ],
)
def test_a_duration_has_a_unit_of_its_length(us: float, text: str) -> None:
    assert format_us(us) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (63 * GIB, "63 GiB"),
        (5000 * TIB, "5000 TiB"),
    ],
)
def test_a_size_has_the_largest_unit_that_it_fills(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(
            ("1048576", MIB),
            ("7 B", 7),
            ("1KiB", KIB),
            ("2 mib", 2 * MIB),
            ("1.5GiB", 3 * GIB // 2),
        ),
        *(
            ("3TiB", 3 * TIB),
            ("1kB", 1000),
            ("1MB", 10**6),
            ("50GB", 50 * 10**9),
            ("2TB", 2 * 10**12),
        ),
    ],
)
def test_a_size_is_read_with_any_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


# ── counts without zeros ─────────────────────────────────────────────────────────────────────────


def test_what_comes_down_to_nothing_is_not_kept() -> None:
    counts = Counts[str]()
    counts["a"] += 3
    assert not counts.drop("a")
    assert counts == {"a": 2}
    assert counts.drop("a", 2)
    assert not counts
    assert list(counts) == []
