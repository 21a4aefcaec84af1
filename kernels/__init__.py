"""Moving the bytes of blocks: the only code that touches an engine's cache.

| module         | cares about                                    | in → out                     |
|----------------|------------------------------------------------|------------------------------|
| `reference.py` | being obviously right; tests compare with it   | pages ⇄ slot, checksum       |
| `pack.py`      | speed on a CPU core, any strides               | pages ⇄ slot, checksum       |
| `compare.py`   | numbers, not bytes                             | pages, slot → distance       |
| `host.py`      | a cache in the host's memory; the reference    | orders → ends                |
| `pinning.py`   | pinned memory of slots, by a thread            | place → pinned?              |
| `caches.py`    | pages of a cache on a device                   | block → addresses            |
| `device.py`    | streams, events, pinned memory                 | orders → ends                |
| `moves.py`     | the way of a block, and its checksum           | blocks → calls of a device   |
| `cuda.py`      | one device, through NVIDIA's bindings          | calls of `port.Device`       |
| `launches.py`  | grids and arguments of the kernels in `csrc/`  | addresses → launches         |
| `compiled.py`  | NVRTC, machine code kept on disk               | source, architecture → cubin |

`host` and `device` are `kvstore.ports.CopyEngine`. Imports `ports`, `wire` and `types` only. The
kernels are CUDA C++ in `csrc/`; the tests run the same sources on a host.
"""
