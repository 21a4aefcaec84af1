"""The port of a device: streams, events, copies and memory of one GPU; and a rank's KV cache there,
by addresses: pages, and the runs that they form.

Does not cover: one device's calls (`cuda.py`), which copies run on them (`device.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]
Bytes = NDArray[np.uint8]


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
        """Args:
        layers: in model order.
        block_count: of the engine.
        uncompared: places of the layers that comparisons leave out.
        values: type of the numbers, a key of `host.BOUNDS`; empty: nothing is compared.
        """
        self.block_count, self.values = block_count, values
        ends = np.cumsum([layer.size_bytes for layer in layers]).tolist()
        self.block_bytes = int(ends[-1])
        self.compared = {
            place: slice(end - layer.size_bytes, end)
            for place, (layer, end) in enumerate(zip(layers, ends, strict=True))
            if place not in uncompared
        }
        """Parts of a slot that comparisons look at, by the place of their layer."""
        runs = list(_runs(layers))
        self._addresses = np.array([run.address for run in runs], np.uint64)
        # One may be negative: `places` adds modulo 2**64.
        self._strides = np.array([run.stride_bytes for run in runs], np.int64).astype(np.uint64)
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
    for address, stride, size in layers:
        last = runs[-1] if runs else None
        if last and (last.address + last.size_bytes, last.stride_bytes) == (address, stride):
            runs[-1] = last._replace(size_bytes=last.size_bytes + size)
        else:
            runs.append(LayerPages(address, stride, size))
    return runs


HANDLE_BYTES: Final = 64
"""Size of CUDA's cudaIpcMemHandle_t."""


class DeviceError(Exception):
    """A call of the device failed."""


class Device(Protocol):
    """A device with streams, which run what they are given in order, and events on them, and with
    memory, which processes can share.

    Copies are within its memory, or between that and pinned memory of the host. Any thread may
    call; calls about memory may wait, those about streams do not. Handles are numbers of the
    device's choice.

    Every method raises DeviceError.
    """

    def kernel_trouble(self) -> str:
        """Why `move` and `digest` cannot be called; empty: they can. The first call may take
        seconds."""

    def move(self, stream: int, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """As `copy`, by a kernel: pieces in any order, both sides the device's memory."""

    def digest(self, stream: int, payloads: Addresses, size: int, *, sums: int, found: int) -> None:
        """Leave the digests of the pieces (`wire.record`) of payloads of one size, which begin at
        multiples of 16, at `found` [payload][piece]; all of it memory of the device's. `sums`:
        scratch of `launches.sums_bytes`."""

    def stream(self, *, is_urgent: bool) -> int:
        """A new stream; of two with work the urgent one goes first."""

    def event(self) -> int:
        """A new event, which has happened."""

    def record(self, event: int, stream: int | None) -> None:
        """The event happens when all that the stream was given so far is done. None: that of the
        calling thread's engine."""

    def wait(self, stream: int, event: int) -> None:
        """Work given to the stream from now on begins after the event, as last recorded."""

    def has_happened(self, event: int) -> bool:
        """Whether the event has happened since it was last recorded."""

    def copy(self, stream: int, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """Copy pieces: `sizes[i]` bytes from `sources[i]` to `targets[i]`. The end of a piece
        that is in the host's memory lies within one pinned range. The arrays may change afterwards.
        After an error some pieces may be copied."""

    def clear(self, stream: int, targets: Addresses, sizes: Addresses) -> None:
        """Fill pieces of the device's memory with zeros."""

    def pin(self, address: int, size_bytes: int) -> None:
        """Keep pages of the host's memory in place, for copies; no page is pinned twice."""

    def unpin(self, address: int) -> None:
        """Undo a `pin`; no copy touches that memory."""

    def close(self) -> None:
        """Give streams and events back; nothing is under way."""

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    @property
    def name(self) -> str:
        """Name of the device: the same in every process of the machine, and of no other device."""

    def allocate(self, size_bytes: int) -> int:
        """Address of new memory of the device's, which ends with the process at the latest; 0: it
        has none left."""

    def free(self, address: int) -> None:
        """Give memory back; no copy touches it."""

    def share(self, address: int) -> bytes:
        """A handle of HANDLE_BYTES, by which other processes `open` that memory."""

    def open(self, handle: bytes) -> int:
        """Address in this process of memory that another one shares. Whether its bytes last longer
        than the other process is not said."""

    def leave(self, address: int) -> None:
        """Undo an `open`; no copy touches that memory."""
