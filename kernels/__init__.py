"""Moving the bytes of blocks: the only code that touches an engine's cache.

| module         | cares about                                    | in → out                     |
|----------------|------------------------------------------------|------------------------------|
| `reference.py` | being obviously right; tests compare with it   | pages ⇄ slot, checksum       |
| `pack.py`      | speed on a CPU core, any strides               | pages ⇄ slot, checksum       |
| `compare.py`   | numbers, not bytes                             | pages, slot → distance       |
| `host.py`      | a cache in the host's memory; the reference    | orders → ends                |
| `pinning.py`   | pinned memory of slots, by a thread            | place → pinned?              |
| `ranges.py`    | copies in NVIDIA's tools                       | copy → range                 |
| `hashes.py`    | checksums of blocks, by threads                | block → checksum             |
| `caches.py`    | pages of a cache on a device                   | block → addresses            |
| `device.py`    | streams, events, pinned memory                 | orders → ends                |
| `strategy.py`  | the way of a block: copies, kernel, staging    | sizes → calls of a device    |
| `slab.py`      | blocks of the node's slab on the same GPU      | place → pages, checksum      |
| `shared.py`    | memory that processes share: part of the port  | –                            |
| `cuda.py`      | one device, through NVIDIA's bindings          | calls of `device.Device`     |
| `launches.py`  | grids and arguments of the kernels in `csrc/`  | addresses → launches         |
| `compiled.py`  | NVRTC, machine code kept on disk               | source, architecture → cubin |
| `fp8.py`       | optional codec with loss; defines its bytes    | values ⇄ codes, scales       |
| `planes.py`    | optional codec without; defines its bytes      | payload ⇄ encoded            |

`host` and `device` are `kvstore.ports.CopyEngine`. Imports `ports`, `wire` and `types` only. The
kernels are CUDA C++ in `csrc/`; the tests run the same sources on a host.
"""
