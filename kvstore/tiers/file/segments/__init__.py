"""The disk's content: directories, segments, and what is in them.

| module | covers |
|---|---|
| `directory.py` | one directory: identity, lock, names, quarantine |
| `catalog.py` | which segments there are, and what they take of the capacity |
| `contents.py` | what a segment holds: its footer, or record by record; whether that is intact |
| `discovery.py` | what was there when the tier was opened; segments of other nodes |
| `disk.py` | the system calls, as a small port |

Does not cover: records and footers (`kvstore.wire.segment`), who reads and writes (`..`).
"""
