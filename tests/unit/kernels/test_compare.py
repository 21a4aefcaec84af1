"""How far two blocks lie apart, in numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.kernels.host import BOUNDS, PagedCache, error_of
from kvstore.kernels.port import Bytes

LAYERS, VALUES = 3, 4096
RNG = np.random.default_rng(7)


def pages(numbers: NDArray[np.float32], values: str) -> list[Bytes]:
    """Layers of a block in this type."""
    if values == "bfloat16":
        upper = (numbers.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return [np.ascontiguousarray(layer).view(np.uint8) for layer in upper]
    return [np.ascontiguousarray(layer.astype(values)).view(np.uint8) for layer in numbers]


def block() -> NDArray[np.float32]:
    return RNG.standard_normal((LAYERS, VALUES), np.float32)


@pytest.mark.parametrize("values", BOUNDS)
def test_blocks_that_have_nothing_in_common_are_far_apart(values: str) -> None:
    error = error_of(pages(block(), values), pages(block(), values), values=values)
    assert error == pytest.approx(math.sqrt(2), rel=0.1)
    assert error > 3 * BOUNDS[values]


@pytest.mark.parametrize("values", BOUNDS)
@pytest.mark.parametrize("size", [1e-3, 0.05, 0.5])
def test_the_error_is_the_distance_over_the_size(values: str, size: float) -> None:
    numbers = block()
    noise = RNG.standard_normal(numbers.shape, np.float32) * np.float32(size)
    error = error_of(pages(numbers, values), pages(numbers + noise, values), values=values)
    assert error == pytest.approx(size, rel=0.2, abs=4e-3)


def test_one_layer_is_enough() -> None:
    one = block()
    other = one.copy()
    other[1] = RNG.standard_normal(VALUES)
    assert error_of(pages(one, "float32"), pages(other, "float32"), values="float32") > 1


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_numbers_of_any_size_count(scale: float) -> None:
    one, other = block() * np.float32(scale), block() * np.float32(scale)
    error = error_of(pages(one, "float32"), pages(other, "float32"), values="float32")
    assert error == pytest.approx(math.sqrt(2), rel=0.1)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_hides_nothing(odd: float) -> None:
    one = block()
    other = one.copy()
    other[0, 5] = odd
    assert error_of(pages(one, "float32"), pages(other, "float32"), values="float32") == math.inf
    one[0, 5] = odd
    assert error_of(pages(one, "float32"), pages(other, "float32"), values="float32") == 0.0
    other[2] = RNG.standard_normal(VALUES)
    assert error_of(pages(one, "float32"), pages(other, "float32"), values="float32") > 1


def test_nothing_is_equal_to_nothing_and_to_nothing_else() -> None:
    zeros = np.zeros((LAYERS, VALUES), np.float32)
    assert error_of(pages(zeros, "float16"), pages(zeros, "float16"), values="float16") == 0.0
    assert error_of(pages(zeros, "float16"), pages(block(), "float16"), values="float16") == 1.0


def test_a_cache_compares_its_blocks_with_slots_and_changes_neither() -> None:
    memory = np.stack([block(), block()], axis=1)  # [layer][block][value]
    layers = [np.ascontiguousarray(layer).view(np.uint8) for layer in memory]
    cache = PagedCache(layers, values="float32")
    slot = np.zeros(cache.block_bytes + 8, np.uint8)
    cache.store(1, slot, b"")
    before = (slot.copy(), [layer.copy() for layer in layers])
    assert cache.error(1, slot) == 0.0
    assert cache.error(0, slot) > 1
    assert np.array_equal(slot, before[0])
    assert all(np.array_equal(a, b) for a, b in zip(layers, before[1], strict=True))


def test_a_layer_that_may_differ_is_left_out() -> None:
    layers = [np.ascontiguousarray(each)[None].view(np.uint8) for each in block()]
    cache = PagedCache(layers, uncompared=[1], values="float32")
    slot = np.zeros(cache.block_bytes, np.uint8)
    cache.store(0, slot, b"")
    layers[1][:] = 0
    assert cache.error(0, slot) == 0.0
    layers[2][:] = 0
    assert cache.error(0, slot) == 1.0
