"""The record of a run: one JSON, and one table of it for a reader."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench.gpu.goals import missed

WIDTH, LINES_MAX = 150, 10
"""Of the findings of a part."""
TEXT_MAX = 90
_HIDDEN = ("shapes", "seed", "log_tail", "ready", "not_here", "error")


class Outcome(NamedTuple):
    """Of a part."""

    name: str
    code: int | None
    """Its exit code; None: it was not run. Negative: it was killed."""
    seconds: float
    found: Mapping[str, Any]
    tail: tuple[str, ...] = ()
    """Last lines of what it printed, if it failed."""
    why: str = ""
    """Why it was not run, or was killed."""

    @property
    def has_measured(self) -> bool:
        """It came to its end and found something."""
        return self.code == 0 and bool(self.found.keys() - {"seed"})

    def record(self, *, is_rehearsal: bool) -> dict[str, Any]:
        """Its part of the JSON. A part that was not rehearsed has missed nothing."""
        is_judged = self.code is not None
        lacking = missed(self.name, self.found, is_rehearsal=is_rehearsal) if is_judged else []
        row: dict[str, Any] = {"rc": self.code, "seconds": round(self.seconds, 1)}
        row |= {"missed": lacking} | ({"why": self.why} if self.why else {})
        return row | ({"tail": list(self.tail)} if self.tail else {}) | {"found": dict(self.found)}


def table(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Lines for a reader: a part each with what it found, one below for each shape of copies."""
    return "\n".join(line for name, row in parts.items() for line in _rows(name, row))


def _rows(name: str, row: Mapping[str, Any]) -> Iterator[str]:
    found = row["found"]
    verdict = "-" if row["rc"] is None else "ok" if not (row["rc"] or row["missed"]) else "FAILED"
    code = "-" if row["rc"] is None else row["rc"]
    reasons = [row.get("why"), found.get("error")]
    text = "; ".join(str(each) for each in reasons if each)
    yield f"{name:9} {verdict:6} rc {code!s:>3} {row['seconds']:6.1f} s  {text}".rstrip()
    for lacking in row["missed"]:
        yield f"    missed: {lacking}"
    said = {each: value for each, value in found.items() if each not in _HIDDEN}
    lines = textwrap.wrap("; ".join(_flat(said)), WIDTH)
    yield from (f"    {line}" for line in lines[:LINES_MAX])
    for shape, ways in found.get("shapes", {}).items():
        for way, rates in ways.items():
            values = " ".join(f"{key}={_short(value)}" for key, value in rates.items())
            yield f"    {shape:28} {way:7} {values}"
    for line in row.get("tail", ()):
        yield f"    | {line[:WIDTH]}"


def _flat(found: Mapping[str, Any], *names: str) -> Iterator[str]:
    """What lies on one path in one text. Of checks their number: those that failed are missed
    goals."""
    values = []
    for name, value in found.items():
        if name == "checks":
            yield f"{sum(value.values())} of {len(value)} checks"
        elif isinstance(value, Mapping):
            yield from _flat(value, *names, name)
        elif _are_rows(value):
            yield from _flat(
                {key: [row.get(key) for row in value] for key in value[0]}, *names, name
            )
        elif value not in ([], "", None) and not _are_empty(value):
            values.append(f"{name}={_short(value)}")
    if values:
        yield " ".join([*names, *values])


def _are_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _are_empty(value: Any) -> bool:
    return isinstance(value, Sequence) and not any(each not in ([], "") for each in value)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    text = str(value)
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"
