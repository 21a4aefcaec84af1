"""Why a request hit or missed: stories of recent requests, joined with findings of their lookups.

    Story (engine, at a request's end) ─┐
    Finding (node, at each lookup) ─────┴▶ one row a request, ranges of blocks ─▶ kvstore explain

A ring of STORIES_MAX; prompts and keys of requests are not kept. Does not cover: results of lookups
(`findings`), texts of reasons (`kvstore.obs.reasons`).
"""

from __future__ import annotations

import itertools
import math
from typing import Final

import msgspec

from kvstore.engine.events import Staged, StoryTold
from kvstore.engine.sessions.owners import Connection
from kvstore.engine.state import State
from kvstore.engine.why.findings import ABSENT, SPACE_DIGITS, Finding, RangeReport, cut, examine
from kvstore.engine.why.reasons import PushReport, Reason, reason_of
from kvstore.types import Latest, SpaceId
from kvstore.units import NS_PER_MS, NS_PER_US
from kvstore.wire.messages import Story, keys_array
from kvstore.wire.space import is_prefix, whole_block_bytes

STORIES_MAX: Final = 1024
COUNT_MAX: Final = 1 << 50
"""Bound of nanoseconds in a Story (13 days): larger values from an engine make no sense, and their
sums would not fit a message."""
TOKENS_MAX: Final = 1 << 32
"""Bound of tokens and blocks."""
_TEXTS: Final = {"request", "outcome", "detail", "transfer", "session", "leases", "traceparent"}
_NOT_WAITED_FOR: Final = {
    Reason.PROMOTION_DEADLINE: Reason.PROMOTION_COST,
    Reason.TOO_LATE: Reason.WAIT_COST,
}
"""Reason for blocks that came too late → reason if the request never waited."""
_TIMES: Final = ("queued", "lookup", "promotion", "load", "first_token", "saved")
_COUNTS: Final = {
    name: COUNT_MAX if name.endswith("_ns") else TOKENS_MAX
    for name in Story.__struct_fields__
    if name not in _TEXTS
}


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
    """Why no blocks, or no more, were loaded: the reason of `missed`; none after a load."""
    detail: str
    """Detail of a load that failed."""
    queued_us: int
    lookup_us: int
    promotion_us: int
    load_us: int
    stored_blocks: int
    first_token_us: int = 0
    """Time from arrival to the first token; 0: no token was sampled."""
    transfer: str = ""
    """Name of its transfer between a prefill and a decode engine, if it has one."""
    pushes: tuple[PushReport, ...] = ()
    """Pushes of this transfer that have ended."""
    saved_us: int = 0
    """Estimated time to compute the loaded tokens."""
    missed: RangeReport | None = None
    """First range that was not loaded, unless `outcome` is none."""


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
    """Recent requests of one node, and answers to questions about them."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._told = Latest[int, _Told](STORIES_MAX)
        """The latest requests by number."""
        self._numbers = itertools.count(1)

    def tell(self, connection: Connection, story: Story) -> None:
        """A request ended: keep its Story with the findings of its lookups, and count it in the
        ledger."""
        state, owner = self._state, connection.owner
        if owner.address is None:
            return  # no session ever: it does not know what it speaks of
        tenant, space = owner.address
        counts = {name: min(getattr(story, name), most) for name, most in _COUNTS.items()}
        story = msgspec.structs.replace(story, **counts)
        known = state.known.get(owner.address)
        found = tuple(state.trail.finding(owner.key, story.session, each) for each in story.leases)
        row = RequestReport(
            number=next(self._numbers),
            engine_id=owner.key[1],
            label=known.label if known is not None else "",
            tenant=tenant,
            space=space.hex()[:SPACE_DIGITS],
            ended_ms_ago=0,
            block_tokens=known.space.block_tokens if known is not None else 0,
            outcome=_outcome(story),
            **{f"{name}_us": getattr(story, f"{name}_ns") // NS_PER_US for name in _TIMES},
            **{name: getattr(story, name) for name in _AS_TOLD},
        )
        told = self._told[row.number] = _Told(row, story, state.now_ns - story.age_ns, found)
        gpu_count = owner.rank_count if owner.scheduler is not None else 1
        row, table = self._joined(told)
        state.ledger.count((row.label, row.tenant), story, table, gpu_count=gpu_count)
        if state.config.tell_stories:
            block_bytes = whole_block_bytes(known.space) if known is not None else 0
            state.say(StoryTold(row, tuple(table), story, told.ended_ns, block_bytes))
        self._stage(row, story)

    def _stage(self, row: RequestReport, story: Story) -> None:
        """Report the time from the end of a push from another node to the first token of its
        request."""
        state = self._state
        for each in row.pushes:
            is_from_there = each.side == "decode" and each.node != state.config.node
            if is_from_there and each.pushed and story.first_token_ns:
                # It asks nothing before its push has ended.
                took_ns = max(0, story.first_token_ns - story.queued_ns)
                state.say(Staged("push_token", each.node, took_ns, 0))
                return

    # ── looking in ───────────────────────────────────────────────────────────────────────────────

    def requests(self, request: str, *, limit: int, below: float = math.inf) -> list[RequestReport]:
        """The newest requests whose id fits `request` (empty: all) and whose number is less than
        `below`, newest first, at most `limit`. Each may take a millisecond."""
        older = (told for told in reversed(self._told.values()) if told.row.number < below)
        fitting = (told for told in older if fits(told.story.request, request))
        return [self._joined(told)[0] for told in itertools.islice(fitting, limit)]

    def request(self, number: int) -> tuple[RequestReport | None, list[RangeReport]]:
        """The request with this number, and the result for each block of its prompt; None and empty
        if it is no longer kept."""
        told = self._told.get(number)
        return self._joined(told) if told is not None else (None, [])

    def _joined(self, told: _Told) -> tuple[RequestReport, list[RangeReport]]:
        """The request's story with what is known of its lookups and pushes by now."""
        state, outcome = self._state, told.row.outcome
        for finding in told.findings:
            if finding is not None:
                state.trail.examine(finding, state)
        pushes = state.trail.pushes(told.row.tenant, told.story.transfer)
        ranges = _with_pushes(self._ranges(told), pushes)
        missed = next((row for row in ranges if row.reason), None) if outcome else None
        row = msgspec.structs.replace(
            told.row,
            ended_ms_ago=max(0, state.now_ns - told.ended_ns) // NS_PER_MS,
            pushes=pushes,
            outcome=missed.reason if missed is not None else outcome,
            missed=missed,
        )
        return row, ranges

    def hashings(self) -> list[HashingReport]:
        """Parameters for computing the keys of each known space that holds prefixes."""
        return [
            HashingReport(
                *(address.hex(), tenant, known.label),
                *(space.hash_block_tokens, space.hash_algorithm, space.hash_seed),
            )
            for (tenant, address), known in self._state.known.items()
            if is_prefix(space := known.space)
        ]

    def prefix(self, tenant: str, space: SpaceId, keys: bytes) -> list[RangeReport]:
        """Tiers of these blocks now, or why they are in none; empty when the space is not known."""
        state, known = self._state, self._state.known.get((tenant, space))
        if known is None or not keys:
            return []
        array = keys_array(keys)
        finding = Finding(("", "", ""), (tenant, space), known.scopes, state.now_ns, promoting=None)
        rows = state.residency.table.find(known.scopes[0], array)
        finding.present, finding.in_dram = rows >= 0, state.residency.words(rows) >= 0
        here = (Reason.BEHIND_A_GAP, Reason.BEHIND_A_GAP_ON_DISK)
        return [
            msgspec.structs.replace(row, reason=Reason.NONE) if row.reason in here else row
            for row in examine(state, finding, array)
        ]

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
            for row in finding.ranges(self._state.trail.searches, at):
                out += [
                    _of_request(story, piece, served=served)
                    for piece in cut(row, local, served, total)
                    if local <= piece.first_block < total
                ]
                at = row.first_block + row.blocks
        end = out[-1].first_block + out[-1].blocks if out else 0
        if end < served:  # the lookup is no longer recorded, as after a restart of the node
            out.append(RangeReport(end, served - end, ""))
            end = served
        if end < total:
            out.append(RangeReport(end, total - end, "", _why_unasked(told)))
        return _merged(out)


