"""Why a request hit or missed: stories of recent requests, joined with what their lookups found.

    Story (engine, at a request's end) ─┐
    Finding (node, at each lookup) ─────┴▶ one row a request, ranges of blocks ─▶ kvstore explain

A ring of STORIES_MAX; a request's prompt and keys are in none of it. Words that say why (`reason`)
are few and stay; the sentences beside them (`text`) are for people. Does not cover: what was found
and why not (`findings`), what it looks like (`kvstore.cli.tell`).
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from kvstore.engine.memory.tombstones import Why
from kvstore.engine.moves.searches import Sought
from kvstore.engine.sessions.owners import Connection
from kvstore.engine.state import State
from kvstore.engine.why.findings import SPACE_DIGITS, Finding, Findings, Found, Span, examine, spans
from kvstore.types import SpaceId
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import Story, keys_array

STORIES_MAX: Final = 1024
NS_PER_US: Final = 1000
COUNT_MAX: Final = 1 << 50
"""Of nanoseconds (13 days), tokens, blocks: what an engine tells beyond that is nonsense, and sums
of it would fit no message."""
_COUNTS: Final = (
    *("age_ns", "queued_ns", "lookup_ns", "promotion_ns", "load_ns"),
    *("prompt_tokens", "local_tokens", "loaded_tokens", "file_tokens"),
    *("first_block", "stored_blocks"),
)


class RequestReport(msgspec.Struct, frozen=True):
    """One request, as its engine and this node saw it."""

    number: int
    """Of the node's own counting; asks for its ranges."""
    request: str
    engine_id: str
    label: str
    tenant: str
    space: str
    ended_ms_ago: int
    block_tokens: int
    prompt_tokens: int
    local_tokens: int
    loaded_tokens: int
    file_tokens: int
    peer_tokens: int
    outcome: str
    """Why nothing, or nothing more, was loaded; empty after a load."""
    text: str
    """The same as a sentence."""
    queued_us: int
    lookup_us: int
    promotion_us: int
    load_us: int
    stored_blocks: int


class RangeReport(msgspec.Struct, frozen=True):
    """Neighbouring blocks with the same story."""

    first_block: int
    blocks: int
    tier: str
    """That served them, or holds them though they were not served: engine, dram, file, or none."""
    reason: str
    """Why they were not served; empty when they were."""
    text: str
    node: str = ""
    """Another one that they came from, or could have come from."""
    sought: str = ""
    """What became of asking other nodes; empty: they were not asked."""


class HashingReport(msgspec.Struct, frozen=True):
    """How keys are made in a space whose engine has attached since the node's start."""

    space: str
    tenant: str
    label: str
    block_tokens: int
    hash_algorithm: str
    hash_seed: str


class _Told(msgspec.Struct, frozen=True):
    number: int
    story: Story
    engine_id: str
    label: str
    tenant: str
    space: SpaceId
    block_tokens: int
    ended_ns: int
    findings: tuple[Finding | None, ...]


