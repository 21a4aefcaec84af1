"""Shares of dram: what quotas guarantee to groups, and what accounts may pin of it (ADR 4).

    engine ─▶ group, by its model or tenant ─▶ share of dram ─▶ order in which groups give way
    lease, grant, read ─▶ account ─▶ account above it ─▶ what may still be pinned of the share

Does not cover: order of evictions within a group (`policies`), life of a lease (`leases`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NewType

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.policies import Words
from kvstore.engine.memory.table import tallied
from kvstore.types import QUOTA_COUNT_MAX

if TYPE_CHECKING:
    from kvstore.engine.memory.slots import Slots

# ── quotas ────────────────────────────────────────────────────────────────────────────────────────
# Guaranteed shares of dram, and the order in which groups give way.
#
# A group has the name of one quota: engines whose model label, or else whose tenant, is that name.
# All others together are the group OTHERS, with the rest of dram.
#
# 1. Unused memory is for every group: a quota is a guarantee, not a wall.
# 2. A group at or above its share makes room out of its own slots before those of others.
# 3. A group below its share takes from groups above theirs, the furthest above first, and only so
#    much that they keep their share; then from itself.
# 4. So no group loses a slot to others while at or below its share.
#
# A group's slots are those granted to it and not free again: written, being written or being read
# into. They are counted where slots are granted and freed (`slots`).

QuotaGroup = NewType("QuotaGroup", int)
OTHERS = QuotaGroup(0)


class Quotas:
    """Shares and use of groups, in bytes, by group."""

    def __init__(self, quotas: Sequence[tuple[str, int]], *, arena_bytes: int) -> None:
        assert len(quotas) <= QUOTA_COUNT_MAX
        promised = [size for _, size in quotas]
        assert sum(promised) <= arena_bytes, "more is promised than there is"
        self.names = ["", *(name for name, _ in quotas)]
        self.share = np.array([arena_bytes - sum(promised), *promised], dtype=np.int64)
        self.held = np.zeros(len(self.share), dtype=np.int64)
        self.floor = [0] * len(self.share)
        """Bytes pinned by group when an earlier process's state was taken over."""

    @property
    def any(self) -> bool:
        """Whether there are quotas."""
        return len(self.share) > 1

    def group(self, *, label: str, tenant: str) -> QuotaGroup:
        """Group of an engine: of its model's quota, or else its tenant's."""
        for name in (label, tenant):
            if name and name in self.names:
                return QuotaGroup(self.names.index(name))
        return OTHERS

    def is_full(self, group: QuotaGroup, more_bytes: int) -> bool:
        """Whether a group would exceed its share with `more_bytes`."""
        return bool(self.held[group] + more_bytes > self.share[group])

    def givers(self, asker: QuotaGroup, more_bytes: int) -> list[QuotaGroup]:
        """Groups that make room for `more_bytes` of `asker`, in the order in which they give
        way."""
        above = np.argsort(self.share - self.held, kind="stable").tolist()
        others = [QuotaGroup(g) for g in above if g != asker and self.held[g] > self.share[g]]
        return [asker, *others] if self.is_full(asker, more_bytes) else [*others, asker]

    def spare_bytes(self, giver: QuotaGroup, asker: QuotaGroup) -> int:
        """Bytes that `giver` can lose to `asker`."""
        surplus = self.held[giver] - self.share[giver]
        return int(self.held[giver] if giver == asker else max(0, surplus))

    def can_lose(self, asker: QuotaGroup, size_bytes: int) -> NDArray[np.bool_]:
        """Mask of groups that can lose `size_bytes` in one piece to `asker`."""
        may: NDArray[np.bool_] = self.held - self.share >= size_bytes
        may[asker] = True
        return may


# ── pins ──────────────────────────────────────────────────────────────────────────────────────────
# Protection of slots against eviction, by account, and limits of each account.
#
# A slot is pinned while it is leased, served to another node, written to disk from, or writable:
# granted, in quarantine, read or fetched into. A slot counts once for its group, and for each
# account that pins it:
#
#     this node ─┬─ the engines of one tenant ─── one engine    ENGINE_PART each time
#                └─ all other nodes ───────────── one node      NODE_PART each time
#
# 1. Pinned slots of a group are no more than its share. So the excess of others can be evicted, and
#    every group reaches its share, whatever is pinned. One block is always allowed.
# 2. An account may pin a part of the rest that its siblings' pins leave of the limit of the account
#    above it: alone it may have most, and some is left for the next one.
# 3. A pin ends with its block: a freed slot has no leases.
#
# A lease runs out; a granted slot comes back only by a message or the end of its writer. And names
# of engines and tenants come from engines, while the kernel identifies a process: one with many
# names has one part. So each process has an account of its writable slots alone, granted or in
# quarantine, and may have half of the rest that other processes leave (ADR 4):
#
#     all processes of engines ─── one process                 PROCESS_PART
#
# Does not cover: processes that fork.

