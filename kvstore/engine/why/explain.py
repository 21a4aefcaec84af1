"""Why a request hit or missed: stories of recent requests, joined with findings of their lookups.

    Story (engine, at a request's end) ─┐
    Finding (node, at each lookup) ─────┴▶ one row a request, ranges of blocks ─▶ kvstore explain

A ring of STORIES_MAX; prompts and keys of requests are not kept. Does not cover: results of lookups
(`findings`), texts of reasons (`kvstore.cli.reasons`).
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Final

import msgspec

from kvstore.engine.events import Staged
from kvstore.engine.sessions.owners import Connection
from kvstore.engine.state import State
from kvstore.engine.why.findings import SPACE_DIGITS, Finding, RangeReport, examine, ranges
from kvstore.engine.why.reasons import Reason, reason_of
from kvstore.engine.witness import PushReport
from kvstore.types import SpaceId
from kvstore.units import NS_PER_MS, NS_PER_US
from kvstore.wire.messages import Story, keys_array
from kvstore.wire.space import is_prefix

STORIES_MAX: Final = 1024
COUNT_MAX: Final = 1 << 50
"""Bound of nanoseconds (13 days), tokens, blocks: larger values from an engine make no sense, and
their sums would fit no message."""
_TEXTS: Final = {"request", "outcome", "detail", "transfer", "session", "leases"}
_COUNTS: Final = {*Story.__struct_fields__} - _TEXTS
_ABSENT: Final = (Reason.NEVER_STORED, Reason.FORGOTTEN)


class RequestReport(msgspec.Struct, frozen=True):
    """One request, from its engine's story and this node's findings."""

    number: int
    """Number of this request on this node; `ranges` takes it."""
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
    outcome: Reason
    """Why no blocks, or no more, were loaded; none after a load."""
    detail: str
    """Detail of a load that failed."""
    queued_us: int
    lookup_us: int
    promotion_us: int
    load_us: int
    stored_blocks: int
    first_token_us: int = 0
    """Since its arrival; 0: none was sampled."""
    transfer: str = ""
    """Name of its transfer between a prefill and a decode engine, if it has one."""
    pushes: tuple[PushReport, ...] = ()
    """Pushes of this transfer that have ended."""


class HashingReport(msgspec.Struct, frozen=True):
    """How keys are made in a space whose engine has attached since the node's start."""

    space: str
    tenant: str
    label: str
    block_tokens: int
    hash_algorithm: str
    hash_seed: str


class _Told(msgspec.Struct, frozen=True):
    row: RequestReport
    story: Story
    ended_ns: int
    findings: tuple[Finding | None, ...]


_AS_TOLD: Final = {*RequestReport.__struct_fields__} & {*Story.__struct_fields__} - {"outcome"}


