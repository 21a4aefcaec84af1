"""The record of a run: one JSON, and one table of it for a reader."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.goals import Headline, Verdict, headlines, judged
from bench.gpu.pack import ROOT

RESULT, OTHER = ROOT / "bench" / "results" / "gpu.json", ROOT / "build" / "gpu.json"
"""Where a run is recorded that was not told where: one of all parts to its end, and any other."""
WIDTH, LINES_MAX = 150, 10
"""Of the findings of a part."""
TEXT_MAX = 90
UNITS = {"peak": "GB/s", "rates": "GB/s", "calls": "µs"}
_NOT_MEASURED = ("seed", "not_here", "error", "skipped")
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

    @property
    def has_found(self) -> bool:
        """Something, to whatever end it came."""
        found = (value for name, value in self.found.items() if name not in _NOT_MEASURED)
        return any(value not in ({}, [], "", None) for value in found)

    def judged(self, *, is_rehearsal: bool) -> list[Verdict]:
        """A part that was not run, or not rehearsed, has missed nothing."""
        is_judged = self.code is not None
        return judged(self.name, self.found, is_rehearsal=is_rehearsal) if is_judged else []

    def record(self, *, is_rehearsal: bool) -> dict[str, Any]:
        """Its part of the JSON."""
        verdicts = self.judged(is_rehearsal=is_rehearsal)
        row: dict[str, Any] = {"rc": self.code, "seconds": round(self.seconds, 1)}
        row |= {"missed": [str(each) for each in verdicts if not each.is_met]}
        row["goals"] = [
            {"of": each.name, "goal": each.goal.bound, "found": each.found, "is_met": each.is_met}
            for each in verdicts
        ]
        row |= {"why": self.why} if self.why else {}
        return row | ({"tail": list(self.tail)} if self.tail else {}) | {"found": dict(self.found)}


class Record(NamedTuple):
    """Where and how a run is written down, after each part and in the end."""

    gpu: Mapping[str, str]
    seed: int
    out: Path | None = None
    """None: `RESULT` or `OTHER`; a rehearsal is not recorded."""
    is_rehearsal: bool = False
    is_whole: bool = True
    """All parts are to be run."""

    def place(self, *, is_complete: bool) -> Path | None:
        if self.out is not None or self.is_rehearsal:
            return self.out
        return RESULT if is_complete and self.is_whole else OTHER

    def rows(self, outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
        return {each.name: each.record(is_rehearsal=self.is_rehearsal) for each in outcomes}

    def headlines(self, outcomes: Sequence[Outcome]) -> list[Headline]:
        """A rehearsal has none."""
        if self.is_rehearsal:
            return []
        return headlines([each for part in outcomes for each in part.judged(is_rehearsal=False)])

    def write(self, outcomes: Sequence[Outcome], *, is_complete: bool) -> Path | None:
        """If something was found; returns where. A reader never finds half a file.

        Raises:
            OSError: it cannot be written.
        """
        from bench import record  # which needs numpy

        path = self.place(is_complete=is_complete)
        if path is None or not any(each.has_found for each in outcomes):
            return None
        result = {
            "is_complete": is_complete,
            "gpu": dict(self.gpu),
            "is_rehearsal": self.is_rehearsal,
            "goals": [each._asdict() for each in self.headlines(outcomes)],
            "parts": self.rows(outcomes),
        }
        record.write("gpu", result, seed=self.seed, path=new(path)).replace(path)
        if path == RESULT:
            OTHER.unlink(missing_ok=True)  # what this run wrote before its end
        return path

    def trouble(self) -> str:
        """Why it cannot be written; empty: it can."""
        places = (self.place(is_complete=is_it) for is_it in (False, True))
        return next((why for each in places if each is not None and (why := unwritable(each))), "")


def unwritable(path: Path) -> str:
    """Why no record can be written there; empty: it can. Tried, since a run is too dear to fail in
    its end."""
    if path.is_dir():
        return f"--out {path} is a folder: name a file in it"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new(path).touch()
    except OSError as error:
        return f"{path} cannot be written ({error.strerror}): name another place by --out"
    new(path).unlink()
    return ""


def new(path: Path) -> Path:
    """Of a file that takes its place once it is whole."""
    return path.with_name(path.name + ".new")


def table(parts: Mapping[str, Mapping[str, Any]], goals: Sequence[Headline] = ()) -> str:
    """Lines for a reader: the goals first, then a part each with what it found, one below for each
    shape of copies."""
    lines = [
        f"{each.text:42} {'-' if each.found is None else _short(each.found):>6}"
        f"  goal {each.bound:7} {each.state}"
        for each in goals
    ]
    lines += [""] * bool(goals)
    return "\n".join([*lines, *(line for name, row in parts.items() for line in _rows(name, row))])


def append(path: Path, text: str) -> None:
    """To a log, without which a run goes on: the disk may be full."""
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.write(text)


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
    if found.get("shapes"):
        yield "    GB/s, and ratios of the pinned peak:"
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
            yield from _flat(value, *names, f"{name} {UNITS[name]}" if name in UNITS else name)
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
