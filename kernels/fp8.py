"""FP8 (e4m3) with a scale for each head: the reference of `csrc/fp8.cu`. Loses precision.

A row is what one head of one layer has in a block, [token][K‖V]: `length` values of bfloat16 or
float16. Its scale is a power of two, the least with which its largest value is at most 448, as the
biased exponent of OCP's E8M0 (scale = 2 ** (byte - 127)): multiplying by it rounds nothing. Values
are rounded once, to the nearest code, ties to even. A row with an infinity or NaN has the scale
255 and no codes: its block is kept as it is.

    scales u8 [rows]     codes u8 [rows][length]     errors f32 [rows]

The error is measured and not estimated: the largest difference between a value of the row and what
decodes from its code. Values within 2⁻¹⁴ of a row's largest are at most 1/16 of themselves off;
the distance of whole blocks (`compare.error_of`) is about 0.026 for normally distributed ones,
below every bound that shadow checks set (`compare.BOUNDS`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_SCALE: Final = 255

Halves = NDArray[np.uint16]
_Floats = NDArray[np.float32]


class Fp8Rows(NamedTuple):
    """Encoded rows; see the module."""

    scales: NDArray[np.uint8]
    codes: NDArray[np.uint8]
    errors: NDArray[np.float32]

    @property
    def is_whole(self) -> bool:
        """Whether every row could be encoded."""
        return not (self.scales == NO_SCALE).any()


def encode(values: Halves, kind: str) -> Fp8Rows:
    """Rows of values, u16 [rows][length], in FP8. `kind`: bfloat16 or float16."""
    numbers = _floats(values, kind)
    with np.errstate(invalid="ignore"):
        largest = np.abs(numbers).max(axis=1, initial=0.0)
    bits = largest.view(np.uint32)
    exponents = (bits >> 23).astype(np.int64) - 8 + ((bits & 0x7FFFFF) > 0x600000)
    is_finite = np.isfinite(largest)
    scales = np.where(is_finite, np.maximum(exponents, 1), NO_SCALE).astype(np.uint8)
    down = np.where(is_finite, np.ldexp(1.0, 127 - scales.astype(np.int64)), 0).astype(np.float32)
    with np.errstate(invalid="ignore"):
        codes = _codes(numbers * down[:, None])
        codes[~is_finite] = 0
        back = _floats(decode(scales, codes, kind), kind)
        errors = np.abs(numbers - back).max(axis=1, initial=0.0)
    return Fp8Rows(scales, codes, np.where(is_finite, errors, np.float32(0)))


def decode(scales: NDArray[np.uint8], codes: NDArray[np.uint8], kind: str) -> Halves:
    """The values of rows; zeros of a row without a scale. No value becomes infinite."""
    exponent, mantissa = codes >> 3 & 15, (codes & 7).astype(np.float32)
    size = np.where(
        exponent > 0,
        np.ldexp(1 + mantissa / 8, exponent.astype(np.int64) - 7),
        np.ldexp(mantissa, -9),
    )
    size = np.where((codes & 0x7F) == 0x7F, np.float32(np.nan), size).astype(np.float32)
    up = np.ldexp(1.0, scales.astype(np.int64) - 127) * (scales != NO_SCALE)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = np.where(codes >> 7, -size, size) * up.astype(np.float32)[:, None]
    return _halves(numbers, kind)


def _codes(numbers: _Floats) -> NDArray[np.uint8]:
    """e4m3 of numbers up to 448: steps of 2⁻⁹ below 2⁻⁶, above of an eighth of the power of two."""
    size = np.abs(numbers).astype(np.float64)
    _, exponent = np.frexp(size)
    power = np.maximum(exponent.astype(np.int64) - 1, -6)
    steps = np.rint(np.ldexp(size, 3 - power)).astype(np.int64)  # rint: ties to even
    codes = np.where(size < 2.0**-6, steps, steps + 8 * (power + 6))
    signs = np.signbit(numbers).astype(np.uint8) * np.uint8(0x80)
    found: NDArray[np.uint8] = np.clip(codes, 0, 0x7E).astype(np.uint8) | signs
    return found


def _floats(values: Halves, kind: str) -> _Floats:
    if kind == "float16":
        return values.view(np.float16).astype(np.float32)
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _halves(numbers: _Floats, kind: str) -> Halves:
    """To the nearest, ties to even; of what would be infinite the largest finite value."""
    if kind == "float16":
        largest = np.float32(65504)
        return np.clip(numbers, -largest, largest).astype(np.float16).view(np.uint16)
    bits = numbers.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> np.uint32(16)
    limit = bits >> 16 & 0x8000 | 0x7F7F
    is_large = (rounded & 0x7FFF) > 0x7F7F
    halves = np.where(is_large, limit, rounded)
    return np.where(np.isnan(numbers), bits >> 16 & 0x8000 | 0x7FC0, halves).astype(np.uint16)
