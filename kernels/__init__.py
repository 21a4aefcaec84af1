"""Moving the bytes of blocks: the only code that touches an engine's cache.

| module         | cares about                                    | in → out                     |
|----------------|------------------------------------------------|------------------------------|
| `reference.py` | being obviously right; tests compare with it   | pages ⇄ slot, checksum       |
| `pack.py`      | speed on a CPU core, any strides               | pages ⇄ slot, checksum       |

New devices get a module each, compared with the reference. Imports `wire` and `types` only.
"""
