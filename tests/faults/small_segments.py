"""`python tests/faults/small_segments.py node …`: kvstore with segments of a few blocks.

So that each few blocks begin, close, sync and reclaim a segment. A disk that failed is tried again
after 10 ms.
"""

from __future__ import annotations

from typing import Any

from kvstore.serve import config
from kvstore.serve.main import main
from kvstore.tiers.file.config import FileConfig

SEGMENT_BYTES = 1280 << 10
"""Four blocks of 256 KiB with their pages, and the footer."""


def small_segments(*values: Any, **named: Any) -> FileConfig:
    """As the node makes it, and this."""
    return FileConfig(*values, **{**named, "segment_bytes": SEGMENT_BYTES, "cooldown_ms": 10})


if __name__ == "__main__":
    setattr(small_segments, "queued_bytes_max", FileConfig.queued_bytes_max)  # noqa: B010
    setattr(config, "FileConfig", small_segments)  # noqa: B010 -- a name that it does not export
    main()
