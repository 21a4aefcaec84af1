"""What processes logged while a test failed: it may have failed of what they warned about."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

LINES_MAX: Final = 30
_LINE: Final = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (WARNING|ERROR|CRITICAL) ")


def warnings_since(directory: Path, since: datetime) -> Iterator[tuple[str, str]]:
    """(title, text) for each log below a directory with warnings or errors since a local time, the
    last of them."""
    for path in sorted(directory.rglob("*.log")):
        if path.stat().st_mtime < since.timestamp():
            continue
        lines = path.read_text("utf-8", "replace").splitlines()
        found = [line for line in lines if _is_warning_since(line, since)]
        if found:
            yield f"warnings in {path.relative_to(directory)}", "\n".join(found[-LINES_MAX:])


def _is_warning_since(line: str, since: datetime) -> bool:
    match = _LINE.match(line)
    return match is not None and datetime.fromisoformat(match[1]) >= since
