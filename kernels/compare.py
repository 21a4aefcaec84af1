"""Distance of the values of a block from those in a slot: numbers, not bytes.

The same tokens computed twice do not give the same bytes: batches of another composition add in
another order. Another model, or other tokens, give entirely different numbers. `error_of` is the
distance of two blocks over the norm of the larger, the maximum over layers: 0 for equal blocks,
about 1.4 for unrelated ones.

    error = max over layers of   ‖ computed - cached ‖ / max(‖ computed ‖, ‖ cached ‖)

Both sides have the layout of one space, so they are compared element by element, in whatever order
a page is packed. A value that is finite on one side only makes the error infinite.

Does not cover: whether the bytes of the slot are those that were stored (checksums).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.kernels.reference import Bytes

BOUNDS: Final = {"float32": 1e-2, "float16": 0.2, "bfloat16": 0.2}
"""Up to this error a block is taken for the same, by the type of its values. See ADR 7."""

_Floats = NDArray[np.float32]


def _of_bfloat16(page: Bytes) -> _Floats:
    """Values of a page of bfloat16, each of which is the upper half of a float32."""
    return (page.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


_READERS: Final[dict[str, Callable[[Bytes], _Floats]]] = {
    "float32": lambda page: page.view(np.float32),
    "float16": lambda page: page.view(np.float16).astype(np.float32),
    "bfloat16": _of_bfloat16,
}


def error_of(computed: list[Bytes], cached: list[Bytes], *, values: str) -> float:
    """The error of a block, which is that of its worst layer.

    Args:
        computed: per layer, the page in the engine's cache, contiguous [page_bytes] u8.
        cached: per layer, the same part of the slot.
        values: type of the numbers in them, a key of BOUNDS.
    """
    read = _READERS[values]
    pairs = zip(computed, cached, strict=True)
    return max(_error(read(one), read(other)) for one, other in pairs)


def _error(one: _Floats, other: _Floats) -> float:
    """The error of one layer; infinite if a value is finite in one of the two only."""
    numbers = np.isfinite(one)
    if not np.array_equal(numbers, np.isfinite(other)):
        return math.inf
    if not numbers.all():
        one, other = one[numbers], other[numbers]
    # Scaled, so that no square overflows.
    scale = max(_largest(one), _largest(other))
    if scale == 0.0:
        return 0.0
    one, other = one / np.float32(scale), other / np.float32(scale)
    size = max(_square(one), _square(other))
    return math.sqrt(_square(one - other) / size)


def _largest(values: _Floats) -> float:
    return float(np.abs(values).max(initial=0.0))


def _square(values: _Floats) -> float:
    found: Any = np.dot(values, values)
    return float(found)
