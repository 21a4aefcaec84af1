"""Figures as people read them: one form in all commands."""

from __future__ import annotations

import pytest

from kvstore.units import GIB, TIB, format_size, format_us


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
