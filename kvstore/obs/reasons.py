"""Text of reasons: their words, and their sentences (`Reason.text`) with the figures of a request.

Words are for scripts and stay; several reasons share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvstore.engine.why.explain import RequestReport
from kvstore.engine.why.findings import RangeReport
from kvstore.engine.why.reasons import PUSH_STAGES, PushReport, Reason
from kvstore.units import NS_PER_US, US_PER_MS, format_us
from kvstore.wording import printable

_SHARED: Final = {
    "evicted": "EVICTED_FOR_STORES EVICTED_FOR_READS RECLAIMED CROWDED_OUT",
    "failed check": "FILE_LOST FAILED_SCRUB",
    "switched off": "DIVERGED",
    "never stored": "FORGOTTEN",
    "not known": "UNEXAMINED TOO_MIXED NOT_REMEMBERED OTHER_VERSION",
    "behind a gap": "BEHIND_A_GAP_ON_DISK",
    "cost gate": "PROMOTION_COST",
    "cost gate (peer)": "FETCH_COST WAIT_COST",
    "nothing to load": "OWN_CACHE",
    "reset by the engine": "RESET",
    "too late (peer)": "TOO_LATE",
    "not asked": "BEYOND_THE_QUESTION",
}
_WORDS: Final = {Reason[name]: word for word, names in _SHARED.items() for name in names.split()}
"""Reason → word, where it is not the reason's name."""
_LOADED: Final = {
    "": "loaded; the result of the lookup is no longer recorded",
    "engine": "in the engine's own cache",
    "dram": "loaded from dram",
    "file": "loaded, after it was read from disk",
    "peer": "loaded, after it was fetched",
}
_HELD: Final = {"dram": "in dram", "file": "on disk"}


def word(reason: Reason) -> str:
    """The word for scripts and the column of a table; empty: there is none."""
    return _WORDS.get(reason, reason.name.lower().replace("_", " ")) if reason else ""


def of_request(row: RequestReport) -> str:
    """Why the request loaded nothing, or nothing more."""
    text = of_range(row.missed, row) if row.missed else row.outcome.text
    return printable(": ".join(part for part in (text, row.detail) if part))


def of_pushes(row: RequestReport) -> str:
    """Blocks pushed for the request, and why no more; empty: it is no part of a transfer."""
    if row.transfer and not row.pushes:
        return "no record: it was not requested, has not ended, or is too old"
    return printable("; ".join(map(_of_push, row.pushes)))


def _of_push(push: PushReport) -> str:
    way = "from" if push.side == "decode" else "to"
    text = f"{push.pushed} of {push.blocks - push.held} blocks {way} node {push.node}"
    text += f" (group {push.group})" * bool(push.group)
    text += f", {push.held} were here" * bool(push.held)
    reached = {name: getattr(push, f"{name}_us") for name in PUSH_STAGES}
    stages = [f"{name} {format_us(us)}" for name, us in reached.items() if us]
    return f"{text}: {', '.join(stages)}" + f"; no more: {push.reason}" * bool(push.reason)


def of_range(row: RangeReport, request: RequestReport | None) -> str:
    """Origin of the blocks in a request, or why they missed; without a request, their tier now."""
    if row.reason is Reason.NONE:
        text = (_LOADED if request else _HELD)[row.tier]
        if (search := row.search) is not None:
            more = f" of {search.wanted}" if search.fetched < search.wanted else ""
            took = format_us((search.ended_ns - search.begun_ns) / NS_PER_US)
            text += f" from node {row.node}: {search.fetched}{more} blocks in {took}"
        elif row.node:
            text = f"loaded, after node {row.node} pushed it"
        return printable(text)
    if row.search is not None and (row.reason is Reason.TOO_LATE or row.reason is row.sought):
        return printable(_elsewhere(row))
    waited = format_us(request.promotion_us) if request else ""
    text = row.reason.text.format(name=row.name or "an engine", waited=waited, node=row.node)
    if row.reason <= Reason.DIVERGED:
        ages = [format_us(ms * US_PER_MS) for ms in row.left_ms]
        when = ages[0] if ages[0] == ages[1] else f"{ages[0]} to {ages[1]}"
        text += f", {when} {'before' if request else 'ago'}"
    if row.search is not None:
        text += f"; {_elsewhere(row)}"
    return printable(text)


def range_as_dict(row: RangeReport, request: RequestReport | None) -> dict[str, object]:
    """As --json prints it."""
    found = {name: getattr(row, name) for name in ("first_block", "blocks", "tier", "node")}
    its = {"reason": word(row.reason), "sought": word(row.sought), "text": of_range(row, request)}
    return found | its


def story_as_dict(request: RequestReport, ranges: Sequence[RangeReport] | None) -> dict[str, Any]:
    """As --json prints it; `ranges` None: not asked for."""
    row = msgspec.structs.asdict(request)
    del row["detail"], row["missed"]
    row["pushes"] = [msgspec.structs.asdict(push) for push in request.pushes]
    row |= {"outcome": word(request.outcome), "text": of_request(request)}
    row["request"] = printable(request.request)
    if ranges is not None:
        row["ranges"] = [range_as_dict(each, request) for each in ranges]
    return row


def _elsewhere(row: RangeReport) -> str:
    """Why no block came from another node."""
    search = row.search
    assert search is not None
    if search.known and not row.node:
        return f"no other node is known to hold it; node {search.node} has {search.known} before it"
    text = row.sought.text.format(
        **msgspec.structs.asdict(search),
        took=format_us((search.ended_ns - search.begun_ns) / NS_PER_US),
        fetching=format_us(search.fetch_ns / NS_PER_US),
        computing=format_us(search.compute_ns / NS_PER_US),
    )
    if row.sought not in (Reason.ON_ITS_WAY, Reason.FETCHED, Reason.FETCH_FAILED):
        return text
    if search.wanted < search.missing:
        return f"{text}; there was room for {search.wanted} of {search.missing}"
    if search.is_late:
        return text + ", longer than the request waited" * (row.sought is Reason.FETCHED)
    counts = {
        "were not served": search.not_served,
        "did not stay until they were read": search.not_kept,
        "failed their checksums": search.damaged,
    }
    why = [f"{count} {what}" for what, count in counts.items() if count]
    why += ["it was cleared or switched off here"] * search.is_void
    return "; ".join((text, *why, *filter(None, [search.trouble])))
