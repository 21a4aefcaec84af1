"""The disk tier: blocks on a disk, found again after any restart.

| module | covers |
|---|---|
| `config.py` | where it lies, and how far it may go; orders and events: `kvstore.tier_events` |
| `tier.py` | `FileTier`: queues, deadlines, threads; all that others call |
| `writer.py` | the log's end: append, close, void, move what a reclaimed segment keeps |
| `reader.py` | runs of neighbouring records into slots, each block verified |
| `log_thread.py` | the thread at the log's end; deletes segments for room, the oldest first |
| `scrub.py` | asking all the time whether a record is still what was stored |
| `parts.py` | shared by threads: when a failing disk is left alone; events for the driver; jobs |
| `directory.py` | one directory: identity, lock, names, quarantine |
| `catalog.py` | which segments there are, and what they take of the capacity |
| `contents.py` | what a segment holds: its footer, or record by record; whether that is intact |
| `discovery.py` | segments of earlier lives, the oldest deleted beyond SIZE; those of other nodes |
| `disk.py` | the system calls, as a small port |

Durability: a write is not synced by itself, since a cache may forget; `fsync` runs when a segment
is closed, when the tier is closed and after a void. A block that was `FileWritten` before survives
the death of the process, and of the machine only by chance. Nothing is ever served unverified.

Does not cover: the form of records and footers (`kvstore.wire.segment`).
"""
