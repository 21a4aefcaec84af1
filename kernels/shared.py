"""Memory of a device that processes share: part of the port `kernels.device.Device`."""

from __future__ import annotations

from typing import Final, Protocol

HANDLE_BYTES: Final = 64
"""Size of CUDA's cudaIpcMemHandle_t."""


class SharedMemory(Protocol):
    """Calls may wait. Every method raises DeviceError."""

    @property
    def name(self) -> str:
        """The same in every process of the machine, and that of no other device."""
        ...

    def allocate(self, size_bytes: int) -> int:
        """Address of new memory of the device's, which ends with the process at the latest; 0: it
        has none left."""
        ...

    def free(self, address: int) -> None:
        """Give memory back; no copy touches it."""
        ...

    def share(self, address: int) -> bytes:
        """A handle of HANDLE_BYTES, by which other processes `open` that memory."""
        ...

    def open(self, handle: bytes) -> int:
        """Address in this process of memory that another one shares. Whether its bytes last longer
        than the other process is not said."""
        ...

    def leave(self, address: int) -> None:
        """Undo an `open`; no copy touches that memory."""
        ...
