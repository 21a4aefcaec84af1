"""Moving the bytes of blocks: the only code that touches an engine's cache.

| module         | cares about                                    | in → out                     |
|----------------|------------------------------------------------|------------------------------|
| `reference.py` | being obviously right; tests compare with it   | pages ⇄ slot, checksum       |
| `pack.py`      | speed on a CPU core, any strides               | pages ⇄ slot, checksum       |
| `compare.py`   | numbers, not bytes                             | pages, slot → distance       |
| `host.py`      | a cache in the host's memory; the reference    | orders → ends                |
| `device.py`    | streams, events, pinned memory                 | orders → ends                |
| `shared.py`    | memory that processes share: part of the port  | –                            |
| `cuda.py`      | one device, through NVIDIA's bindings          | calls of `device.Device`     |

`host` and `device` are `kvstore.ports.CopyEngine`. Imports `ports`, `wire` and `types` only.
"""
