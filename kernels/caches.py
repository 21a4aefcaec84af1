"""A rank's KV cache in the memory of a device, by addresses: pages, and the runs that they form."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]


class LayerPages(NamedTuple):
    """The pages of a layer: one of `size_bytes` a block, `stride_bytes` apart."""

    address: int
    stride_bytes: int
    size_bytes: int


class DeviceCache:
    """A rank's KV cache of one group, by addresses: blocks of one page a layer."""

    def __init__(
        self,
        layers: Sequence[LayerPages],
        block_count: int,
        *,
        uncompared: Collection[int] = (),
        values: str = "",
    ) -> None:
        """`layers`: in model order. The rest as of `pack.PagedCache`."""
        self.block_count, self.values = block_count, values
        ends = np.cumsum([layer.size_bytes for layer in layers]).tolist()
        self.block_bytes = int(ends[-1])
        self.compared = [
            (end - layer.size_bytes, end)
            for place, (layer, end) in enumerate(zip(layers, ends, strict=True))
            if place not in uncompared
        ]
        runs = list(_runs(layers))
        self._addresses = np.array([run.address for run in runs], np.uint64)
        self._strides = np.array([run.stride_bytes for run in runs], np.uint64)
        self.sizes = np.array([run.size_bytes for run in runs], np.uint64)
        self.offsets = np.concatenate(([0], np.cumsum(self.sizes)[:-1])).astype(np.uint64)
        """Places of a block's pieces in its slot."""
        begins = (runs[0].address, runs[0].stride_bytes)
        self.is_aligned_run = len(runs) == 1 and not any(each % 16 for each in begins)
        """Whether a block is one run of bytes that kernels can hash where it is."""

    def places(self, blocks: Sequence[int]) -> Addresses:
        """Addresses of the pieces of blocks, [block][piece]."""
        assert min(blocks) >= 0, blocks
        assert max(blocks) < self.block_count, f"{blocks} of {self.block_count}"
        numbers = np.array(blocks, np.uint64)
        return self._addresses + numbers[:, None] * self._strides


def _runs(layers: Sequence[LayerPages]) -> list[LayerPages]:
    """Layers joined where their pages follow one another in every block."""
    runs: list[LayerPages] = []
    for layer in layers:
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.stride_bytes == layer.stride_bytes
            and last.address + last.size_bytes == layer.address
        ):
            runs[-1] = last._replace(size_bytes=last.size_bytes + layer.size_bytes)
        else:
            runs.append(layer)
    return runs