_OUTCOMES: Final = {
    "": "",
    "node away": "the node was not attached: away, restarting, or not attached yet",
    "breaker open": "the engine used no cache for a moment, after several failures",
    "cost gate": "so few tokens are computed faster (min_load_tokens)",
    "no full block": "nothing behind the engine's own cache fills a block",
    "not stored": "the node did not hold the first block asked for",
    "pinned share used up": "the node held it, and the engine's pins are as many as it may have",
    "deadline": "the node's answer took longer than lookup_deadline_ms",
    "load failed": "the load failed and the rest was computed",
    "shadow check": "a hit, computed all the same to compare it with the cache (shadow_every)",
    "adapter": "requests with a LoRA adapter are neither stored nor loaded",
    "image uuid": "an image was named by its client (uuid), not by a hash of its content: neither "
    "stored nor loaded",
    "images off": "requests with images are neither stored nor loaded (images: none)",
    "not asked": "the engine never asked: it ended early, or must not read a cache",
}
_LEFT: Final = {
    Why.UNKNOWN: ("evicted", "left"),
    Why.STORES: ("evicted", "evicted from dram to make room for stores of"),
    Why.READS: ("evicted", "evicted from dram to make room for blocks from disk, read for"),
    Why.RECLAIMED: ("evicted", "its segment on disk, the oldest, was reclaimed"),
    Why.CROWDED: ("evicted", "dropped from disk because the node's table was full"),
    Why.CLEARED: ("cleared", "cleared"),
    Why.DISTRUSTED: ("failed check", "dropped because its bytes in dram failed their checksum"),
    Why.SCRUBBED: ("failed check", "dropped because the scrub found its bytes in dram changed"),
    Why.DIVERGED: ("switched off", "dropped when its space was switched off by a shadow check"),
    Why.FILE_LOST: ("failed check", "its record on disk was damaged or went away"),
}
SWITCHED_OFF: Final = (
    "its space is switched off: a shadow check computed other values than were held; "
    "kvstore inspect spaces names it, kvstore clear --space switches it on again"
)
NOT_PINNED: Final = (
    "held, but the engine's leases and credits are as much of dram as it may pin; leases end when"
    " requests have loaded, and after a minute at most"
)
_ABSENT: Final = {
    Found.NOT_READ: ("file", "not read", "on disk; the disk was busy with other reads"),
    Found.BEHIND_DRAM: ("dram", "behind a gap", "held, but a block before it was not there"),
    Found.BEHIND_FILE: ("file", "behind a gap", "on disk, but a block before it was not there"),
    Found.SOME_SHARDS: ("", "not all shards", "some ranks' parts of it are there, others not"),
    Found.SWITCHED_OFF: ("", "switched off", SWITCHED_OFF),
    Found.NOT_PINNED: ("dram", "pinned share used up", NOT_PINNED),
    Found.NEVER: ("", "never stored", "never stored since the node started"),
    Found.FORGOTTEN: ("", "never stored", "never stored, or gone for longer than is remembered"),
    Found.UNEXAMINED: ("", "not known", "not held; too many lookups at once to see why"),
    Found.MIXED: ("", "not known", "too many different reasons to tell apart"),
}

_LOADED: Final = {
    Found.DRAM: ("dram", "loaded from dram"),
    Found.FILE: ("file", "loaded, after it was read from disk"),
    Found.PEER: ("peer", "loaded, after it was fetched from another node"),
}
"""Tier and words for what a lookup found, if it was loaded."""


