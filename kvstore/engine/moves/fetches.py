"""Blocks of other nodes: questions to the index, fetches, and their results.

    keys not held ──Locate──▶ Located ──worth it? room?──Fetch──▶ slots held ──Fetched──▶ sealed

Rules. 1: a slot that is being fetched into belongs to PEER_WRITER until the fetch has truly ended,
however late. 2: a request for a key on its way waits for the same fetch; neither the index nor a
peer is asked for a key twice at a time. 3: everything is bounded: LOCATES_MAX questions, a quarter
of the arena in motion. 4: blocks that are cleared or switched off on their way are dropped on
arrival.

Covers: which node to ask, and whether a fetch pays: a peer's measured pace against the compute time
of the space. Does not cover: the index, the serving node, bytes and checksums (`kvstore.peers`),
leases that wait (`arrivals`), blocks served by this node (`servings`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from kvstore.engine.events import Candidate, Fetch, Fetched, Locate, Located
from kvstore.engine.memory.residency import leading
from kvstore.engine.memory.slots import PEER_WRITER
from kvstore.engine.memory.table import NO_ROWS, Keys, Rows, each
from kvstore.engine.moves.arrivals import NOBODY, Arrivals, Flags, Name, flags_of
from kvstore.engine.moves.intake import Incoming, Intake
from kvstore.engine.moves.jobs import NS_PER_BYTE_GUESS, Jobs, ReadPace, pieces
from kvstore.engine.sessions.owners import Asker
from kvstore.engine.state import State
from kvstore.engine.why.reasons import Reason, Search, Wanted
from kvstore.types import Latest
from kvstore.units import MIB, NS_PER_MS, NS_PER_S
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX

LOCATES_MAX = 256
"""Most index queries under way."""
AHEAD_LOCATES_MAX = 32
"""With this many index queries under way, routers may start no more: queries of engines would wait
behind theirs."""
COMING_BYTES = 192
"""Memory for one key while it is asked for or on its way, for any number of shards."""
COMING_BYTES_MAX = 32 * MIB
COMING_BYTES_PER_ENGINE = 4 * MIB
"""Most such memory of one engine: ten queries of 2,048 keys."""
LOCATE_MS = 2
"""Estimated time of a question to the index."""
ABSENT_NS = NS_PER_S
"""After an index query found no location, the same query is not repeated for this long."""
ABSENT_MAX = 4096
FETCH_BYTES = 16 * MIB
"""Most bytes of one fetch: the peer is asked for the next one while this one moves, and waiting
leases grow piece by piece."""
GAIN = 2
"""Blocks are fetched only if the estimated time is at most the compute time divided by this."""
AVOID_FIRST_NS, AVOID_MOST_NS = NS_PER_S, 30 * NS_PER_S
"""First and longest back-off from a peer that failed, or from an index that did not answer
UNANSWERED_MAX times in a row."""
UNANSWERED_MAX = 3
PEERS_MAX = 1024
FORGET_NS = 10 * NS_PER_S
"""A peer that is too slow to fetch from is measured again: every so often its slowest sample is
forgotten."""


class _Backoff(msgspec.Struct):
    """Failures in a row of another node or of the index. The back-off begins with number
    `first`."""

    first: int = 1
    failures: int = 0
    until_ns: int = 0
    """End of the back-off: nothing is asked of it before."""

    def failed(self, now_ns: int) -> None:
        """Count a failure. Failures during the back-off are ignored: a session that ends takes many
        fetches with it."""
        if now_ns >= self.until_ns:
            self.failures += 1
            if (more := self.failures - self.first) >= 0:
                self.until_ns = now_ns + min(AVOID_FIRST_NS << min(more, 10), AVOID_MOST_NS)

    def answered(self) -> None:
        """End the row of failures."""
        self.failures = self.until_ns = 0


class _PeerPace(msgspec.Struct):
    """Measured pace and failures of another node."""

    pace: ReadPace = msgspec.field(default_factory=ReadPace)
    measured_ns: int = 0
    """When a fetch ended last, or a sample was forgotten."""
    backoff: _Backoff = msgspec.field(default_factory=_Backoff)


class _Locating(msgspec.Struct, frozen=True):
    asker: Asker
    keys: Keys
    search: Search
    places: Sequence[int]
    """As in _Fetching."""


class _Fetching(Incoming):
    """A fetch under way: its slots belong to PEER_WRITER until it ends."""

    node: str
    peer: _PeerPace
    search: Search
    """The index query that led to this fetch."""
    places: Sequence[int]
    """Place of each key in that query."""


class Fetches:
    """Decides which blocks to query the index for, and which to fetch from which node."""

    def __init__(self, state: State, intake: Intake, arrivals: Arrivals) -> None:
        self._state = state
        self._intake = intake
        self._arrivals = arrivals
        self._locating: dict[int, _Locating] = {}
        self._fetching: Jobs[_Fetching] = Jobs(state.numbers, state.config.arena_bytes)
        self._coming: dict[tuple[int, ...], dict[bytes, int]] = {}
        """Number of the query or fetch for each key, by all the scopes together in which the key is
        wanted."""
        self._coming_of: Counter[str] = Counter()
        """Number of these keys, by engine."""
        self._absent = Latest[tuple[int, bytes], tuple[int, Wanted]](ABSENT_MAX)
        """By (scope, key): (time until which the index is not queried for a run that begins with
        this key, the query that found nothing)."""
        self._peers = Latest[str, _PeerPace](PEERS_MAX)
        self._index = _Backoff(UNANSWERED_MAX)

    # ── what is asked ────────────────────────────────────────────────────────────────────────────

    def want(self, asker: Asker, keys: Keys) -> Wanted:
        """Query the index for these keys of a request, in chain order, the first of which this node
        does not hold. Returns how many leading ones are on their way from other nodes, or may
        be."""
        state = self._state
        if not state.config.fetches or not len(keys):
            return Wanted()
        keys = keys[:KEYS_PER_DATAGRAM_MAX]
        coming = leading(self.coming(asker.scopes, keys, NO_ROWS))
        first = (asker.scopes[0], keys[0].tobytes())
        if coming:
            return Wanted(coming, *self._brought_by(*first))
        until_ns, nothing = self._absent.get(first, (0, Wanted()))
        if until_ns > state.now_ns:
            return nothing
        is_full = len(self._locating) >= (AHEAD_LOCATES_MAX if asker.is_ahead else LOCATES_MAX)
        unasked = Reason.NONE
        if is_full or self._exceeds_share(asker.engine, len(keys)):
            unasked = Reason.TOO_MANY_QUESTIONS
        elif state.now_ns < self._index.until_ns:
            unasked = Reason.INDEX_UNREACHABLE
        elif len(set(each(keys))) != len(keys):
            return Wanted()  # a chain names no key twice: who does is not served with more work
        number = next(state.numbers)
        search = Search(number, len(keys), unasked or Reason.NO_ANSWER_YET)
        state.trail.searches[number] = search
        if unasked:
            return Wanted(0, search)
        keys = keys.copy()  # not the rest of the message
        self._locating[number] = _Locating(asker, keys, search, range(len(keys)))
        self._expect(number, asker, keys)
        state.counters.locates += 1
        state.say(Locate(number, asker.tenant, asker.space, keys.tobytes()))
        return Wanted(len(keys), search)

    def _exceeds_share(self, engine: str, more: int) -> bool:
        """Whether `more` further keys would exceed the limit of this engine, or that of all engines
        together."""
        its = (self._coming_of[engine] + more) * COMING_BYTES
        every = (self._coming_of.total() + more) * COMING_BYTES
        return its > COMING_BYTES_PER_ENGINE or every > COMING_BYTES_MAX

    def _brought_by(self, scope: int, key: bytes) -> tuple[Search, int]:
        """The query that brings this key of a scope, and the key's place in it."""
        number = self._bringer(scope, key)
        job = self._locating.get(number) or self._fetching.get(number)
        assert job is not None, "nobody brings a key"
        at = next(n for n, its in enumerate(each(job.keys)) if its == key)
        return job.search, job.places[at]

    def _bringer(self, scope: int, key: bytes) -> int:
        """Number of the question or fetch that brings this key of a scope."""
        groups = self._coming.items()
        return next(its[key] for these, its in groups if scope in these and key in its)

    def coming(self, scopes: Sequence[int], keys: Keys, rows: Rows, name: Name = NOBODY) -> Flags:
        """Flags [S][n] of the keys that are queried or on their way (`arrivals.Source`)."""
        del rows, name
        return flags_of(self._coming, scopes, keys)

    def _expect(self, number: int, asker: Asker, keys: Keys) -> None:
        its = self._coming.setdefault(asker.scopes, {})
        for key in each(keys):
            its.setdefault(key, number)
        self._coming_of[asker.engine] += len(keys)

    def _expect_no_more(self, number: int, asker: Asker, keys: Keys) -> None:
        its = self._coming.get(asker.scopes, {})
        for key in each(keys):
            if its.get(key) == number:
                del its[key]
        if not its:
            self._coming.pop(asker.scopes, None)
        self._coming_of -= Counter({asker.engine: len(keys)})

    def estimate(self, asker: Asker, keys: Keys, wanted: Wanted) -> tuple[int, str]:
        """Estimated time in ms until the first `wanted.coming` of these keys have come, earlier
        requests to the same source included, and the peer that they come from. While the index is
        queried, the peer is `*`, and the estimate that of the quickest peer that does not fail."""
        now_ns = self._state.now_ns
        number = self._bringer(asker.scopes[0], keys[wanted.coming - 1].tobytes())
        job = self._fetching.get(number)
        if job is not None:
            return LOCATE_MS + job.peer.pace.estimate_ms(number, now_ns), job.node
        asked = [len(its.keys) for other, its in self._locating.items() if other <= number]
        size = sum(asked) * sum(asker.slot_sizes)
        paces = [peer.pace for peer in self._peers.values() if not peer.backoff.failures]
        times_ns = [(size + pace.begun_bytes) * pace.ns_per_byte(now_ns) for pace in paces]
        estimate_ns = min(times_ns, default=size * NS_PER_BYTE_GUESS)
        return LOCATE_MS + int(estimate_ns / NS_PER_MS), "*"

    # ── what the index knows ─────────────────────────────────────────────────────────────────────

    def located(self, event: Located) -> None:
        """The index answered, or did not: fetch from the best candidate, if any."""
        state, question = self._state, self._locating.pop(event.locate, None)
        assert question is not None, f"question {event.locate} was answered twice"
        asker, keys, search = question.asker, question.keys, question.search
        self._expect_no_more(event.locate, asker, keys)
        if event.is_known:
            self._index.answered()
        else:
            self._index.failed(state.now_ns)
        sought = Reason.NOBODY_HAS_IT if event.is_known else Reason.INDEX_UNREACHABLE
        search.judged(sought)
        chosen = self._choose(asker, event.candidates, search) if event.is_known else None
        if event.is_known and chosen is None:
            self._remember_absent(asker, keys, search)
        elif chosen is not None and not state.is_off(asker.tenant, asker.space):
            self._fetch(chosen.node, asker, keys[: chosen.blocks], search)
        self._arrivals.settle_keys(keys)

    def _remember_absent(self, asker: Asker, keys: Keys, search: Search, at: int = 0) -> None:
        first = asker.scopes[0], keys[0].tobytes()
        self._absent[first] = (self._state.now_ns + ABSENT_NS, Wanted(0, search, at))

    def _choose(
        self, asker: Asker, candidates: Sequence[Candidate], search: Search
    ) -> Candidate | None:
        """The candidate whose blocks save most compute time; None: computing is as quick, or all
        candidates are in back-off."""
        state = self._state
        pace = state.paces.of(asker.tenant, asker.space)
        compute_ns = pace.compute_ns_per_token * asker.block_tokens
        best, best_saved_ns = None, 0.0
        for candidate in candidates:
            peer = self._peers.get(candidate.node)
            if not candidate.blocks:
                continue
            if peer and peer.backoff.until_ns > state.now_ns:
                search.judged(Reason.NODE_AVOIDED, candidate, peer.backoff.failures)
                continue
            # Not by the slowest, as waits are: one slow fetch would end all from this peer.
            mean = peer.pace.mean_ns_per_byte(state.now_ns) if peer else NS_PER_BYTE_GUESS
            cost_ns = mean * sum(asker.block_bytes)
            if compute_ns and cost_ns * GAIN > compute_ns and not state.config.fetches_always:
                search.judged(Reason.FETCH_COST, candidate, cost_ns, compute_ns)
                if peer and state.now_ns - peer.measured_ns >= FORGET_NS:
                    peer.pace.forget_slowest()
                    peer.measured_ns = state.now_ns
                continue
            # Nothing is known of computing: the longest run is the best, the quickest of equals.
            worth_ns = max(compute_ns - cost_ns, 1.0) if compute_ns else 1.0 + 1.0 / (1.0 + cost_ns)
            if candidate.blocks * worth_ns > best_saved_ns:
                best, best_saved_ns = candidate, candidate.blocks * worth_ns
                search.judged(Reason.HERE_BY_NOW, candidate)
        return best

    # ── what is fetched ──────────────────────────────────────────────────────────────────────────

    def _fetch(self, node: str, asker: Asker, keys: Keys, search: Search) -> None:
        """Fetch those of the keys that are not here by now, as far as there is room."""
        state = self._state
        rows = state.residency.table.find_all(asker.scopes, keys)
        away = (state.residency.words(rows) < 0) & ~self.coming(asker.scopes, keys, rows)
        missing = away.any(axis=0)
        keys, places = keys[missing], np.flatnonzero(missing)
        sought = Reason.NO_ROOM if len(keys) else Reason.HERE_BY_NOW
        search.judged(sought, None, len(keys))
        block_bytes = sum(asker.slot_sizes)
        bytes_max = self._fetching.bytes_max // (2 if asker.is_ahead else 1)
        room = min(len(keys), self._fetching.room(block_bytes, bytes_max=bytes_max))
        count = self._intake.room_for(asker, room)
        for piece in pieces(count, FETCH_BYTES // block_bytes):
            peer = self._peers[node] = self._peers.get(node) or _PeerPace()
            its, at = keys[piece], places[piece].tolist()
            columns = self._intake.hold(asker, len(its), itertools.repeat(PEER_WRITER))
            fetching = _Fetching(node, peer, search, at, asker=asker, keys=its, columns=columns)
            number = self._fetching.begin(fetching)
            search.fetching(len(its), state.now_ns)
            self._expect(number, asker, its)
            peer.pace.begun(number, fetching.size_bytes, state.now_ns)
            state.say(Fetch(number, node, *fetching.order(state.slots)))

    def fetched(self, event: Fetched) -> None:
        """A fetch has truly ended: seal its good blocks that did not come by another way."""
        state, job = self._state, self._fetching.end(event.job)
        asker = job.asker
        self._expect_no_more(event.job, asker, job.keys)
        self._judge(job, event)
        is_void = job.is_void or state.is_off(*asker.address)
        good = self._intake.fetch(job, event.good, event.checksums, search=job.search.number)
        count = int(good.sum())
        job.search.fetch_ended(event, count, is_void=is_void, now_ns=state.now_ns)
        if not count:
            # The index knew of what is not there: it is not asked the same again at once.
            self._remember_absent(asker, job.keys, job.search, job.places[0])
        state.counters.fetched_blocks += count
        state.counters.fetch_blocks_lost += len(good) - count

    def _judge(self, job: _Fetching, event: Fetched) -> None:
        """Update the peer's pace, failures and back-off."""
        peer = self._peers[job.node] = job.peer
        good = any(event.good)
        peer.pace.ended(event.job, self._state.now_ns, counts=good)
        peer.measured_ns = self._state.now_ns
        if good:
            peer.backoff.answered()
        elif event.peer_failed:
            peer.backoff.failed(self._state.now_ns)

    def void(self, tenant: str | None, space: bytes | None) -> None:
        """Mark running fetches of cleared blocks, so that these are dropped when they arrive. None:
        of any tenant or space."""
        for job in self._fetching.values():
            job.is_void |= job.asker.is_of(tenant, space)