Weights = list[tuple[int, int]]
"""Bytes of some slots by group: [(group, bytes)]."""
_PROCESSES: Final = ("process",)
"""Name of the account of all processes."""

ENGINE_PART: Final = (15, 16)
"""Part of the rest that an engine may pin, and a tenant: with both, a single engine gets seven
eighths of dram."""
NODE_PART: Final = (1, 2)
"""Part of the rest that another node may pin, and all nodes together: a single one gets a quarter
of dram. A node of equal size has no more than that in motion."""
PROCESS_PART: Final = (1, 2)
_PARTS: Final = {
    "engine": (ENGINE_PART, ENGINE_PART),
    "node": (NODE_PART, NODE_PART),
    "process": ((1, 1), PROCESS_PART),
}
"""Part of an account of several, and of one, by the first part of its name."""


class Account(msgspec.Struct, eq=False):
    """An account of pins: one engine, node or process, or the account of several (a tenant, all
    nodes, all processes, all that this node pins)."""

    name: tuple[str, ...]
    part: tuple[int, int]
    parent: Account | None
    counts: NDArray[np.int32]
    """Number of leases of each slot by this account. Untouched pages of the array take no
    memory."""
    held: list[int]
    """Bytes pinned by this account, each slot counted once, by group."""
    members: int = 0
    """Number of connections or nodes; of an upper account, number of accounts below it; of the
    node's one more, so that it stays."""

    def line(self) -> Iterator[Account]:
        """This account and those above it, from the bottom up."""
        each: Account | None = self
        while each is not None:
            yield each
            each = each.parent

    def room(self, group: int, share: int, held: int, block_bytes: int) -> int:
        """Bytes of a group's slots that it may still pin, below 0 if it has too many. `held`: those
        that all accounts pin of `share`."""
        for each in reversed(list(self.line())):
            share = (share - (held - each.held[group])) * each.part[0] // each.part[1]
            held = each.held[group]
        # What is left of a block is one: of very few, none would be left to lease.
        return share - held + block_bytes - 1

    def add(self, weights: Weights, sign: int) -> None:
        """Add pinned bytes to this account and those above it, or remove them with -1."""
        for each in self.line():
            _add(each.held, weights, sign)


