"""Leases that grow while blocks arrive, from disk or from another node; and where blocks came from.

    LeaseAsk ──▶ Wait ──blocks arrive──▶ LeaseMore … ──nothing more comes──▶ over

Rules. 1: a wait ends with its lease, however that ends, when all blocks came, or when no source
brings the next one. 2: a wait is looked at when the block that it needs next has come, from any
source, or will not come. 3: the origin of a block is reported once, with the first lease of it.
Does not cover: bringing the blocks (`files`, `fetches`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.agenda import Groups
from kvstore.engine.memory.policies import Words
from kvstore.engine.memory.residency import Run, leading, leading_run
from kvstore.engine.memory.table import Keys, Rows, each
from kvstore.engine.sessions.leases import Lease
from kvstore.engine.sessions.owners import Asker, Connection
from kvstore.engine.state import State
from kvstore.engine.why.reasons import FROM_DISK, FROM_DRAM, PUSHED_HERE, Origins
from kvstore.wire.messages import LeaseMore

LOOKS_PER_STEP: Final = 16
"""Most watches that one step looks at. A look takes 10 µs where the first block is still on its
way, as mostly, and up to a millisecond where it leases what came, as for many requests that share a
long prefix."""


Name = tuple[int, int]
"""Name of a watch: session and lease; negative sessions are those of other nodes."""
NOBODY: Name = (0, 0)
"""Name of blocks that no watch waits for."""
Flags = NDArray[np.bool_]
Look = Callable[[], Keys]
"""Called when the watched key has arrived or will not: handles the blocks that arrived and returns
the keys that are still waited for, none when the wait is over."""


class Source(Protocol):
    """A way by which blocks come to dram: the disk, another node, a push."""

    def coming(self, scopes: Sequence[int], keys: Keys, rows: Rows, name: Name) -> Flags:
        """Flags [S][n] of the keys that are on their way or may be, for the watch of this name;
        `rows` are the rows of these keys."""


class Wait(msgspec.Struct):
    """A lease that grows while blocks arrive."""

    connection: Connection
    lease: int
    held: Lease
    asker: Asker
    keys: Keys
    """Keys that were asked for and are not leased yet, in chain order."""
    with_checksums: bool
    promoting: int
    """Number of leading keys that the engine was last informed are on their way."""
    bring: Callable[[Keys], object]
    """Begins to bring more of these keys to dram, as far as there is room by now."""


class _Watch(NamedTuple):
    next_key: bytes
    look: Look


class Arrivals:
    """Leases and servings that wait for blocks, and the sources that bring them."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.sources: Sequence[Source] = ()
        """All ways by which blocks come."""
        self._watches: dict[Name, _Watch] = {}
        self._next = Groups[bytes, Name]()
        """Watches by the key that they need next."""
        self._to_look_at: dict[Name, None] = {}
        """Watches that `advance` looks at next, in order."""
        self.over: Callable[[Name], None] = lambda _: None
        """Called with the name of a watch that has ended: what is queued for it is not read."""
        state.leases.ended = self.unwatch

    def leased(
        self, asker: Asker, run: Run, words: Words, *, asked: bool
    ) -> tuple[Origins | None, dict[str, Any]]:
        """Count the blocks of a run that is leased now. Returns their origins, and the fields about
        them that LeaseReply and LeaseMore have. `words`: those of the run, which of many shards are
        dear to put together; `asked`: as of `Run.checksums`."""
        state, origins, counts = self._state, self._take_origins(run), dict[str, int]()
        if origins is not None:
            is_from_peer = (origins > 0) | (origins == PUSHED_HERE)
            flags = {"from_file": origins == FROM_DISK, "from_peer": is_from_peer}
            counts = {name: int(np.count_nonzero(its)) for name, its in flags.items()}
        state.counters.leased_bytes += run.count * sum(asker.slot_sizes)
        return origins, {
            "slots": state.slots.slots_of(words).tobytes(),
            "generations": state.slots.generation[words].tobytes(),
            "checksums": run.checksums(state.residency, asked=asked),
            **counts,
        }

    def _take_origins(self, run: Run) -> Origins | None:
        """Origins of the blocks of a run that is leased now; None: all were in dram."""
        if not run.count:
            return None
        words = run.words_by_shard[0][: run.count]
        origins = self._state.residency.origin[words]
        if (origins == FROM_DRAM).all():
            return None
        self._state.residency.origin[words] = FROM_DRAM
        return origins

    def wait(self, wait: Wait) -> None:
        """Let a lease grow as its blocks arrive."""
        name = wait.connection.owner.open_session, wait.lease
        self.watch(name, wait.keys, lambda: self._grow(name, wait))

    def watch(self, name: Name, keys: Keys, look: Look) -> None:
        """Call `look` when the first of these keys has arrived or will not. One watch per name."""
        self._take(name)
        next_key = keys[0].tobytes()
        self._watches[name] = _Watch(next_key, look)
        self._next.add(name, next_key)

    def look(self, name: Name, look: Look) -> None:
        """Call `look` now, and again when the first of the keys that it returns has arrived or will
        not; without any the watch of this name is over."""
        rest = look()
        if len(rest):
            self.watch(name, rest, look)
        else:
            self.over(name)

    def unwatch(self, name: Name) -> None:
        """End the watch of this name, if there is one."""
        if self._take(name) is not None:
            self.over(name)

    def _take(self, name: Name) -> _Watch | None:
        watch = self._watches.pop(name, None)
        if watch is not None:
            self._next.remove(name, watch.next_key)
        return watch

    def awaits(self, keys: Keys) -> bool:
        """Whether a watch needs one of these keys next."""
        return bool(self._next) and any(key in self._next for key in each(keys))

    def settle_keys(self, keys: Keys) -> None:
        """These keys arrived, or will not: queue the watches that need one of them next."""
        for key in each(keys) if self._next else ():
            self._to_look_at |= self._next.get(key, {})

    @property
    def has_news(self) -> bool:
        """Whether `advance` has watches to look at."""
        return bool(self._to_look_at)

    def advance(self) -> None:
        """Look at the queued watches, at most LOOKS_PER_STEP: this bounds the time of a step."""
        for name in list(itertools.islice(self._to_look_at, LOOKS_PER_STEP)):
            del self._to_look_at[name]
            watch = self._take(name)
            if watch is not None:
                self.look(name, watch.look)

    def _grow(self, name: Name, wait: Wait) -> Keys:
        """Lease the blocks that arrived and send LeaseMore. Returns the keys that are waited for
        from now on, none if no more will come."""
        state, scopes, session = self._state, wait.asker.scopes, name[0]
        # While the first block is on its way by another job, the rest cannot be leased.
        first = wait.keys[:1]
        if not leading_run(state.residency, scopes, first).count and self.on_their_way(
            scopes, first, name
        ):
            return wait.keys
        run = leading_run(state.residency, scopes, wait.keys)
        run, refused = state.leasable(session, wait.held.account, run)
        count, rest, words = run.count, wait.keys[run.count :], run.words()
        state.leases.extend(session, wait.lease, words)
        wait.keys = rest
        has_failed = wait.promoting > count and not self.on_their_way(scopes, rest[:1], name)
        if not refused and not has_failed:
            wait.bring(rest)
        wait.promoting = promoting = 0 if refused else self.on_their_way(scopes, rest, name)
        origins, leased = self.leased(wait.asker, run, words, asked=wait.with_checksums)
        state.trail.grew(session, wait.lease, run, origins, refused)
        more = LeaseMore(lease=wait.lease, promoting=promoting, **leased)
        state.send(wait.connection, more)
        return rest if promoting else rest[:0]

    def on_their_way(
        self, scopes: Sequence[int], keys: Keys, name: Name, by: Iterable[Source] | None = None
    ) -> int:
        """Number of leading keys that are in dram or on their way in every shard, for the watch of
        this name; 0 if none of them is on its way. `by`: only these sources count; None: all."""
        rows = self._state.residency.table.find_all(scopes, keys)
        coming = np.zeros(rows.shape, dtype=bool)
        for source in self.sources if by is None else by:
            coming |= source.coming(scopes, keys, rows, name)
        count = leading((self._state.residency.words(rows) >= 0) | coming)
        return count if coming[:, :count].any() else 0


def flags_of(
    groups: Mapping[tuple[int, ...], Collection[bytes]], scopes: Sequence[int], keys: Keys
) -> NDArray[np.bool_]:
    """Flags [S][n] of the keys that are in `groups`, of keys by the scopes (all shards) in which
    they are wanted."""
    flags = np.zeros((len(scopes), len(keys)), dtype=bool)
    for these, its in groups.items():
        if not frozenset(these).isdisjoint(scopes):
            found = (key in its for key in each(keys))
            flags[np.isin(scopes, these)] |= np.fromiter(found, dtype=bool, count=len(keys))
    return flags
