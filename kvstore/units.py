"""Byte and time units, and figures as people read them.

The bottom of the import order: imports nothing of kvstore.
"""

from __future__ import annotations

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

NS_PER_US = 1000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
NS_PER_DAY = 86_400 * NS_PER_S
US_PER_MS = MS_PER_S = 1000
US_PER_S = 1_000_000
US_PER_H = 3_600_000_000

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)?\s*", re.IGNORECASE)
_SIZE_END = 1 << 63
_FACTOR = {"b": 1}
_FACTOR |= {f"{letter}ib": KIB**power for power, letter in enumerate("kmgt", 1)}
_FACTOR |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}


def parse_size(text: str) -> int:
    """Bytes of a size such as ``64GiB``, ``512 MiB`` or ``1048576``.

    Raises:
        ValueError: the text is no size, or too large a one; the message has an example.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        units = "B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"
        raise ValueError(
            f"{text!r} is not a size: write a number and a unit ({units}), such as 64GiB"
        )
    number, unit = match.groups()
    size_bytes = float(number) * _FACTOR[(unit or "B").lower()]
    if size_bytes >= _SIZE_END:
        raise ValueError(f"{text!r} is more than any machine has: write a size such as 64GiB")
    return int(size_bytes)


def format_size(size_bytes: int) -> str:
    """The size with the largest binary unit that keeps it at or above one: ``1.5 GiB``."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} B"


def format_us(us: float) -> str:
    """Microseconds as ms, from a second on as s, from an hour on as h: ``12.3 ms``, ``1.5 s``."""
    for unit, factor in (("h", US_PER_H), ("s", US_PER_S)):
        if abs(us) >= factor:
            return f"{short(us / factor)} {unit}"
    return f"{short(us / US_PER_MS)} ms"


def short(value: float) -> str:
    """A figure with one decimal below a hundred, and none from there on."""
    return f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"
