"""A prefill node and a decode node, both engines real, and all that is between them held in queues.

    p: PushNode          words: Pushed, PushOver ──▶          d: PushNode, with a landing slab
                         ◀── PeerAsked: PushGrant, PushRevoke
                         writes: WritePush, until `write` ends them

What lies in the landing slab is known page by page: a write that was begun may store its bytes at
any moment until it has ended, or d's transfer worker is dead, and `check` looks whether an extent
that it may reach is somebody else's by then. Copies are verified as a checksum would.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from kvstore.engine.events import (
    AnswerPeer,
    AskPush,
    Command,
    Event,
    Land,
    Landed,
    LandingUp,
    PeerAsked,
    PeerGone,
    RecycleTransferWorker,
    RevokePush,
    WritePush,
    Written,
)
from kvstore.types import SLOT_BYTES_MIN
from kvstore.wire.messages import PushCancel, PushClose, PushEnd, PushExpect, PushOpen
from kvstore.wire.peers import Pushed, PushGrant, PushOver, PushRevoke
from tests.unit.engine.disk import SPACE
from tests.unit.engine.harness import HALVES, WHOLE, Node, Peer, checksum, key, keys, number_of

SLAB_SLOTS = 4
LANDING_SLOTS = 8
Bytes = tuple[int, str]
"""Bytes of a block in the landing slab: number of the key, and its tenant."""


class PushNode(Node):
    """A node whose commands about pushes are kept."""

    def __init__(self, name: str, *, slots: int = 32, landing: int = 0, **config: Any) -> None:
        self.name = name
        self.commands: deque[Command] = deque()
        self.said: list[Command] = []
        """All commands."""
        super().__init__(
            slots=slots,
            slab_slots=SLAB_SLOTS,
            node=name,
            landing_bytes=landing * SLOT_BYTES_MIN,
            **config,
        )

    def step(self, *events: Event) -> list[Command]:
        commands = super().step(*events)
        self.said += commands
        kinds = (AskPush, RevokePush, Land, RecycleTransferWorker, WritePush, AnswerPeer)
        self.commands.extend(each for each in commands if isinstance(each, kinds))
        return commands


def push_grant(grant: int, wanted: bytes, **more: Any) -> PushGrant:
    """Of a node that has room for so many keys."""
    extents = bytes(4 * (len(wanted) // 32))
    its = {"epoch": 1, "transfer": "r", "tenant": "t", "space": SPACE, "deadline_ms": 5000, **more}
    return PushGrant(grant=grant, keys=wanted, extents=extents, block_bytes=1, **its)


class Flight(NamedTuple):
    """A write that has not ended."""

    job: int
    grant: int
    epoch: int
    pages: list[int]
    blocks: list[Bytes]


class PushPair:
    """`pump` lets all pass in order; or move `to_p`, `to_d` and `flights` one by one."""

    def __init__(
        self, *, p_ranks: int = 1, d_ranks: int = 1, landing: int = LANDING_SLOTS, **config: Any
    ) -> None:
        shards = {1: (WHOLE,), 2: HALVES}
        self.p = PushNode("p", **config)
        self.d = PushNode("d", landing=landing, **config)
        self.prefill = Peer(self.p, shards=shards[p_ranks])
        self.decode = Peer(self.d, shards=shards[d_ranks])
        self.to_p: deque[Event] = deque()
        self.to_d: deque[Event] = deque()
        self.lands: deque[Land] = deque()
        self.flights: dict[int, Flight] = {}
        self.landing: dict[int, Bytes] = {}
        """Page → block that was written there last."""
        self.extents: dict[int, tuple[int, list[int], bytes]] = {}
        """Grant → epoch, pages, keys, as p was told."""
        self.stray: list[Flight] = []
        """Writes that failed: they may store bytes as long as d's transfer worker lives."""
        self.recycled: list[str] = []
        self.epochs = 0
        self.restart_transfer_worker()

    # ── what happens ─────────────────────────────────────────────────────────────────────────────

    def restart_transfer_worker(self) -> None:
        """d's transfer worker is dead, and another one is there."""
        self.stray.clear()
        self.flights_of_the_dead = set(self.flights)
        self.d.step(LandingUp(0))
        self.epochs += 1
        self.d.step(LandingUp(self.epochs))
        self.sort()

    def open(self, transfer: str = "r", node: str = "") -> None:
        self.p.hear(self.prefill.scheduler, PushOpen(transfer, node))
        self.sort()

    def close(self, transfer: str = "r", reason: str = "") -> None:
        self.p.hear(self.prefill.scheduler, PushClose(transfer, reason))
        self.sort()

    def expect(
        self,
        *numbers: int,
        transfer: str = "r",
        node: str = "p",
        ms: int = 5000,
        first_block: int = 0,
    ) -> None:
        expect = PushExpect(transfer, node, keys(*numbers), ms, first_block=first_block)
        self.d.hear(self.decode.scheduler, expect)
        self.sort()

    def cancel(self, transfer: str = "r") -> None:
        self.d.hear(self.decode.scheduler, PushCancel(transfer))
        self.sort()

    def store(self, *numbers: int) -> None:
        self.prefill.store(*numbers)
        self.sort()

    def tick(self, ms: float = 0) -> None:
        for node in dict.fromkeys((self.p, self.d)):
            node.tick(ms)
        self.sort()

    def pass_time(self, ms: float) -> None:
        """As on a machine that goes on meanwhile."""
        for _ in range(int(ms // 1000)):
            self.tick(1000)
        self.tick(ms % 1000)

    @property
    def ends(self) -> list[PushEnd]:
        return [m for m in self.d.sent[self.decode.scheduler] if isinstance(m, PushEnd)]

    # ── what is between them ─────────────────────────────────────────────────────────────────────

    def sort(self) -> None:
        """Commands of both nodes to where they are waited for."""
        while self.p.commands:
            self._of_p(self.p.commands.popleft())
        while self.d.commands:
            self._of_d(self.d.commands.popleft())

    def _of_p(self, command: Command) -> None:
        match command:
            case WritePush():
                epoch, pages, its = self.extents[command.its.grant]
                count = len(command.slots) // len(command.block_bytes)
                at = slice(command.first, command.first + count)
                numbers = [number_of(its[n * 32 : n * 32 + 32]) for n in range(at.start, at.stop)]
                blocks = [(number, "t") for number in numbers]
                flight = Flight(command.job, command.its.grant, epoch, pages[at], blocks)
                self.flights[command.job] = flight
            case AnswerPeer(its=Pushed() | PushOver() as word):
                self.to_d.append(word)

    def _of_d(self, command: Command) -> None:
        match command:
            case AskPush(its=its):
                pages = np.frombuffer(its.extents, "<u4").tolist()
                self._check_granted(pages)
                self.extents[its.grant] = (its.epoch, pages, its.keys)
                self.to_p.append(PeerAsked(1, "d", its))
            case RevokePush(grant=grant):
                self.to_p.append(PeerAsked(1, "d", PushRevoke(grant)))
            case Land():
                self.lands.append(command)
            case RecycleTransferWorker(reason=reason):
                self.recycled.append(reason)
                self.restart_transfer_worker()

    def _check_granted(self, pages: list[int]) -> None:
        """Nobody may write to what is granted anew."""
        for flight in (*self.flights.values(), *self.stray):
            if flight.job not in self.flights_of_the_dead:
                assert not set(pages) & set(flight.pages), "granted while it may be written to"

    def hear_p(self) -> None:
        """The next word for p arrives."""
        self.p.step(self.to_p.popleft())
        self.sort()

    def hear_d(self) -> None:
        self.d.step(self.to_d.popleft())
        self.sort()

    def write(self, job: int, trouble: str = "") -> None:
        """A write ends; the bytes of one that fails may come later."""
        flight = self.flights.pop(job)
        if trouble:
            self.stray.append(flight)
        elif job not in self.flights_of_the_dead:
            self.landing.update(zip(flight.pages, flight.blocks, strict=True))
        self.p.step(Written(job, trouble))
        self.sort()

    def land(self, good: bool | None = None) -> None:
        """A copy out of the landing slab ends: good where the bytes are the right ones."""
        command = self.lands.popleft()
        pages = np.frombuffer(command.extents, "<u4").tolist()
        flags, sums = [], b""
        for at, page in enumerate(pages):
            number = number_of(command.keys[at * 32 : at * 32 + 32])
            its = self.landing.get(page) == (number, command.targets[0].tenant)
            flags.append(its if good is None else good)
            sums += b"".join(checksum(number, rank) for rank in range(len(command.targets)))
        self.d.step(Landed(command.job, bytes(flags), sums))
        self.sort()

    def clear_shard(self, number: int, rank: int) -> tuple[int, int]:
        """One shard of a block leaves p, as its rank found other bytes there. Returns its place."""
        rows = [row for row in self.p.engine.blocks() if row.key == key(number).hex()[:8]]
        row = sorted(rows, key=lambda row: row.shard)[rank]
        self.prefill.distrust((row.slot, row.generation), rank=rank)
        self.sort()
        return row.slot, row.generation

    def prefill_here(self) -> None:
        """The prefill is on d, too."""
        self.prefill, self.p = Peer(self.d, "prefill"), self.d

    def lose_session(self) -> None:
        """d's session at p ends."""
        self.to_p.clear()
        self.to_d.clear()
        self.p.step(PeerGone(1))
        for grant, (epoch, _, _) in list(self.extents.items()):
            self.d.step(PushOver(grant, epoch, "node p has hung up", is_quiet=False))
        self.sort()

    def pump(self, after_ms: float | None = None) -> None:
        """All that can happen without time passing happens, in order; or after such a tick."""
        if after_ms is not None:
            self.tick(after_ms)
        nodes = self.p, self.d
        while self.to_p or self.to_d or self.flights or self.lands or any(map(_is_behind, nodes)):
            if any(map(_is_behind, nodes)):
                self.tick()  # as the loop does
            elif self.to_p:
                self.hear_p()
            elif self.flights:
                self.write(next(iter(self.flights)))
            elif self.to_d:
                self.hear_d()
            else:
                self.land()

    def pump_until_it_lands(self) -> None:
        """Until a copy out of the landing slab is asked for."""
        while not self.lands:
            if self.to_p:
                self.hear_p()
            elif self.flights:
                self.write(next(iter(self.flights)))
            else:
                self.hear_d()

    def at_rest(self) -> None:
        """Nothing is left of any push on either side."""
        grants, pushes = self.d.engine.grants, self.p.engine._pushes
        slab = grants._slab
        assert slab.free_pages == slab.page_count, "extents are held"
        assert not grants._grants
        assert not self.d.engine._awaited
        assert not pushes.named
        assert not pushes._writes


def opened(transfer: str = "r", **config: Any) -> PushPair:
    """A pair between which a transfer is open."""
    pair = PushPair(**config)
    pair.open(transfer)
    return pair


def _is_behind(node: PushNode) -> bool:
    return node.engine.is_behind