class Pins:
    """All pins of one node: leases by account, and writable slots by process."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        held = [0] * len(slots.quotas.share)
        self.node = Account((), (1, 1), None, slots.leases, held, members=1)
        """Account of all slots that are pinned, above those of engines and other nodes."""
        self.accounts: dict[tuple[str, ...], Account] = {}
        self._of: dict[int, tuple[Account, ...]] = {}
        """Accounts of each connection, of its engine and its process; nodes, with the negative of
        their number, have one."""
        self.leased = 0
        """Number of leased slots, each counted once."""
        self.is_short = False
        """Whether sessions got fewer credits than they should have, because of a limit on pins."""
        self.block_bytes_max = 0
        """Largest block that `room` was asked about: an account exceeds its limit by at most
        one."""

    # ── who ──────────────────────────────────────────────────────────────────────────────────────

    def join_engine(self, connection: int, owner: tuple[str, str, str], process: int) -> None:
        """Add a connection of an engine (`owner`: tenant, engine id, nonce) with its process; slots
        granted to it before count at once."""
        its = self._slots.weigh(self._slots.of_writer(connection))
        self.node.add(its, -1)  # which has them already
        self._of[connection] = (
            self._join(("engine", owner[0]), ("engine", *owner), its),
            self._join(_PROCESSES, (*_PROCESSES, str(process)), its),
        )

    def join_node(self, peer: int) -> Account:
        """Add another node; returns its account."""
        if -peer not in self._of:
            self._of[-peer] = (self._join(("node",), ("node", str(peer)), []),)
        return self._of[-peer][0]

    def _join(self, upper: tuple[str, ...], name: tuple[str, ...], weights: Weights) -> Account:
        above = self._account(upper, 0, self.node if upper != _PROCESSES else None)
        account = self._account(name, 1, above)
        account.members += 1
        account.add(weights, 1)
        return account

    def _account(self, name: tuple[str, ...], level: int, parent: Account | None) -> Account:
        """The account of this name, made when new."""
        if name not in self.accounts:
            counts = np.zeros(len(self._slots.state), np.int32)
            held = [0] * len(self._slots.quotas.share)
            self.accounts[name] = Account(name, _PARTS[name[0]][level], parent, counts, held)
            if parent is not None:
                parent.members += 1
        return self.accounts[name]

    def leave(self, id: int) -> None:
        """Remove a connection or node (negative), and accounts without members."""
        for account in self._of.pop(id, ()):
            for each in account.line():
                each.members -= 1
                if each.members:
                    break
                del self.accounts[each.name]

    def account(self, connection: int) -> Account:
        """Account of the engine that a connection belongs to."""
        return self._of[connection][0]

    def process(self, connection: int) -> Account:
        """Account of the process that a connection belongs to."""
        return self._of[connection][1]

    # ── how much ─────────────────────────────────────────────────────────────────────────────────

    def room(self, account: Account, group: int, block_bytes: int) -> int:
        """Bytes of a group's slots that an account may still pin. One block always fits while
        nothing is pinned."""
        share, pinned = int(self._slots.quotas.share[group]), self.node.held[group]
        self.block_bytes_max = max(self.block_bytes_max, block_bytes)
        room = min(share - pinned, account.room(group, share, pinned, block_bytes))
        return max(room, 0) if pinned else max(room, block_bytes)

    def writable(self, columns: list[tuple[int, int]], group: int) -> int:
        """Number of blocks of a group that may be granted; `columns`: (connection, bytes) of each
        slot of a block."""
        share, held = int(self._slots.quotas.share[group]), self.accounts[_PROCESSES].held[group]
        sizes = Counter[Account]()
        for connection, size_bytes in columns:
            sizes[self.process(connection)] += size_bytes
        # Nobody is kept from a first block.
        return min(
            max(0 if its.held[group] else size, its.room(group, share, held, size), 0) // size
            for its, size in sizes.items()
        )

    def fitting(self, account: Account, words: Words, shards: int) -> int:
        """Number of leading blocks that an account may pin. `words` are sealed slots,
        [n][shards]."""
        if not len(words):
            return 0
        slots, count = self._slots, len(words) // shards
        # All blocks of a run are of one size.
        block_bytes = int(slots.sizes(words[:shards]).sum())
        if not slots.quotas.any and count * block_bytes <= self.room(account, 0, block_bytes):
            return count
        sizes = np.where(account.counts[words] == 0, slots.sizes(words), 0)
        groups = slots.group[words]
        for group in np.unique(groups).tolist():
            its = np.where(groups == group, sizes, 0).reshape(-1, shards).sum(axis=1).cumsum()
            room = self.room(account, group, block_bytes)
            count = min(count, int(np.searchsorted(its, room, side="right")))
        return count

    # ── what ─────────────────────────────────────────────────────────────────────────────────────

    def pin(self, words: Words, account: Account) -> None:
        """Add one lease to each of these sealed, distinct slots."""
        self._count(words, account, 1)

    def unpin(self, words: Words, account: Account) -> None:
        """Remove one lease from each of these slots, whose blocks are still those of the lease."""
        self._count(words, account, -1)

    def _count(self, words: Words, account: Account, sign: int) -> None:
        its, is_alone, weights = words, False, Weights()
        for each in reversed([*account.line()]):
            if is_alone:  # nobody above leases any of them besides
                each.counts[words] = max(sign, 0)
            else:
                others = self._leased(each.counts, words, sign)
                is_alone = others is None
                its = words if others is None else words[others == 0]
                weights = self._slots.weigh(its)
            if each is self.node:
                self.leased += sign * len(its)
            _add(each.held, weights, sign)

    @staticmethod
    def _leased(counts: NDArray[np.int32], words: Words, sign: int) -> NDArray[np.int32] | None:
        """Add `sign` to the count of each slot. Returns the counts of other leases of these slots,
        None if there are none."""
        before = counts[words]
        after = before + np.int32(sign)
        counts[words] = after
        others = before if sign > 0 else after
        return others if others.any() else None

    def freed(self, words: Words) -> None:
        """Drop all leases of these slots, because their blocks leave."""
        slots = self._slots
        leased = words[slots.leases[words] != 0]
        if not len(leased):
            return
        self.leased -= len(leased)
        for account in (self.node, *self.accounts.values()):
            its = leased[account.counts[leased] != 0]
            _add(account.held, slots.weigh(its), -1)
            account.counts[its] = 0

    def written(self, words: Words, sign: int) -> None:
        """Add pins for the present writers of these slots (`sign` 1), or remove them (-1)."""
        slots = self._slots
        words = words[slots.writer[words] != 0]
        if not len(words):
            return
        writers = slots.writer[words]
        for writer, count in tallied(writers):
            its = words if count == len(words) else words[writers == writer]
            # Below 0 are writers of the node itself, and nodes that fetch.
            accounts = self._of.get(writer) if writer > 0 else None
            weights = slots.weigh(its)
            for account in accounts or (self.node,):
                account.add(weights, sign)


def _add(held: list[int], weights: Weights, sign: int) -> None:
    for group, size_bytes in weights:
        held[group] += sign * size_bytes
