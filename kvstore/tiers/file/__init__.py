"""The disk tier: blocks on a disk, found again after any restart.

| module | covers |
|---|---|
| `config.py` | where it lies, and how far it may go; orders and events: `kvstore.tier_events` |
| `tier.py` | `FileTier`: queues, deadlines, threads; all that others call |
| `writer.py` | the log's end: append, close, void, copy what a reclaimed segment keeps |
| `reader.py` | runs of neighbouring records into slots, each block verified |
| `verify.py`, `scrub.py` | whether a record is still what was stored; asking that all the time |
| `segments/` | what lies on the disk, and what it held when the tier was opened |
| `health.py` | when a failing disk is left alone (`kvstore.breaker`) |
| `outbox.py` | events on their way to the driver |
| `log_thread.py`, `reclaim.py` | the thread at the log's end; room made by it |

Durability: a write is not synced by itself, since a cache may forget; `fsync` runs when a segment
is closed, when the tier is closed and after a void. A block that was `FileWritten` before survives
the death of the process, and of the machine only by chance. Nothing is ever served unverified.
"""
