"""RankCore driven through sessions, plans, copies, fences and broken sockets at once."""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from kvstore.client.core.plan import LoadJob, StoreJob
from kvstore.client.core.rank import Copy, RankCore
from kvstore.ports import CopyEnd, CopyWay
from kvstore.wire.messages import (
    Distrust,
    Drop,
    Message,
    Quiesce,
    Quiet,
    Seal,
    Verified,
    generations_array,
    slots_array,
)
from kvstore.wire.space import ShardColumn
from tests.amounts import amount
from tests.kit.cores import has_work, reading
from tests.steps import CountedMachine
from tests.unit.client.rank_kit import (
    CONFIG,
    DAMAGED,
    SHARDS,
    VOID,
    WELCOME,
    load,
    plan,
    run,
    store,
)

SELDOM = st.sampled_from([False, False, False, True])


class RankMachine(CountedMachine):
    """Truth: which jobs are owed an end, which copies run, which slots were acknowledged."""

    @initialize(width=st.sampled_from([1, 2, 5]))
    def start(self, width: int) -> None:
        self.width = width
        self.core = RankCore(CONFIG, copies_max=width)
        self.node_session = 0  # last session the node asked for, on this connection
        self.quiet: int | None = None
        self.asked = self.role = (0, False)  # column and whether it writes
        self.next_session = 1
        self.next_number = 1
        self.attached = False
        self.copies: list[Copy] = []
        self.owed_loads: dict[int, LoadJob] = {}
        self.owed_stores: dict[int, StoreJob] = {}
        self.compared: set[int] = set()
        self.loaded: set[int] = set()  # engine blocks
        self.copied: dict[int, bytes] = {}  # slot → checksum of a finished store
        self.accepted: dict[int, set[int]] = {}  # session → slots of stores that were accepted
        self.acknowledged: set[tuple[int, int]] = set()
        self.spoiled: set[int] = set()  # slots whose source may be overwritten

    @precondition(lambda self: not self.attached and not self.copies)
    @rule()
    def connect(self) -> None:
        self.core.hello()
        self.core.connected(WELCOME)
        self.attached, self.quiet, self.node_session = True, None, 0
        assert self.core.next_copy() is None, "a job outlived its mapping"

    @precondition(lambda self: not self.attached and not self.copies)
    @rule(column=st.integers(0, SHARDS - 1), replica=SELDOM)
    def open_session(self, column: int, replica: bool) -> None:
        self.connect()
        self.quiesce(column, replica)

    @precondition(lambda self: self.attached)
    @rule()
    def disconnect(self) -> None:
        self.core.disconnected()
        self.attached = False
        assert self.core.take_outbox() == []

    @precondition(lambda self: self.attached)
    @rule(column=st.integers(0, SHARDS - 1), replica=SELDOM)
    def quiesce(self, column: int, replica: bool) -> None:
        self.node_session, self.quiet = self.next_session, None
        self.next_session += 1
        self.asked = (column, not replica)
        self.core.received(
            Quiesce(self.node_session, columns=(ShardColumn(column, writes=not replica),))
        )

    @rule(count=st.integers(0, 4), stale=SELDOM, checked=st.booleans())
    def submit_load(self, count: int, stale: bool, checked: bool) -> None:
        n = self._number(count)
        session = max(self._session() - stale, 0)
        sums = b"s" * (count * SHARDS * 16) if checked else b""
        job = load(session, n, count, lease=n, checksums=sums)
        self.owed_loads[n] = job
        self.core.submit(plan(job))

    @rule(count=st.integers(0, 4), stale=SELDOM)
    def submit_store(self, count: int, stale: bool) -> None:
        n = self._number(count)
        job = store(max(self._session() - stale, 0), n, count, job=n)
        self.owed_stores[n] = job
        if self.attached and self.quiet is not None and job.session == self.quiet:
            column, writes = self.role
            slots = slots_array(job.slots).reshape(count, SHARDS)[:, column].tolist()
            self.accepted.setdefault(job.session, set()).update(slots if writes else ())
        self.core.submit(plan(job))

    def _session(self) -> int:
        return self.core._session or self.next_session

    def _number(self, count: int) -> int:
        number = self.next_number
        self.next_number += max(count, 1)
        return number

    @rule()
    def begin(self) -> None:
        copy = self.core.next_copy()
        if not self.copies:
            assert (copy is not None) == has_work(self.core)
        if copy is not None:
            self.copies.append(copy)
            assert len(self.copies) <= self.width
            column, writes = self.role
            assert copy.slot // 16 % SHARDS == column, "another rank's slot"
            assert writes or copy.way is CopyWay.LOAD, "a replica stores"

    @precondition(lambda self: self.copies)
    @rule(
        kind=st.sampled_from(["copied", "copied", "copied", "void", "damaged"]),
        which=st.integers(0, 4),
    )
    def end(self, kind: str, which: int) -> None:
        copy = self.copies.pop(which % len(self.copies))
        end = CopyEnd(0, copy.checksum or int(copy.slot).to_bytes(16, "big"), duration_ns=1)
        if kind == "damaged" and copy.checksum is not None:
            end = DAMAGED
        elif kind != "copied":
            end = VOID
        elif copy.way is CopyWay.STORE:
            self.copied[copy.slot] = end.checksum
        else:
            self.loaded.add(copy.block_id)
            if copy.checksum is not None:
                self.compared.add(copy.slot)
        self.core.finished(copy, end)

    @rule(give_up=SELDOM, data=st.data())
    def fence(self, give_up: bool, data: st.DataObject) -> None:
        blocks = data.draw(st.frozensets(st.integers(1, self.next_number), max_size=3))
        if give_up:
            self.core.give_up(blocks)
            in_flight = {c.block_id: c.slot for c in self.copies if c.way is CopyWay.STORE}
            self.spoiled |= {slot for block, slot in in_flight.items() if block in blocks}
            jobs = [set(j.block_ids) for j in self.owed_stores.values()]
            owners = [job for job in jobs if not job.isdisjoint(in_flight)]
            rest = blocks.difference(*owners)
            assert not self.core.fence(rest)
        else:
            waits = self.core.fence(blocks)
            assert waits == (not blocks.isdisjoint(reading(self.core)))

    @rule()
    def read_outbox(self) -> None:
        for message in self.core.take_outbox():
            self._check_message(message)

    def _check_message(self, message: Message) -> None:
        assert self.attached, "nothing is said to nobody"
        match message:
            case Quiet(session):
                assert session == self.node_session
                assert not self.copies, "it is quiet while a copy runs"
                self.quiet, self.role = session, self.asked
            case Seal() | Drop():
                assert message.session == self.quiet, "a session that is over"
                slots = slots_array(message.slots).tolist()
                words = generations_array(message.generations).tolist()
                assert words == [slot + 1 for slot in slots]
                for slot in slots:
                    assert slot in self.accepted[message.session]
                    assert (message.session, slot) not in self.acknowledged
                    self.acknowledged.add((message.session, slot))
                    good = slot in self.copied and slot not in self.spoiled
                    assert good == isinstance(message, Seal)
                if isinstance(message, Seal):
                    assert message.checksums == b"".join(self.copied[s] for s in slots)
            case Distrust():
                pass
            case Verified():
                slots = slots_array(message.slots).tolist()
                assert set(slots) <= self.compared, "nobody looked at it"
                words = generations_array(message.generations).tolist()
                assert words == [slot + 1 for slot in slots]
            case _:
                raise AssertionError(message)

    @rule()
    def read_report(self) -> None:
        report = self.core.take_report()
        for result in report.loads:
            job = self.owed_loads.pop(result.lease)  # KeyError: reported twice
            assert job.block_ids[result.loaded_blocks :] == result.failed_block_ids
            assert self.loaded.issuperset(job.block_ids[: result.loaded_blocks])
            assert bool(result.reason) == bool(result.failed_block_ids)
            self._not_in_flight(job)
        for number in report.store_jobs_done:
            self._not_in_flight(self.owed_stores.pop(number))

    def _not_in_flight(self, job: LoadJob | StoreJob) -> None:
        way = CopyWay.LOAD if isinstance(job, LoadJob) else CopyWay.STORE
        running = {copy.block_id for copy in self.copies if copy.way is way}
        assert running.isdisjoint(job.block_ids), "reported while a copy runs"

    @invariant()
    def pending_blocks_are_owed(self) -> None:
        if hasattr(self, "core"):
            self.read_outbox()
            left = reading(self.core)
            assert left.issuperset(c.block_id for c in self.copies if c.way is CopyWay.STORE)
            self.read_report()
            assert left <= {b for job in self.owed_stores.values() for b in job.block_ids}

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        while self.copies:
            self.end("copied", 0)
        run(self.core, lambda _: VOID)
        self.read_outbox()
        self.read_report()
        assert not self.owed_loads, "a load never ended"
        assert not self.owed_stores, "a store never ended"
        assert not reading(self.core)
        if self.attached and self.quiet:
            owed = {(self.quiet, slot) for slot in self.accepted.get(self.quiet, ())}
            assert owed <= self.acknowledged, "a credit of the open session was never answered"


TestRankMachine = RankMachine.TestCase
TestRankMachine.settings = settings(max_examples=amount(150, nightly=3000), stateful_step_count=40)
