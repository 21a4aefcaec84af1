"""How fast a scrub reads."""

from __future__ import annotations

import pytest

from kvstore.tiers.file.config import AUTO, AUTO_BYTES_PER_S_MAX, DAY_S, ScrubRate
from kvstore.units import GIB, MIB, TIB


def pass_s(rate: ScrubRate, held_bytes: int) -> float:
    return rate.seconds(held_bytes, held_bytes=held_bytes)


def test_a_rate_is_kept_whatever_is_held() -> None:
    rate = ScrubRate(64 * MIB, daily=False)
    assert rate.seconds(16 * MIB, held_bytes=0) == 0.25
    assert rate.seconds(16 * MIB, held_bytes=TIB) == 0.25


@pytest.mark.parametrize(
    ("held_bytes", "expected_s"),
    [
        (512 * GIB, DAY_S),
        (16 * TIB, 16 * TIB / AUTO_BYTES_PER_S_MAX),  # as fast as it may, which is six days
        (64 * MIB, 64),  # a megabyte a second is no burden
    ],
)
def test_a_pass_takes_a_day_within_bounds(held_bytes: int, expected_s: float) -> None:
    assert pass_s(AUTO, held_bytes) == pytest.approx(expected_s)