class Explain:
    """See the module."""

    def __init__(self, state: State, findings: Findings) -> None:
        self._state = state
        self._findings = findings
        self._told: deque[_Told] = deque(maxlen=STORIES_MAX)
        self._next_number = 1

    def tell(self, connection: Connection, story: Story) -> None:
        """A request ended."""
        state, owner = self._state, connection.owner
        if not owner.known:
            return  # no session ever: it does not know what it speaks of
        tenant, space = owner.known
        counts = {name: min(getattr(story, name), COUNT_MAX) for name in _COUNTS}
        story = msgspec.structs.replace(story, **counts)
        known = state.known.get(owner.known)
        found = (self._findings.get(owner.key, story.session, lease) for lease in story.leases)
        self._told.append(
            _Told(
                number=self._next_number,
                story=story,
                engine_id=owner.key[1],
                label=known.label if known is not None else "",
                tenant=tenant,
                space=space,
                block_tokens=known.space.block_tokens if known is not None else 0,
                ended_ns=state.now_ns - story.age_ns,
                findings=tuple(found),
            )
        )
        self._next_number += 1

    # ── looking in ───────────────────────────────────────────────────────────────────────────────

    def requests(self, request: str, *, limit: int) -> list[RequestReport]:
        """The newest requests whose id fits `request`, newest first; empty fits all."""
        found: list[RequestReport] = []
        for told in reversed(self._told):
            if len(found) == limit:
                break
            if fits(told.story.request, request):
                found.append(self._row(told))
        return found

    def ranges(self, number: int) -> list[RangeReport]:
        """What became of each block of a request's prompt; empty when it is not remembered."""
        for told in self._told:
            if told.number == number:
                for finding in told.findings:
                    if finding is not None:
                        self._findings.examine(finding)
                return self._ranges(told)
        return []

    def hashings(self) -> list[HashingReport]:
        """How to compute the keys of each space that is known."""
        return [
            HashingReport(
                space=space.hex(),
                tenant=tenant,
                label=known.label,
                block_tokens=known.space.hash_block_tokens,
                hash_algorithm=known.space.hash_algorithm,
                hash_seed=known.space.hash_seed,
            )
            for (tenant, space), known in self._state.known.items()
        ]

    def prefix(self, tenant: str, space: SpaceId, keys: bytes) -> list[RangeReport]:
        """Where these blocks are now, or why nowhere; empty when the space is not known."""
        state, known = self._state, self._state.known.get((tenant, space))
        if known is None or not keys:
            return []
        array, scope = keys_array(keys), known.scopes[0]
        rows = state.residency.find(scope, array)
        codes, stamps = examine(
            state,
            known.scopes,
            array,
            present=rows >= 0,
            in_dram=state.residency.words(rows) >= 0,
            promoting=None,
            asked_ns=state.now_ns,
        )
        found = spans(codes, stamps)
        at, out = 0, []
        for span in found:
            out.append(self._now(at, span))
            at += span.blocks
        return _merged(out)

    def check(self) -> None:
        """Raises AssertionError when a bound is broken. For tests."""
        assert len(self._told) <= STORIES_MAX

    # ── in words ─────────────────────────────────────────────────────────────────────────────────

    def _row(self, told: _Told) -> RequestReport:
        story = told.story
        outcome, first = story.outcome, told.findings[0] if told.findings else None
        if outcome == "not stored" and first and first.refused[1] and not first.held:
            outcome = "pinned share used up"
        text = _OUTCOMES.get(outcome, outcome)
        if story.detail:
            text = f"{text}: {story.detail}"
        return RequestReport(
            number=told.number,
            request=_printable(story.request),
            engine_id=told.engine_id,
            label=told.label,
            tenant=told.tenant,
            space=told.space.hex()[:SPACE_DIGITS],
            ended_ms_ago=max(0, self._state.now_ns - told.ended_ns) // NS_PER_MS,
            block_tokens=told.block_tokens,
            prompt_tokens=story.prompt_tokens,
            local_tokens=story.local_tokens,
            loaded_tokens=story.loaded_tokens,
            file_tokens=story.file_tokens,
            peer_tokens=story.peer_tokens,
            outcome=_printable(outcome),
            text=_printable(text),
            queued_us=story.queued_ns // NS_PER_US,
            lookup_us=story.lookup_ns // NS_PER_US,
            promotion_us=story.promotion_ns // NS_PER_US,
            load_us=story.load_ns // NS_PER_US,
            stored_blocks=story.stored_blocks,
        )

    def _ranges(self, told: _Told) -> list[RangeReport]:
        story, size = told.story, max(told.block_tokens, 1)
        total = story.prompt_tokens // size
        local = min(story.local_tokens // size, total)
        served = min(local + story.loaded_tokens // size, total)
        out = []
        if local:
            out.append(RangeReport(0, local, "engine", "", "in the engine's own cache"))
        at = story.first_block
        for finding in told.findings:
            if finding is None:
                break
            for span in finding.every_span(self._state.searches):
                out += self._of_span(
                    told, finding.asked_ns, at, span, local=local, served=served, total=total
                )
                at += span.blocks
        end = out[-1].first_block + out[-1].blocks if out else 0
        if end < total:
            out.append(self._unasked(told, end, total - end))
        return _merged(out)

    def _of_span(
        self,
        told: _Told,
        asked_ns: int,
        at: int,
        span: Span,
        *,
        local: int,
        served: int,
        total: int,
    ) -> list[RangeReport]:
        """A span, without what the engine had itself: what was loaded of it, and what was not."""
        begin, end = max(at, local), min(at + span.blocks, total)
        held = span.found in _LOADED
        cut = min(max(begin, served), end) if held else begin
        out = []
        if begin < cut:
            tier, text = _LOADED[span.found]
            out.append(_from_elsewhere(RangeReport(begin, cut - begin, tier, "", text), span))
        if cut < end:
            tier, reason, text = self._missed(told, asked_ns, span)
            row = RangeReport(cut, end - cut, tier, reason, text)
            out.append(row if held else _not_from_elsewhere(row, span, cut - at))
        return out

    def _missed(self, told: _Told, asked_ns: int, span: Span) -> tuple[str, str, str]:
        story = told.story
        match span.found:
            case Found.DRAM | Found.FILE | Found.PEER:
                reason = story.outcome or "not needed"
                text = _OUTCOMES.get(reason, "held, but the engine took fewer blocks")
                return "dram", _printable(reason), text
            case Found.COMING if story.promotion_ns:
                waited = f"{story.promotion_ns / NS_PER_MS:.0f} ms"
                return "file", "promotion deadline", f"on disk; did not come within {waited}"
            case Found.COMING:
                return "file", "cost gate", "on disk; computing it takes less than waiting for it"
            case _:
                return self._absent(span, asked_ns, "before")

    def _absent(self, span: Span, until_ns: int, word: str) -> tuple[str, str, str]:
        name = self._state.names.text(span.name)
        if span.found is Found.ELSEWHERE:
            text = f"held in space {name} only: another model, other weights or settings"
            return "", "other space", text
        if span.found is not Found.LEFT:
            return _ABSENT[span.found]
        reason, text = _LEFT[span.why]
        if span.why in (Why.STORES, Why.READS):
            text = f"{text} {_printable(name) or 'an engine'}"
        until_ms = until_ns // NS_PER_MS
        ages = [_seconds(until_ms - left_ms) for left_ms in (span.last_ms, span.first_ms)]
        when = ages[0] if ages[0] == ages[1] else f"{ages[0]} to {ages[1]}"
        return "", reason, f"{text}, {when} s {word}"

    def _unasked(self, told: _Told, begin: int, blocks: int) -> RangeReport:
        story = told.story
        if story.leases and None in told.findings:
            text = "what the lookup found is not remembered any more"
            return RangeReport(begin, blocks, "", "not known", text)
        reason = story.outcome or "not asked"
        if story.leases and reason in ("", "not stored", "not asked"):
            text = "so far behind the prompt's beginning that it was not asked for"
            return RangeReport(begin, blocks, "", "not asked", text)
        return RangeReport(begin, blocks, "", _printable(reason), _OUTCOMES.get(reason, ""))

    def _now(self, at: int, span: Span) -> RangeReport:
        if span.found is Found.BEHIND_DRAM:
            return RangeReport(at, span.blocks, "dram", "", "in dram")
        if span.found is Found.BEHIND_FILE:
            return RangeReport(at, span.blocks, "file", "", "on disk")
        tier, reason, text = self._absent(span, self._state.now_ns, "ago")
        return RangeReport(at, span.blocks, tier, reason, text)


def fits(request: str, asked: str) -> bool:
    """Whether an engine's id of a request is what a client calls `asked`. Engines put words before
    a client's id and behind it, with dashes between: cmpl-ID-0-1f2e3d4c."""
    if not asked:
        return True
    return f"-{request}-".find(f"-{asked}-") >= 0 or request.startswith(asked)


def _from_elsewhere(row: RangeReport, span: Span) -> RangeReport:
    """With the node that it came from, if it did."""
    search = span.search
    if search is None:
        return row
    text = f"loaded, after it was fetched {_printable(search.of_what_came())}"
    return msgspec.structs.replace(row, text=text, node=search.node, sought=search.sought.value)


def _not_from_elsewhere(row: RangeReport, span: Span, blocks_before: int) -> RangeReport:
    """With why no other node gave it, if they were asked."""
    search = span.search
    if search is None:
        return row
    place = span.place + blocks_before
    is_its = search.node and place < search.known
    is_late = is_its and search.is_late and not row.tier
    why = _printable(search.of_what_did_not(place))
    text = why if is_late else f"{row.text}; {why}"
    return msgspec.structs.replace(
        row,
        reason="too late (peer)" if is_late else row.reason,
        text=text,
        node=search.node if is_its else "",
        sought=(search.sought if is_its or not search.known else Sought.NOBODY).value,
    )


def _merged(ranges: list[RangeReport]) -> list[RangeReport]:
    out: list[RangeReport] = []
    for each in ranges:
        if out and msgspec.structs.astuple(out[-1])[2:] == msgspec.structs.astuple(each)[2:]:
            blocks = out[-1].blocks + each.blocks
            out[-1] = msgspec.structs.replace(out[-1], blocks=blocks)
        else:
            out.append(each)
    return out


def _seconds(ms: int) -> str:
    return f"{max(0, ms) / 1000:.1f}"


def _printable(text: str) -> str:
    """Users choose the ids of their requests, and terminals obey some characters."""
    return "".join(c if c.isprintable() else "?" for c in text)
