"""PagedCache against the reference, over every way that layers can lie in memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from kvstore.kernels import host
from kvstore.kernels.host import COPY_BYTES, PagedCache
from kvstore.kernels.port import Bytes
from tests.amounts import amount
from tests.kit import reference

HEADER = b"a header of some length"


@dataclass(frozen=True)
class Lie:
    """Where the layers of a cache lie."""

    layer_count: int
    block_count: int
    page_bytes: int
    pad_bytes: int
    """Behind every page."""
    order: str
    """layers: [L][B][P]; blocks: [B][L][P]; backwards: [L reversed][B][P]; last first:
    [L][B reversed][P]; apart: allocations; uneven: [L][B][P] with another gap before each
    layer; sizes: [L][B][P], every third page half as large."""

    def build(self, seed: int) -> list[Bytes]:
        rng = np.random.default_rng(seed)
        stride = self.page_bytes + self.pad_bytes
        whole = self.block_count * stride
        if self.order == "apart":
            bases = [rng.integers(0, 256, whole, np.uint8) for _ in range(self.layer_count)]
            return [self._pages(b.reshape(self.block_count, stride)) for b in bases]
        if self.order == "uneven":
            gaps = np.cumsum(rng.integers(0, 999, self.layer_count))
            base = rng.integers(0, 256, self.layer_count * whole + int(gaps[-1]), np.uint8)
            begins = [layer * whole + int(gaps[layer]) for layer in range(self.layer_count)]
            return [
                self._pages(base[at : at + whole].reshape(self.block_count, stride))
                for at in begins
            ]
        base = rng.integers(0, 256, self.layer_count * whole, np.uint8)
        if self.order == "blocks":
            grid = base.reshape(self.block_count, self.layer_count, stride).transpose(1, 0, 2)
        else:
            grid = base.reshape(self.layer_count, self.block_count, stride)
        layers = [self._pages(grid[layer]) for layer in range(self.layer_count)]
        if self.order == "sizes":
            half = -(-self.page_bytes // 2)
            layers[::3] = [layer[:, :half] for layer in layers[::3]]
        if self.order == "last first":
            return [layer[::-1] for layer in layers]
        return layers[::-1] if self.order == "backwards" else layers

    def _pages(self, padded: Bytes) -> Bytes:
        return padded[:, : self.page_bytes]


lies = st.builds(
    Lie,
    layer_count=st.integers(1, 6),
    block_count=st.integers(1, 4),
    page_bytes=st.sampled_from([1, 48, 4096, 65536, COPY_BYTES - 1, COPY_BYTES, COPY_BYTES + 7]),
    pad_bytes=st.sampled_from([0, 1, 64]),
    order=st.sampled_from(
        ["layers", "blocks", "backwards", "last first", "apart", "uneven", "sizes"]
    ),
)


@settings(max_examples=amount(30, nightly=2000))
@given(lie=lies, data=st.data())
@example(lie=Lie(16, 2, 131072, 0, "layers"), data=None)
@example(lie=Lie(6, 2, 65536, 0, "sizes"), data=None)
@example(lie=Lie(2, 3, 48, 1, "last first"), data=None)
@example(lie=Lie(3, 2, 3 * COPY_BYTES + 5, 8, "blocks"), data=None)
def test_it_agrees_with_the_reference(lie: Lie, data: st.DataObject | None) -> None:
    block = data.draw(st.integers(0, lie.block_count - 1)) if data else lie.block_count - 1
    layers, expected = lie.build(1), lie.build(1)
    cache = PagedCache(layers)
    size = sum(layer.shape[1] for layer in layers)
    assert (cache.block_bytes, cache.block_count) == (size, lie.block_count)

    slot, expected_slot = np.zeros(size + 99, np.uint8), np.zeros(size + 99, np.uint8)
    checksum = reference.pack(expected, block, expected_slot, HEADER)
    assert cache.store(block, slot, HEADER) == checksum
    np.testing.assert_array_equal(slot, expected_slot)
    _same_memory(layers, expected)

    slot = np.random.default_rng(2).integers(0, 256, size + 99, np.uint8)
    before = slot.copy()
    checksum = reference.unpack(slot, expected, block, HEADER)
    cache.load(slot, block)
    _same_memory(layers, expected)
    for layer in layers:
        layer[block] = 0
    assert cache.load_checked(slot, block, HEADER) == checksum
    _same_memory(layers, expected)
    np.testing.assert_array_equal(slot, before)
    cache.clear(block)
    for layer in expected:
        layer[block] = 0
    _same_memory(layers, expected)


def _same_memory(layers: list[Bytes], expected: list[Bytes]) -> None:
    """Every byte of both allocations, paddings and other blocks included."""
    for mine, theirs in zip(layers, expected, strict=True):
        np.testing.assert_array_equal(_root(mine), _root(theirs))


def _root(array: Bytes) -> Bytes:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def test_layers_in_line_are_copied_together() -> None:
    assert len(host._runs(Lie(16, 2, 64, 0, "layers").build(1))) == 1
    assert len(host._runs(Lie(16, 2, 64, 8, "blocks").build(1))) == 1
    sizes = [
        end - begin
        for _, begin, end in PagedCache(Lie(16, 1, 131072, 0, "layers").build(1))._pieces
    ]
    assert sizes == [COPY_BYTES] * 8


@pytest.mark.parametrize(
    "layers",
    [
        [],
        [np.zeros((2, 8), np.uint8), np.zeros((3, 8), np.uint8)],
        [np.zeros((2, 8), np.uint16)],
        [np.zeros((2, 16), np.uint8)[:, ::2]],
        [np.zeros(8, np.uint8)],
        [np.frombuffer(bytes(16), np.uint8).reshape(2, 8)],
    ],
)
def test_what_is_no_cache_is_refused(layers: list[Bytes]) -> None:
    with pytest.raises(ValueError, match="cache must be"):
        PagedCache(layers)


def test_a_block_or_slot_out_of_range_is_a_bug() -> None:
    cache = PagedCache([np.zeros((2, 8), np.uint8)])
    for block, size in ((2, 8), (-1, 8), (0, 7)):
        with pytest.raises(AssertionError):
            cache.load(np.zeros(size, np.uint8), block)


@pytest.mark.parametrize("verb", ["store", "load", "load_checked"])
def test_copies_run_without_the_gil(verb: str) -> None:
    """With no forced switches, this thread runs before the copy's end only if the copy lets go."""
    layers = [np.zeros((1, 128 << 20), np.uint8)]
    cache, slot = PagedCache(layers), np.zeros(128 << 20, np.uint8)
    calls: dict[str, Callable[[], object]] = {
        "store": lambda: cache.store(0, slot, HEADER),
        "load": lambda: cache.load(slot, 0),
        "load_checked": lambda: cache.load_checked(slot, 0, HEADER),
    }
    begun, ended = threading.Event(), []

    def copy() -> None:
        begun.set()
        calls[verb]()
        ended.append(True)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=copy)
    try:
        sys.setswitchinterval(100)
        thread.start()
        begun.wait()
        seen_before_end = not ended
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert seen_before_end