def _outcome(story: Story) -> Reason:
    outcome = reason_of(story.outcome)
    is_own = outcome is Reason.NO_FULL_BLOCK and story.local_tokens
    return Reason.OWN_CACHE if is_own else outcome


def _of_request(story: Story, row: RangeReport, *, served: int) -> RangeReport:
    """Result, for its request, of blocks in one row of a lookup: all of them were loaded, or none.
    Blocks before number `served` were loaded."""
    is_loaded = row.first_block < served
    if row.reason is Reason.NONE:
        reason = reason_of(story.outcome) or Reason.NOT_NEEDED
        return row if is_loaded else RangeReport(row.first_block, row.blocks, "dram", reason)
    if is_loaded:
        return RangeReport(row.first_block, row.blocks)  # by an earlier lookup, before a preemption
    if not story.promotion_ns and row.reason in _NOT_WAITED_FOR:
        return msgspec.structs.replace(row, reason=_NOT_WAITED_FOR[row.reason])
    return row


def _with_pushes(ranges: list[RangeReport], pushes: tuple[PushReport, ...]) -> list[RangeReport]:
    """`ranges` with the node of blocks that were pushed, and with the end of a push as the reason
    for blocks that it did not bring."""
    for push in pushes:
        if push.side == "decode" and not push.group:
            ends = push.first_block, push.first_block + push.blocks
            ranges = [_with_push(piece, push) for row in ranges for piece in cut(row, *ends)]
    return ranges


def _with_push(row: RangeReport, push: PushReport) -> RangeReport:
    """The row with what a push says of it; the row's blocks are all in the push, or none is."""
    if not 0 <= row.first_block - push.first_block < push.blocks:
        return row
    if row.tier == "peer" and row.search is None:
        return msgspec.structs.replace(row, node=push.node)
    if row.reason in ABSENT and push.reason:
        its = {"reason": Reason.NOT_PUSHED, "node": push.node, "name": push.reason}
        return msgspec.structs.replace(row, **its)
    return row


def _why_unasked(told: _Told) -> Reason:
    if None in told.findings:
        return Reason.NOT_REMEMBERED
    reason = told.row.outcome or Reason.NOT_ASKED
    is_beyond = told.findings and reason in (Reason.NOT_STORED, Reason.NOT_ASKED)
    return Reason.BEYOND_THE_QUESTION if is_beyond else reason


def fits(request: str, asked: str) -> bool:
    """Whether an engine's id of a request contains the client's id `asked`. Engines add a prefix
    and suffixes to a client's id, with dashes between: cmpl-ID-0-1f2e3d4c."""
    if not asked:
        return True
    return f"-{request}-".find(f"-{asked}-") >= 0 or request.startswith(asked)


def _merged(ranges: list[RangeReport]) -> list[RangeReport]:
    alike = itertools.groupby(ranges, key=lambda row: msgspec.structs.astuple(row)[2:])
    runs = [list(run) for _, run in alike]
    return [msgspec.structs.replace(run[0], blocks=sum(r.blocks for r in run)) for run in runs]
