"""Text of reasons: the one table of their words and sentences (`kvstore.engine.why.reasons`).

Words are for scripts and stay; several reasons share one. In a sentence, {name} is an engine or a
space, {node} another node, and other braces are numbers. docs/reference/reasons.md is made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvstore.engine.why.explain import RequestReport
from kvstore.engine.why.findings import RangeReport
from kvstore.engine.why.reasons import PushReport, Reason
from kvstore.units import NS_PER_US, US_PER_MS, format_us
from kvstore.wording import printable

TEXTS: Final = {
    Reason.EVICTED_FOR_STORES: "evicted from dram to make room for stores of {name}",
    Reason.EVICTED_FOR_READS: "evicted from dram to make room for blocks {name} read from disk",
    Reason.RECLAIMED: "its segment on disk, the oldest, was reclaimed",
    Reason.CROWDED_OUT: "dropped from disk because the node's table was full",
    Reason.CLEARED: "cleared",
    Reason.FAILED_CHECK: "dropped because its bytes in dram failed their checksum",
    Reason.FILE_LOST: "its record on disk was damaged or is gone",
    Reason.FAILED_SCRUB: "dropped because the scrub found its bytes in dram changed",
    Reason.DIVERGED: "dropped when its space was switched off by a shadow check",
    Reason.NEVER_STORED: "never stored since the node started",
    Reason.FORGOTTEN: "never stored, or gone for longer than is remembered",
    Reason.UNEXAMINED: "not held; no reason recorded, since too many lookups ran at once",
    Reason.TOO_MIXED: "too many different reasons to list",
    Reason.RESET: "stored before the engine's cache was reset; held in space {name}",
    Reason.OTHER_SPACE: "held in space {name} only: another model, other weights or settings",
    Reason.NOT_ALL_SHARDS: "shards of some ranks are missing",
    Reason.BEHIND_A_GAP: "held, but an earlier block of the prompt was missing",
    Reason.BEHIND_A_GAP_ON_DISK: "on disk, but an earlier block of the prompt was missing",
    Reason.NOT_READ: "on disk; dram had no room to read it into",
    Reason.PROMOTION_DEADLINE: "on disk; not read within {waited}",
    Reason.PROMOTION_COST: "on disk; computing it was estimated to be faster",
    Reason.PINNED_SHARE_USED_UP: "held, but the engine's limit of pinned dram was reached",
    Reason.SWITCHED_OFF: "its space is switched off (shadow check) until kvstore clear --space",
    Reason.TOO_LATE: "fetched, but after the request had stopped waiting",
    Reason.WAIT_COST: "fetched; computing it was estimated to be faster than waiting for it",
    Reason.BEYOND_THE_QUESTION: "beyond the number of blocks that one lookup covers",
    Reason.NOT_REMEMBERED: "the result of the lookup is no longer recorded",
    Reason.NOT_NEEDED: "held, but the engine took fewer blocks",
    Reason.NOT_PUSHED: "not pushed by node {node}: {name}",
    Reason.NODE_UNREACHABLE: "the node was unreachable: stopped, restarting, or not attached yet",
    Reason.BREAKER_OPEN: "the engine's circuit breaker was open after several failures",
    Reason.COST_GATE: "too few tokens to be worth a load (min_load_tokens)",
    Reason.NO_FULL_BLOCK: "the prompt has no full block",
    Reason.OWN_CACHE: "nothing to load: the engine's own cache had it",
    Reason.NOT_STORED: "the node did not hold the first block asked for",
    Reason.DEADLINE: "the node's answer took longer than lookup_deadline_ms",
    Reason.LOAD_FAILED: "the load failed and the rest was computed",
    Reason.SHADOW_CHECK: "a hit, recomputed to compare it with the cache (shadow_every)",
    Reason.ADAPTER: "the adapter's files are unreadable or have changed: see the engine's log",
    Reason.IMAGE_UUID: "an image has a uuid from the client instead of a hash of its content",
    Reason.IMAGES_OFF: "requests with images are neither stored nor loaded (images: none)",
    Reason.NOT_ASKED: "no lookup: the request ended early, or may not read caches",
    Reason.OTHER_VERSION: "unknown reason: the engine has another version",
    Reason.GROUP_NOT_STORED: "not all KV cache groups had the blocks that a longer hit needs",
    Reason.NO_ANSWER_YET: "the index had not yet named other nodes that hold it",
    Reason.INDEX_UNREACHABLE: "other nodes unknown: the index is unreachable",
    Reason.TOO_MANY_QUESTIONS: "other nodes not queried: too many queries at once",
    Reason.NOBODY_HAS_IT: "no other node is known to hold it",
    Reason.HERE_BY_NOW: "already here when node {node} could have served it",
    Reason.FETCH_COST: "node {node} holds {known} blocks: fetching was estimated at {fetching},"
    " computing at {computing}; a fetch must take at most half of that",
    Reason.NODE_AVOIDED: "node {node} holds it; not fetched after {failures} failures in a row",
    Reason.NO_ROOM: "node {node} holds it; dram had no room for fetched blocks",
    Reason.ON_ITS_WAY: "{fetched} of {wanted} blocks came from node {node} before the wait ended",
    Reason.FETCHED: "{fetched} of {wanted} blocks came from node {node} in {took}",
    Reason.FETCH_FAILED: "fetch from node {node} failed after {took}: {fetched} of {wanted} came",
}
"""Reason → sentence."""
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
    text = of_range(row.missed, row) if row.missed else TEXTS[row.outcome] if row.outcome else ""
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
    names = ("granted", "first", "last", "sealed", "ended")
    reached = {name: getattr(push, f"{name}_us") for name in names}
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
    text = TEXTS[row.reason].format(name=row.name or "an engine", waited=waited, node=row.node)
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
    text = TEXTS[row.sought].format(
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