class Explain:
    """Stories of recent requests of one node, and the questions about them."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._trail = state.trail
        self._told: deque[_Told] = deque(maxlen=STORIES_MAX)
        self._next_number = 1

    def tell(self, connection: Connection, story: Story) -> None:
        """A request ended: keep its story with the findings of its lookups."""
        state, owner = self._state, connection.owner
        if owner.address is None:
            return  # no session ever: it does not know what it speaks of
        tenant, space = owner.address
        counts = {name: min(getattr(story, name), COUNT_MAX) for name in _COUNTS}
        story = msgspec.structs.replace(story, **counts)
        known = state.known.get(owner.address)
        get = self._trail.findings.get
        found = tuple(get(owner.key, story.session, lease) for lease in story.leases)
        row = RequestReport(
            number=self._next_number,
            engine_id=owner.key[1],
            label=known.label if known is not None else "",
            tenant=tenant,
            space=space.hex()[:SPACE_DIGITS],
            ended_ms_ago=0,
            block_tokens=known.space.block_tokens if known is not None else 0,
            outcome=_outcome(story, found[0] if found else None),
            queued_us=story.queued_ns // NS_PER_US,
            lookup_us=story.lookup_ns // NS_PER_US,
            promotion_us=story.promotion_ns // NS_PER_US,
            load_us=story.load_ns // NS_PER_US,
            first_token_us=story.first_token_ns // NS_PER_US,
            **{name: getattr(story, name) for name in _AS_TOLD},
        )
        self._told.append(_Told(row, story, state.now_ns - story.age_ns, found))
        self._next_number += 1
        self._stage(row, story)

    def _stage(self, row: RequestReport, story: Story) -> None:
        """Say how long after a push from another node its request had its first token."""
        state = self._state
        for each in state.trail.push_log.of(row.tenant, story.transfer):
            is_from_there = each.side == "decode" and each.node != state.config.node
            if is_from_there and each.pushed and story.first_token_ns:
                # It asks nothing before its push has ended.
                took_ns = max(0, story.first_token_ns - story.queued_ns)
                state.say(Staged("push_token", each.node, took_ns, 0, state.cause))
                return

    # ── looking in ───────────────────────────────────────────────────────────────────────────────

    def requests(self, request: str, *, limit: int) -> list[RequestReport]:
        """The newest requests whose id fits `request`, newest first; an empty one fits all."""
        found: list[RequestReport] = []
        for told in reversed(self._told):
            if len(found) == limit:
                break
            if fits(told.story.request, request):
                ms = max(0, self._state.now_ns - told.ended_ns) // NS_PER_MS
                pushes = self._pushes(told)
                found.append(msgspec.structs.replace(told.row, ended_ms_ago=ms, pushes=pushes))
        return found

    def ranges(self, number: int) -> list[RangeReport]:
        """Result for each block of a request's prompt; empty if the request is no longer kept."""
        for told in self._told:
            if told.row.number == number:
                for finding in told.findings:
                    if finding is not None:
                        self._trail.findings.examine(finding, self._state)
                return _with_pushes(self._ranges(told), self._pushes(told))
        return []

    def _pushes(self, told: _Told) -> tuple[PushReport, ...]:
        return self._trail.push_log.of(told.row.tenant, told.story.transfer)

    def hashings(self) -> list[HashingReport]:
        """Parameters for computing the keys of each known space that holds prefixes."""
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
            if is_prefix(known.space)
        ]

    def prefix(self, tenant: str, space: SpaceId, keys: bytes) -> list[RangeReport]:
        """Tiers of these blocks now, or why they are in none; empty when the space is not known."""
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
        found = ranges(state, codes, stamps, state.now_ns)
        here = (Reason.BEHIND_A_GAP, Reason.BEHIND_A_GAP_ON_DISK)
        return [
            msgspec.structs.replace(row, reason=Reason.NONE) if row.reason in here else row
            for row in found
        ]

    def check(self) -> None:
        """Raises AssertionError when a bound is broken. For tests."""
        assert len(self._told) <= STORIES_MAX

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────

    def _ranges(self, told: _Told) -> list[RangeReport]:
        story, size = told.story, max(told.row.block_tokens, 1)
        total = story.prompt_tokens // size
        local = min(story.local_tokens // size, total)
        served = min(local + story.loaded_tokens // size, total)
        out = [RangeReport(0, local, "engine")] if local else []
        at = story.first_block
        for finding in told.findings:
            if finding is None:
                break
            for row in finding.ranges(self._trail.searches):
                begin, end = max(at, local), min(at + row.blocks, total)
                out += _of_request(story, row, begin, end, served=served)
                at += row.blocks
        end = out[-1].first_block + out[-1].blocks if out else 0
        if end < total:
            out.append(RangeReport(end, total - end, "", _why_unasked(told)))
        return _merged(out)


def _outcome(story: Story, first: Finding | None) -> Reason:
    outcome = reason_of(story.outcome)
    is_refused = first is not None and first.refused[1] and not first.held
    return Reason.PINNED_SHARE_USED_UP if outcome is Reason.NOT_STORED and is_refused else outcome


def _of_request(
    story: Story, row: RangeReport, begin: int, end: int, *, served: int
) -> list[RangeReport]:
    """Split a lookup's row for the blocks from `begin` to `end` into those that were loaded and
    those that were not."""
    if row.reason is Reason.NONE:
        cut = min(max(begin, served), end)
        reason = reason_of(story.outcome) or Reason.NOT_NEEDED
        rest = RangeReport(cut, end - cut, "dram", reason)
    else:
        cut, rest = begin, msgspec.structs.replace(row, first_block=begin, blocks=end - begin)
        if row.reason is Reason.PROMOTION_DEADLINE and not story.promotion_ns:
            rest = msgspec.structs.replace(rest, reason=Reason.PROMOTION_COST)
    loaded = msgspec.structs.replace(row, first_block=begin, blocks=cut - begin)
    return [each for each in (loaded, rest) if each.blocks > 0]


def _with_pushes(ranges: list[RangeReport], pushes: tuple[PushReport, ...]) -> list[RangeReport]:
    """With what pushes brought, and the end of a push as the reason for what it did not bring."""
    for push in pushes:
        if push.side == "decode" and not push.group:
            ranges = [piece for row in ranges for piece in _with_push(row, push)]
    return ranges


def _with_push(row: RangeReport, push: PushReport) -> list[RangeReport]:
    """A row in up to three pieces: before, among and behind the blocks of the push."""
    replace, end = msgspec.structs.replace, row.first_block + row.blocks
    cuts = {row.first_block, end, push.first_block, push.first_block + push.blocks}
    pieces = []
    for at, stop in itertools.pairwise(sorted(c for c in cuts if row.first_block <= c <= end)):
        piece = replace(row, first_block=at, blocks=stop - at)
        if not 0 <= at - push.first_block < push.blocks:
            pass
        elif row.tier == "peer" and row.search is None:
            piece = replace(piece, node=push.node)
        elif row.reason in _ABSENT and push.reason:
            its = {"reason": Reason.NOT_PUSHED, "node": push.node, "name": push.reason}
            piece = replace(piece, **its)
        pieces.append(piece)
    return pieces


def _why_unasked(told: _Told) -> Reason:
    leases = told.story.leases
    if leases and None in told.findings:
        return Reason.NOT_REMEMBERED
    reason = told.row.outcome or Reason.NOT_ASKED
    if leases and reason in (Reason.NOT_STORED, Reason.NOT_ASKED):
        return Reason.BEYOND_THE_QUESTION
    return reason


def fits(request: str, asked: str) -> bool:
    """Whether an engine's id of a request contains the client's id `asked`. Engines add a prefix
    and suffixes to a client's id, with dashes between: cmpl-ID-0-1f2e3d4c."""
    if not asked:
        return True
    return f"-{request}-".find(f"-{asked}-") >= 0 or request.startswith(asked)


def _merged(ranges: list[RangeReport]) -> list[RangeReport]:
    out: list[RangeReport] = []
    for each in ranges:
        if out and msgspec.structs.astuple(out[-1])[2:] == msgspec.structs.astuple(each)[2:]:
            blocks = out[-1].blocks + each.blocks
            out[-1] = msgspec.structs.replace(out[-1], blocks=blocks)
        else:
            out.append(each)
    return out
