"""The disk's content: directories, segments, and what is in them.

| module | covers |
|---|---|
| `directory.py` | one directory: identity, lock, names, quarantine |
| `catalog.py` | which segments there are, and what they take of the capacity |
| `recovery.py` | what a segment holds: its footer, or record by record |
| `restart.py` | what the directory held when the tier was opened |
| `shared.py` | segments of other nodes in the same parent directory |
| `disk.py` | the system calls, as a small port |

Does not cover: records and footers (`kvstore.wire.segment`), who reads and writes (`..`).
"""
