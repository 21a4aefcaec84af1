"""The engine against a model that is as obvious as can be, under any order of events.

The model knows what each process knows: the credits its scheduler heard of, its leases, and which
bytes each (slot, generation) was given. Hypothesis chooses what happens next. Always true:
1. `kit.engine_check`, and generations only grow;
2. a slot is granted only when nobody who was granted those bytes before may still write to them:
   he sealed, dropped, was quiet for a later session, attached again, or is gone;
3. what is published or leased are slots with the generations of now that hold the bytes of the key;
4. and they stay until the lease ends, unless the block was cleared or distrusted;
5. when all processes are gone, nothing is granted, quarantined or leased."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    rule,
)

from kvstore.engine.events import Clear
from kvstore.engine.memory.shares import Pins
from kvstore.types import PAGES_PER_GENERATION, SLOT_BYTES_MIN
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import (
    LEASE_LIVES_MAX,
    Distrust,
    Drop,
    Grant,
    Hint,
    HintReply,
    LeaseAsk,
    LeaseRelease,
    LeaseRenew,
    LeaseReply,
    Quiesce,
    Seal,
    SessionClosed,
    SessionOpen,
)
from tests.amounts import amount
from tests.kit.planted import Patch
from tests.steps import CountedMachine, verify_machine
from tests.unit.engine.broken import ENGINES
from tests.unit.engine.harness import Node, arrays, checksum, keys, pairs
from tests.unit.engine.machine_owner import KINDS, Content, Kind, Lease, Owner, Place

TTL_MS = 50
whos = st.integers(0, 5)
ranks = st.integers(0, 3)
numbers = st.integers(0, 19)
picks = st.integers(0, 63)


class Machine(CountedMachine):
    """See the module."""

    @initialize(
        slots=st.sampled_from([8, 16, 32]),
        share=st.sampled_from([0.1, 0.5]),
        kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=3),
        promised=st.sampled_from([(), (("e0", 4),), (("e1", 1), ("e0", 7))]),
    )
    def start(
        self, slots: int, share: float, kinds: list[Kind], promised: tuple[tuple[str, int], ...]
    ) -> None:
        self.node = self.make_node(
            slots=slots,
            credit_share=share,
            lease_ttl_ms=TTL_MS,
            block_count_max=44,
            quotas=tuple((name, count * SLOT_BYTES_MIN) for name, count in promised),
        )
        self.owners = [Owner(f"e{i}", kind) for i, kind in enumerate(kinds)]
        self.writable: dict[int, dict[Place, tuple[int, set[int]]]] = {}
        """Connection → places it may still write to, with session and pages."""
        self.bytes: dict[Place, Content] = {}
        self.excused: set[Place] = set()
        """Cleared or distrusted."""
        self.granted_ever: set[Place] = set()
        self.next_lease = 1
        for owner in self.owners:
            self.settles(owner)

    def make_node(self, **config: Any) -> Node:
        return Node(**config)

    def generation(self, place: Place) -> int:
        return self.generations.get(place[0] // PAGES_PER_GENERATION, 1)

    @property
    def generations(self) -> dict[int, int]:
        return {slot // PAGES_PER_GENERATION: g for slot, g in self.node.raised.items()}

    def listen(self) -> None:
        """Take what the node said since the last time."""
        for owner in self.owners:
            if not owner.scheduler:
                continue
            said = self.node.sent[owner.scheduler][owner.heard :]
            owner.heard += len(said)
            for message in said:
                match message:
                    case SessionOpen():
                        owner.session = message.session
                        owner.check_columns(self.node)
                    case SessionClosed():
                        self.session_over(owner)
                    case Grant():
                        assert message.session == owner.session
                        self.granted(owner, pairs(message))

    def session_over(self, owner: Owner) -> None:
        for rank, places in enumerate(owner.unused):
            owner.old += [(rank, owner.session, place) for place in places]
            places.clear()
        owner.leases.clear()
        owner.session = 0

    def granted(self, owner: Owner, places: list[Place]) -> None:
        taken = {
            page: (connection, place)
            for connection, held in self.writable.items()
            for place, (_, pages) in held.items()
            for page in pages
        }
        for i, place in enumerate(places):
            rank = owner.writers[i % len(owner.writers)]
            assert place[1] == self.generation(place), "granted with another generation"
            assert place not in self.granted_ever, "granted with a generation of before"
            self.granted_ever.add(place)
            pages = owner.pages(rank, place)
            clash = [taken[page] for page in pages if page in taken]
            assert not clash, f"{place} is granted while it may be written by {clash[0]}"
            connection = owner.ranks[rank]
            self.writable.setdefault(connection, {})[place] = (owner.session, pages)
            taken.update(dict.fromkeys(pages, (connection, place)))
            owner.unused[rank].append(place)

    # ── attaching ────────────────────────────────────────────────────────────────────────────────

    @rule(
        who=whos,
        rank=ranks,
        what=st.sampled_from(
            ["new scheduler", "same rank", "new rank", "quiet", "no scheduler", "no rank", "dead"]
        ),
    )
    def disturbs(self, who: int, rank: int, what: str) -> None:
        """A member of an engine comes, goes or dies."""
        owner = self.owner(who)
        rank %= len(owner.shards)
        match what:
            case "new scheduler":
                self.attach_scheduler(owner)
            case "same rank" | "new rank":
                self.attach_rank(owner, rank, new_process=what == "new rank")
            case "quiet":
                self.be_quiet(owner, rank)
            case "no scheduler":
                self.end_scheduler(owner)
            case "no rank" if owner.ranks[rank]:
                gone, owner.ranks[rank] = owner.ranks[rank], 0
                self.node.end(gone)
                self.listen()
            case "dead":
                self.end_rank(owner, rank)

    @rule(who=whos)
    def settles_again(self, who: int) -> None:
        self.settles(self.owner(who))

    def settles(self, owner: Owner) -> None:
        """Everybody of an engine attaches and is quiet."""
        if not owner.scheduler:
            self.attach_scheduler(owner)
        for rank in range(len(owner.shards)):
            if not owner.ranks[rank]:
                self.attach_rank(owner, rank, new_process=False)
        for rank in range(len(owner.shards)):
            self.be_quiet(owner, rank)
        assert owner.session, "everybody is there and quiet"

    def owner(self, who: int, fits: Callable[[Owner], object] = bool) -> Owner:
        """Owner number `who`, or the next one that fits."""
        n = len(self.owners)
        turn = [self.owners[(who + i) % n] for i in range(n)]
        return next((owner for owner in turn if fits(owner)), turn[0])

    def there(self, owner: Owner) -> list[int]:
        """Blocks of the owner's model of which the node has a shard."""
        places = [(row.slot, row.generation) for row in self.node.engine.blocks()]
        return sorted({self.bytes[p][2] for p in places if self.bytes[p][0] == owner.model})

    def attach_scheduler(self, owner: Owner) -> None:
        if owner.scheduler:
            self.session_over(owner)
        owner.scheduler, owner.heard = (
            self.node.connect(owner.hellos.scheduler_hello(), owner.process),
            0,
        )
        self.listen()

    def attach_rank(self, owner: Owner, rank: int, *, new_process: bool) -> None:
        """Anew, in place of its old connection, which may not have ended; or another process, whose
        place is free only then."""
        if new_process and owner.ranks[rank]:
            claim = owner.hellos.rank_hello(rank, process="another")
            assert self.node.connect(claim, owner.process) in self.node.hangups
            self.node.end(owner.ranks[rank])
        if new_process:
            owner.starts[rank] += 1
            owner.connections[rank] = set()
        for connection in owner.connections[rank]:
            self.writable.pop(connection, None)  # its Hello says that it writes no more
        name = f"{owner.name}/{rank}/{owner.starts[rank]}"
        owner.ranks[rank] = self.node.connect(
            owner.hellos.rank_hello(rank, process=name), owner.process
        )
        owner.connections[rank] = {owner.ranks[rank]}
        self.listen()

    def be_quiet(self, owner: Owner, rank: int) -> None:
        connection = owner.ranks[rank]
        if connection and self.node.count(connection, Quiesce):
            session = self.node.last(connection, Quiesce).session
            held = self.writable.get(connection, {})
            self.writable[connection] = {p: h for p, h in held.items() if h[0] >= session}
            self.node.be_quiet(connection)
            self.listen()

    def end_scheduler(self, owner: Owner) -> None:
        if owner.scheduler:
            self.session_over(owner)
            gone, owner.scheduler = owner.scheduler, 0
            self.node.end(gone)
            self.listen()

    def end_rank(self, owner: Owner, rank: int) -> None:
        for connection in owner.connections[rank]:
            self.writable.pop(connection, None)
        gone, owner.connections[rank] = owner.connections[rank], set()
        owner.ranks[rank] = 0
        owner.starts[rank] += 1
        self.node.exit(*sorted(gone))
        self.listen()

    # ── stores ───────────────────────────────────────────────────────────────────────────────────

    @rule(who=whos, block=numbers, count=st.integers(1, 8))
    def stores(self, who: int, block: int, count: int) -> None:
        """All that write seal a run, in as many datagrams as credits allow."""
        owner = self.owner(who)
        end = block + count
        while owner.session and block < end:
            n = min(end - block, *(len(owner.unused[rank]) for rank in owner.writers))
            if not n:
                return
            for rank in owner.writers:
                places = owner.unused[rank][:n]
                del owner.unused[rank][:n]
                self.seal(owner, rank, list(range(block, block + n)), places, owner.session)
            block += n

    def seal(
        self, owner: Owner, rank: int, blocks: list[int], places: list[Place], session: int
    ) -> None:
        connection = owner.ranks[rank]
        for block, place in zip(blocks, places, strict=True):
            if self.writable.get(connection, {}).pop(place, None) is not None:
                self.bytes[place] = owner.content(rank, block)
            owner.old.append((rank, session, place))
        slots, generations = arrays(places)
        sums = b"".join(checksum(block, rank) for block in blocks)
        self.node.hear(connection, Seal(session, keys(*blocks), slots, generations, sums))
        self.listen()

    @rule(who=whos, rank=ranks, block=numbers, pick=picks)
    def one_rank_stores(self, who: int, rank: int, block: int, pick: int) -> None:
        owner = self.owner(who)
        rank %= len(owner.shards)
        unused = owner.unused[rank]
        if unused and owner.ranks[rank]:
            place = unused.pop(pick % len(unused))
            self.seal(owner, rank, [block], [place], owner.session)

    @rule(who=whos, block=numbers, pick=picks, of_now=st.booleans())
    def seals_late(self, who: int, block: int, pick: int, of_now: bool) -> None:
        """A credit that was used or voided before, as of its own session or of this one."""
        owner = self.owner(who)
        if owner.old:
            rank, session, place = owner.old[pick % len(owner.old)]
            if owner.ranks[rank]:
                held = self.writable.get(owner.ranks[rank], {})
                as_of = owner.session if of_now else session
                if place in held and held[place][0] != as_of:
                    return  # the node would rightly leave it with its writer
                self.seal(owner, rank, [block], [place], as_of)

    @rule(who=whos, other=whos, block=numbers)
    def seals_anothers_slot(self, who: int, other: int, block: int) -> None:
        owner, victim = self.owner(who), self.owner(other)
        if owner is not victim and owner.ranks[0] and victim.unused[0]:
            place = victim.unused[0][0]
            self.seal(owner, 0, [block], [place], owner.session)
            owner.old.pop()

    @rule(who=whos, rank=ranks, count=st.integers(1, 3))
    def drops(self, who: int, rank: int, count: int) -> None:
        owner = self.owner(who)
        rank %= len(owner.shards)
        places = owner.unused[rank][:count]
        connection = owner.ranks[rank]
        if places and connection:
            del owner.unused[rank][:count]
            for place in places:
                self.writable[connection].pop(place)
                owner.old.append((rank, owner.session, place))
            self.node.hear(connection, Drop(owner.session, *arrays(places)))
            self.listen()

    # ── lookups ──────────────────────────────────────────────────────────────────────────────────

    @rule(who=whos, pick=picks, count=st.integers(1, 6))
    def leases(self, who: int, pick: int, count: int) -> None:
        """A run that begins at a block of which the node has a shard, if there is one."""
        owner = self.owner(who, lambda owner: owner.session and self.there(owner))
        if not owner.scheduler:
            return
        there = self.there(owner)
        block = there[pick % len(there)] if there else pick
        lease = self.next_lease
        self.next_lease += 1
        ask = LeaseAsk(lease=lease, keys=keys(*range(block, block + count)))
        self.node.hear(owner.scheduler, ask)
        places = pairs(self.node.last(owner.scheduler, LeaseReply))
        assert owner.session or not places
        for i, place in enumerate(places):
            step, column = divmod(i, len(owner.writers))
            wanted = owner.content(owner.writers[column], block + step)
            assert place[1] == self.generation(place), "leased with another generation"
            assert self.bytes.get(place) == wanted, f"leased {self.bytes.get(place)} as {wanted}"
        if places:
            ends_ns = [self.node.now_ns + n * TTL_MS * NS_PER_MS for n in (1, LEASE_LIVES_MAX)]
            owner.leases[lease] = Lease(places, *ends_ns)
            self.excused -= set(places)
        self.listen()

    @rule(who=whos)
    def hoards(self, who: int) -> None:
        """Leases all that is there, block by block."""
        owner = self.owner(who, lambda owner: owner.session and self.there(owner))
        for pick in range(len(self.there(owner))):
            self.leases(who, pick, 1)

    @rule(who=whos, renew=st.booleans())
    def oldest_lease(self, who: int, renew: bool) -> None:
        """Is given back, or renewed."""
        owner = self.owner(who, lambda owner: owner.leases)
        if not owner.leases or not owner.scheduler:
            return
        number = min(owner.leases)
        if not renew:
            del owner.leases[number]
            self.node.hear(owner.scheduler, LeaseRelease([number]))
        elif owner.leases[number].until_ns > self.node.now_ns:
            lease = owner.leases[number]
            lease.until_ns = min(self.node.now_ns + TTL_MS * NS_PER_MS, lease.last_ns)
            self.node.hear(owner.scheduler, LeaseRenew([number]))
        self.listen()

    @rule(who=whos, pick=picks)
    def distrusts(self, who: int, pick: int) -> None:
        owner = self.owner(who, lambda owner: owner.leases)
        places = [p for lease in owner.leases.values() for p in lease.places]
        if places and owner.ranks[0]:
            place = places[pick % len(places)]
            self.excused.add(place)
            self.node.hear(owner.ranks[0], Distrust(*arrays([place])))
            self.listen()

    @rule(who=whos, block=numbers, count=st.integers(1, 9))
    def hints(self, who: int, block: int, count: int) -> None:
        owner = self.owner(who)
        if owner.session:
            asked = keys(*range(block, block + count))
            self.node.hear(owner.scheduler, Hint(request=1, keys=asked))
            assert len(self.node.last(owner.scheduler, HintReply).present) == -(-count // 8)
            self.listen()

    @rule()
    def clears(self) -> None:
        for owner in self.owners:
            for lease in owner.leases.values():
                self.excused.update(lease.places)
        self.node.step(Clear(None, None))
        self.listen()

    @rule(ms=st.sampled_from([0, 1, 30, 60]))
    def time_passes(self, ms: int) -> None:
        self.node.tick(ms)
        for owner in self.owners:
            owner.leases = {
                n: lease for n, lease in owner.leases.items() if lease.until_ns > self.node.now_ns
            }
        self.listen()

    # ── always ───────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def promises_are_kept(self) -> None:
        generations = self.generations
        for row in self.node.engine.blocks():
            if row.slot >= 0:
                written = self.bytes.get((row.slot, row.generation))
                assert written is not None, f"{row} is published and was never written"
                assert row.key == keys(written[2])[:4].hex(), f"{row} is published, was {written}"
        for owner in self.owners:
            for lease in owner.leases.values():
                for place in lease.places:
                    now = generations.get(place[0] // PAGES_PER_GENERATION, 1)
                    assert now == place[1] or place in self.excused, f"{place} went under a lease"

    def teardown(self) -> None:
        if not hasattr(self, "owners"):
            return
        for owner in self.owners:
            self.end_scheduler(owner)
            for rank in range(len(owner.shards)):
                self.end_rank(owner, rank)
        left = set(self.writable)
        self.node.exit(*sorted(left))
        row, dram = self.node.engine.nodes()[0], self.node.engine.tiers()[0]
        assert (dram.slots_granted, dram.slots_quarantined, dram.slots_leased) == (0, 0, 0)
        assert (row.connections, row.owners, row.leases) == (0, 0, 0)


def test_any_order_of_events_keeps_the_promises() -> None:
    verify_machine(Machine, examples=amount(50, nightly=400), steps=50)


def test_pins_without_bounds_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pins, "fitting", lambda _, __, words, shards: len(words) // shards)
    monkeypatch.setattr(Pins, "room", lambda *_: 1 << 40)
    monkeypatch.setattr(Pins, "writable", lambda *_: 1 << 40)
    with pytest.raises(AssertionError, match=r"is pinned than the share|more than its part"):
        verify_machine(Machine, examples=3_000, steps=50, broken_seed=5)


@pytest.mark.parametrize("broken", ENGINES, ids=lambda patch: patch.__name__)
def test_a_broken_engine_is_noticed(broken: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    # The accounts of a broken engine may be in order; it is the promises that must notice.
    monkeypatch.setattr("tests.kit.engine_check.check_engine", lambda _: None)
    with pytest.raises(AssertionError, match=r"granted w|went under|leased|published"):
        verify_machine(Machine, examples=3_000, steps=50, broken_seed=5)
