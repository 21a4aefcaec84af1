"""Moving the bytes of blocks: the only code that touches an engine's cache.

| module         | cares about                                     | in → out                    |
|----------------|-------------------------------------------------|-----------------------------|
| `host.py`      | a cache in the host's memory; distances of blocks | pages ⇄ slot, checksum    |
| `port.py`      | pages of a cache on a device; calls of a device | block → addresses           |
| `device.py`    | streams, events, pinned memory                  | orders → ends               |
| `moves.py`     | the way of a block, and its checksum            | blocks → calls of a device  |
| `pinning.py`   | pinned memory of slots, by a thread             | place → pinned?             |
| `cuda.py`      | one device, through NVIDIA's bindings           | calls of `port.Device`      |
| `launches.py`  | compiling, keeping and launching what is in `csrc/` | addresses → launches    |

`host` and `device` are `kvstore.ports.CopyEngine`. Imports `ports`, `wire` and `types` only. The
kernels are CUDA C++ in `csrc/`; the tests run the same sources on a host, and compare all with code
that is obviously right (`tests/kit/reference.py`).
"""
