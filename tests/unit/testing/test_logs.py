"""Tests show what processes warned about while they failed."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Final

from tests.kit.logs import warnings_since

SINCE: Final = datetime(2026, 11, 28, 20, 0, 0)
LOG: Final = """\
2026-11-28 19:59:59,999 WARNING kvstore.peers.transfer_worker_host: before
2026-11-28 20:00:01,000 INFO kvstore.node.attach: no warning
2026-11-28 20:00:02,000 WARNING kvstore.peers.transfer_worker_host: it ended
no line of a logger: WARNING
2026-11-28 20:00:03,000 ERROR kvstore.node: it failed
"""


def test_warnings_since_a_time_are_shown_and_old_logs_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b/node.log", "old.log", "other.txt"):
        (tmp_path / name).write_text(LOG)
    os.utime(tmp_path / "old.log", (0, 0))
    ((title, text),) = warnings_since(tmp_path, SINCE)
    assert title == "warnings in b/node.log"
    assert [line.rpartition(": ")[2] for line in text.splitlines()] == ["it ended", "it failed"]
