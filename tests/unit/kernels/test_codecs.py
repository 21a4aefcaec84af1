"""The codecs' references by themselves: what comes back, how far off, how small."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from numpy.typing import NDArray

from kvstore.kernels import fp8, planes
from kvstore.kernels.compare import BOUNDS, error_of
from tests.unit.kernels.test_kernels_on_host import payload_of

CODES = np.arange(256, dtype=np.uint8)
HEAD = 16 * 256
"""Values of a head: 16 tokens, K and V of 128."""


def _value(code: int) -> float:
    """Of an e4m3 code, by its definition."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -size if code >> 7 else size


VALUES = np.array([_value(code) for code in range(256)])
FINITE = (CODES & 0x7F) != 0x7F


def _halves(numbers: NDArray[np.floating[Any]], kind: str) -> NDArray[np.uint16]:
    return fp8._halves(numbers.astype(np.float32), kind)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_each_code_decodes_to_its_value(kind: str) -> None:
    scales = np.array([127], np.uint8)
    found = fp8._floats(fp8.decode(scales, CODES[None], kind), kind)[0]
    np.testing.assert_array_equal(found[FINITE], VALUES[FINITE].astype(np.float32))
    assert np.isnan(found[~FINITE]).all()


@given(st.lists(st.floats(-448, 448, width=16), min_size=1, max_size=50))
def test_no_code_is_nearer(numbers: list[float]) -> None:
    """And of two as near the one whose last bit is 0. The largest value has the scale be 1."""
    row = np.array([[448.0, *numbers]], np.float32)
    codes = fp8.encode(_halves(row, "float16"), "float16").codes[0]
    for number, code in zip(row[0].tolist(), codes.tolist(), strict=True):
        apart = np.abs(VALUES[FINITE] - number)
        nearest = CODES[FINITE][apart == apart.min()]
        assert code in nearest
        if len({_value(int(other)) for other in nearest}) > 1:
            assert code % 2 == 0


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_the_error_of_normal_values_is_a_fortieth(kind: str, size: float) -> None:
    values = _halves(np.random.default_rng(3).standard_normal((8, HEAD)) * size, kind)
    rows = fp8.encode(values, kind)
    back = fp8.decode(rows.scales, rows.codes, kind)
    error = error_of([values.view(np.uint8).ravel()], [back.view(np.uint8).ravel()], values=kind)
    assert 0.02 < error < 0.03 < BOUNDS[kind]
    numbers, found = fp8._floats(values, kind), fp8._floats(back, kind)
    np.testing.assert_array_equal(rows.errors, np.abs(numbers - found).max(axis=1))
    is_large = np.abs(numbers) > np.abs(numbers).max(axis=1, keepdims=True) * 2.0**-13
    assert (np.abs(numbers - found) <= np.abs(numbers) / 16)[is_large].all()


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [0x7F7F, 0x7BFF, 1, 0x8001, 0, 0x8000])
def test_the_largest_and_least_values_stay_finite(kind: str, bits: int) -> None:
    if kind == "float16" and bits == 0x7F7F:
        return
    rows = fp8.encode(np.full((1, 3), bits, np.uint16), kind)
    assert rows.is_whole
    assert np.isfinite(fp8._floats(fp8.decode(rows.scales, rows.codes, kind), kind)).all()


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_a_row_that_is_not_finite_has_no_scale(odd: float) -> None:
    numbers = np.ones((3, 8), np.float32)
    numbers[1, 4] = odd
    halves = {
        "float16": numbers.astype(np.float16).view(np.uint16),
        "bfloat16": (numbers.view(np.uint32) >> 16).astype(np.uint16),
    }
    for kind, bits in halves.items():
        rows = fp8.encode(bits, kind)
        assert (rows.scales == fp8.NO_SCALE).tolist() == [False, True, False]
        assert not rows.is_whole


@given(
    size=st.integers(0, 5000),
    planes_=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from(["normal", "zeros", "equal", "noise"]),
    seed=st.integers(0, 2**32 - 1),
)
@example(0, 1, "noise", 0)
@example(5000, 2, "normal", 0)
def test_planes_come_back_and_never_grow(size: int, planes_: int, kind: str, seed: int) -> None:
    payload = payload_of(seed, size, kind)
    encoded = planes.encode(payload, planes_)
    if encoded is not None:
        assert len(encoded) < size
        assert planes.decode(encoded, size, planes_) == payload


def test_planes_of_normal_values_take_three_quarters() -> None:
    """Their exponents have 2.6 bits of information, of 16: no code does better than 0.66."""
    encoded = planes.encode(payload_of(1, 1 << 20, "normal"), 2)
    assert encoded is not None
    assert 0.66 < len(encoded) / (1 << 20) < 0.78
    assert planes.encode(payload_of(1, 1 << 16, "noise"), 2) is None


@pytest.mark.parametrize("cut", [0, 1, 4, 40, -1, -4])
@pytest.mark.parametrize("more", [b"", b"1", b"4444"])
def test_bytes_that_are_no_encoded_payload_are_refused(cut: int, more: bytes) -> None:
    encoded = planes.encode(payload_of(1, 6000, "normal"), 2)
    assert encoded is not None
    for wrong in (encoded[:cut], encoded + more * cut):
        if wrong != encoded:
            with pytest.raises(ValueError, match="payload"):
                planes.decode(wrong, 6000, 2)
