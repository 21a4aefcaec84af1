"""What one node process of the world has to do with other nodes.

Real: `peers.fetcher`, `peers.peer_session`, `peers.feed`'s links. Simulated: the
loop that they run on (`loop`), gRPC (`net`), the transfer worker (`transfer_worker`), the way to
the index (`index`).

Checked all the time: when a fetch has ended nothing writes to its slots any more (I4); what counts
as good is, byte by byte, the block of its tenant, shard and key, and was in the peer's slot under
the generation that it was served with when it had been read, of a process that was alive (I5); a
peer that failed is left alone for a while (I8); each question and each fetch is answered once.

Does not cover: the engine (`node`).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from kvstore.engine.events import (
    AnswerPeer,
    AskPush,
    Event,
    Fetch,
    Fetched,
    Land,
    Landed,
    LandingUp,
    Locate,
    Located,
    OffersUntold,
    PeerCommand,
    PeerEvent,
    PushCommand,
    RecycleTransferWorker,
    RevokePush,
    WritePush,
    Written,
)
from kvstore.engine.moves.fetches import AVOID_FIRST_NS
from kvstore.peers.feed import FeedLink, FeedLog, FeedSource
from kvstore.types import KEY_BYTES, PAGE_BYTES, Incarnation, SlotId, SpaceId, Tier
from kvstore.units import NS_PER_S
from kvstore.wire.feed import BlocksChanged, Hello, Removed, Stored
from kvstore.wire.peers import Pushed, PushGrant, PushOver, PushWord, ServeAnswer, encode
from tests.kit.peer_parts import PeerParts
from tests.sim.world.clocks import SimClock
from tests.sim.world.cluster import SimCluster
from tests.sim.world.copies import Violation
from tests.sim.world.ground import Machine
from tests.sim.world.index import SimIndexClient
from tests.sim.world.loop import SimLoop
from tests.sim.world.net import REPEATED, SimChannel
from tests.sim.world.parts import SimMemory
from tests.sim.world.transfer_worker import (
    LINGERS,
    NEVER_ENDS,
    STOPS_HALF_WAY,
    WRONG_BYTES,
    SimTransferWorker,
)

_DAMAGES: Final = (
    *(STOPS_HALF_WAY, WRONG_BYTES, LINGERS),
    *("byte flipped", "arena scribbled", "transfer worker dies", "node killed", "warm kill"),
)
"""Faults after which bytes in a landing slab may be others."""
_LOSSES: Final = (
    *(STOPS_HALF_WAY, NEVER_ENDS, LINGERS, "transfer worker dies", "connection lost", "partition"),
    *("partition one way", "node killed", "node stopped", "node upgraded", "machine suspended"),
    *("node restarts in a step", "warm kill", "warm upgrade", "addresses swapped"),
)
"""Faults after which nobody knows whether a peer still writes."""


STRAY: Final = "push word again"
"""Of itself, where the network says words twice."""
_STRAY_SHARE: Final = 0.1
_CALM_NS: Final = 8 * NS_PER_S
"""Longer than any fault between nodes lasts."""
_TOLD_NS: Final = 3 * NS_PER_S


class Pushing(NamedTuple):
    """Slots that are written from, [n][S], and their generations before that."""

    slots: list[int]
    generations: list[int]


class SimPeers(PeerParts):
    """From the start of a node process to its death."""

    def __init__(
        self,
        machine: Machine,
        cluster: SimCluster,
        incarnation: int,
        memory: SimMemory,
        offered: Callable[[int], tuple[list[Stored], int]],
    ) -> None:
        self.machine, self.cluster, self.world = machine, cluster, machine.world
        self.name, self.incarnation = machine.name, incarnation
        self.memory, self._offered = memory, offered
        self.random = machine.random
        # Chance of its own: other events of a world stay as they are.
        self._chance = random.Random(f"words to {self.name} {incarnation} of {self.world.seed}")
        self.loop = SimLoop(lambda: machine.now_ns)
        self.has_lied = False
        self.served: dict[int, int] = {}
        """Slot → generation, as served last."""
        self._events: deque[PeerEvent] = deque()
        self._locates: set[int] = set()
        self._fetches: dict[int, Fetch] = {}
        self._lands: dict[int, Land] = {}
        self._left_alone: dict[str, int] = {}
        """Peers that failed, and until when nothing is asked of them: from the step after the one
        that heard of it, which may have decided before it came to that."""
        self._ended: list[tuple[str, bool, bool]] = []
        """(node, brought something, failed) of fetches that the node has not heard of."""
        self._heard: list[tuple[str, bool, bool]] = []
        self._heard_ns = 0
        self.transfer_worker = SimTransferWorker(self, cluster.net, cluster.transfer_workers)
        super().__init__(
            self.name,
            incarnation,
            self.post,
            transfer_worker=self.transfer_worker,
            memory=memory.bytes,
            clock=SimClock(machine),
            jitter=lambda: 0.5,
            draw_epoch=lambda: self.random.randint(1, 1 << 62),
            dial=self._dial_peer,
        )
        self.fetcher.index = SimIndexClient(self, cluster.net, cluster.replicas)  # type: ignore[assignment]
        self._make_pushes()
        self.log, self.links = self._make_links()

    def _make_links(self) -> tuple[FeedLog, list[FeedLink]]:
        hello = Hello(self.name, Incarnation(self.incarnation), 0, 0, self.machine.address)
        source = FeedSource(hello, None)
        links = [
            FeedLink(replica.address, source, dial=self._dial, jitter=self.random.random)
            for replica in self.cluster.replicas
        ]
        return source.log, links

    def _make_pushes(self) -> None:
        self._revoked: dict[int, int] = {}
        """Grants that were taken back, and when."""
        self._over: set[int] = set()
        """Grants whose last word has come."""
        self._losses, self._loss_ns = 0, -_CALM_NS
        """Faults between nodes so far; when one, or a session that was lost, was seen last."""
        self._granted: dict[int, tuple[str, int, int]] = {}
        """Page of the landing slab → node, epoch and grant that it was granted to last."""
        self._asked: dict[int, PushGrant] = {}
        """All grants."""
        self._held: dict[int, int] = {}
        """Page of the landing slab → grant by which a peer may write to it now."""
        self.pushing: dict[int, Pushing] = {}
        """Writes that have not ended, by job."""
        self._pushed: dict[tuple[int, int, int], Pushing] = {}
        """Writes by peer, grant, and place of the first block."""

    @property
    def now_ns(self) -> int:
        return self.machine.now_ns

    def _dial(self, address: str, _: object) -> Any:
        return SimChannel(self.cluster.net, self.name, self.loop, address)

    def _dial_peer(self, _: str, address: str, credentials: object) -> Any:
        return self._dial(address, credentials)

    def start(self) -> None:
        """Listen, feed, follow the members."""
        handlers = {"Session": (self.block_server.session, bytes, encode)}
        self.cluster.net.listen(self.machine.address, self.name, self.loop, handlers)
        self.loop.call_soon(self.fetcher.start)
        self.transfer_worker.changed = self.carrier.transfer_worker_changed
        self.loop.call_soon(self.carrier.transfer_worker_changed)
        for link in self.links:
            self.loop.create_task(link.run(self._offered))

    def end(self) -> None:
        """kill -9, the transfer worker too."""
        self.cluster.net.died(self.loop)
        self.cluster.transfer_workers.pop(self.transfer_worker.descriptor, None)
        self.loop.end()

    @property
    def is_at_rest(self) -> bool:
        """Nothing is asked and nothing under way."""
        return not (self._locates or self._fetches or self._lands or self._events)

    # ── of the node's loop ───────────────────────────────────────────────────────────────────────

    def read(self) -> list[Event]:
        """What waits for the engine."""
        for node, brought, failed in self._heard:
            if brought:
                self._left_alone.pop(node, None)
            elif failed and self.now_ns >= self._left_alone.get(node, 0):
                self._left_alone[node] = self._heard_ns + AVOID_FIRST_NS
        self._heard, self._ended, self._heard_ns = self._ended, [], self.now_ns
        self._check_revoked()
        taken: list[Event] = list(self._events)
        self._events.clear()
        if REPEATED in self.world.enabled:
            self._stray(taken)
        return taken

    def _stray(self, events: list[Event]) -> None:
        """Reports of pushes come in another order, and old words again, those of a process that is
        dead too."""
        said, source = self.cluster.said_of_pushes[self.name], self._chance
        at = [place for place, each in enumerate(events) if isinstance(each, Pushed)]
        for place, each in zip(at, source.sample([events[n] for n in at], len(at)), strict=True):
            events[place] = each
        said.extend(each for each in events if isinstance(each, Pushed | PushOver))
        if said and source.random() < _STRAY_SHARE:
            self.world.faults[STRAY] += 1
            word, given = source.choice(said), sorted(vars(self.carrier)["_given"])
            if given and word.epoch != self.carrier.epoch:
                # Each process counts from 1: the grant had any number.
                word = msgspec.structs.replace(word, grant=source.choice(given))
            events.insert(source.randint(0, len(events)), word)

    def take(self, command: PeerCommand | BlocksChanged | OffersUntold) -> None:
        """Hand it over, as the exchange and the feeder do."""
        match command:
            case Stored() | Removed() | OffersUntold():
                self.log.append(command)
            case _:
                self._note(command)
                self.loop.call_soon(self.carry_out, command)

    def _note(self, command: PeerCommand) -> None:
        match command:
            case Locate():
                self._locates.add(command.locate)
            case Fetch():
                self._begin_fetch(command)
            case AnswerPeer(peer, Pushed() | PushOver() as word):
                self._check_pushed(peer, word)
            case AnswerPeer(_, ServeAnswer() as answer):
                slots = np.frombuffer(answer.slots, "<u4").tolist()
                self.served.update(zip(slots, self._generations(slots), strict=True))
            case WritePush():
                slots = command.slots.tolist()
                write = self.pushing[command.job] = Pushing(slots, self._generations(slots))
                self._pushed[command.peer, command.its.grant, command.first] = write
            case AskPush() | RevokePush() | Land() | RecycleTransferWorker():
                self._check_push(command)

    def lie(self, tier: Tier, tenant: str, space: SpaceId, keys: bytes) -> None:
        """Say that these are here."""
        self.has_lied = True
        self.log.append(Stored(tenant, space, tier, keys))

    def lose(self) -> None:
        """What replicas were told is not all there is."""
        self.log.append(OffersUntold())

    # ── of its own loop ──────────────────────────────────────────────────────────────────────────

    def post(self, event: PeerEvent) -> None:
        """As the exchange, with the oracle's eye on it."""
        if self.loop.is_dead:
            return
        match event:
            case Located():
                self._locates.remove(event.locate)
            case Fetched():
                self._check_fetched(self._fetches.pop(event.job), event)
            case Written(job=job):
                del self.pushing[job]
            case Pushed(grant=grant, epoch=epoch, first=first, shards=shards) if shards:
                if epoch == self.carrier.epoch:
                    count = len(event.checksums) // (16 * len(shards))
                    self._let_go(_pages(self._asked[grant], first, first + count), grant)
            case LandingUp():
                self._held.clear()
            case PushOver(grant=grant, epoch=epoch, is_quiet=is_quiet):
                if not is_quiet:
                    self._loss_ns = self.now_ns
                elif epoch == self.carrier.epoch:
                    self._check_quiet(grant)
                    self._let_go(_pages(self._asked[grant]), grant)
                self._revoked.pop(grant, None)
                self._over.add(grant)
            case Landed():
                self._check_landed(self._lands.pop(event.job), event)
            case _:
                pass
        self._events.append(event)

    def _check_push(self, command: PushCommand) -> None:
        """What is granted nobody else may write to (I4)."""
        match command:
            case AskPush():
                pages, its = _pages(command.its), command.its
                if pages & self.transfer_worker.written_to():
                    raise Violation(f"{self.name} grants what may still be written to")
                if pages & self._held.keys():
                    raise Violation(f"{self.name} grants what another grant has")
                whose = command.node, its.epoch, its.grant
                self._granted.update(dict.fromkeys(pages, whose))
                self._asked[its.grant] = its
                if its.epoch == self.carrier.epoch:
                    self._held.update(dict.fromkeys(pages, its.grant))
            case RevokePush(grant=grant) if grant not in self._over:
                self._revoked[grant] = self.now_ns
            case Land():
                self._lands[command.job] = command
                for page in np.frombuffer(command.extents, "<u4").tolist():
                    if self._granted[page][1] != self.carrier.epoch:
                        raise Violation(f"{self.name} takes blocks of an epoch before")
            case RecycleTransferWorker():
                if self._loss_ns < 0 and not self._excuse(_LOSSES):
                    raise Violation(f"{self.name} kills its transfer worker, and nobody failed")

    def _let_go(self, pages: set[int], grant: int) -> None:
        for page in pages:
            if self._held.get(page) == grant:
                del self._held[page]

    def _check_quiet(self, grant: int) -> None:
        """Nobody writes to what is not written to by the last word of its grant (I4)."""
        mine = {page for page, its in self._granted.items() if its[2] == grant}
        if mine & self.transfer_worker.written_to():
            raise Violation(f"{self.name} is told that grant {grant} is quiet, which is written to")

    def _check_pushed(self, peer: int, word: PushWord) -> None:
        """What is said to be pushed was the same block, in all shards, after its write (I5)."""
        if isinstance(word, Pushed) and word.checksums:
            write = self._pushed[peer, word.grant, word.first]
            count = len(word.checksums) // 16
            if self._generations(write.slots[:count]) != write.generations[:count]:
                raise Violation(f"{self.name} says that it pushed a block that had left")

    def _generations(self, slots: list[int]) -> list[int]:
        return [self.memory.generation(SlotId(slot)) for slot in slots]

    def tell_others_grants(self, other: SimPeers) -> bool:
        """To another node: the last words about what it has granted to a third one. False: it has
        no session here, or granted nothing."""
        peers = self.block_server.sessions.items()
        sessions = [number for number, peer in peers if peer.node == other.name]
        given = [each.command for each in vars(other.carrier)["_given"].values()]
        grants = [each for each in given if each.node != self.name]
        for session in sessions:
            for each in grants:
                over = PushOver(each.its.grant, each.its.epoch, "", is_quiet=True)
                # Not by `answer`: an honest node would not send it.
                self.block_server.sessions[session].answers.put_nowait(over)
        return bool(sessions and grants)

    def _check_revoked(self) -> None:
        """Where nobody fails, a grant that is taken back has its last word soon."""
        losses = sum(self.world.faults[name] for name in _LOSSES)
        if losses != self._losses:
            self._losses, self._loss_ns = losses, self.now_ns
        # Connections break when a suspension ends, which may be long after it began.
        awake_ns = max(machine.suspended_until_ns for machine in self.world.machines)
        if awake_ns:
            ago_ns = max(0, self.world.now_ns - awake_ns)
            self._loss_ns = max(self._loss_ns, self.now_ns - ago_ns)
        for grant, since_ns in self._revoked.items():
            is_calm = since_ns > self._loss_ns + _CALM_NS
            if is_calm and self.now_ns > since_ns + _TOLD_NS > self._loss_ns + _TOLD_NS:
                raise Violation(f"{self.name}: nobody answers that grant {grant} is taken back")

    def _excuse(self, faults: Iterable[str]) -> bool:
        """Whether one of these happened to anybody."""
        return any(self.world.faults[name] for name in faults)

    def check_write(self, writer: str, page: int) -> None:
        """A peer begins to write to an extent."""
        if self._granted.get(page, ("", 0, 0))[0] != writer:
            raise Violation(f"{writer} writes to what {self.name} granted to somebody else")

    def _check_landed(self, command: Land, event: Landed) -> None:
        """What counts is the block, byte by byte (I5)."""
        self.world.pushed_blocks += sum(event.good)
        if not all(event.good) and not self._excuse(_DAMAGES):
            raise Violation(f"{self.name}: pushed blocks are damaged, and nobody damaged them")
        slots = np.asarray(command.slots).reshape(len(event.good), -1).tolist()
        for number, row in enumerate(slots):
            key = command.keys[number * KEY_BYTES :][:KEY_BYTES]
            for column, slot in enumerate(row if event.good[number] else ()):
                self._check_bytes(command, key, column, slot)

    def _begin_fetch(self, command: Fetch) -> None:
        world, blocks = self.world, len(command.keys) // KEY_BYTES
        world.note(f"{self.name} fetches {blocks} blocks from {command.node}")
        if self.now_ns < self._left_alone.get(command.node, 0):
            raise Violation(f"{self.name} asks {command.node} again, which has just failed")
        self._fetches[command.job] = command

    def _check_fetched(self, command: Fetch, event: Fetched) -> None:
        world = self.world
        count = sum(event.good)
        world.note(f"{self.name} has {count} blocks of {command.node}")
        world.fetched_blocks += count
        slots = np.asarray(command.slots).reshape(len(event.good), -1)
        mine = set(slots.reshape(-1).tolist())
        for writing in self.transfer_worker.writing.values():
            if mine & writing:
                raise Violation(
                    f"{self.name} gives slots back that its transfer worker still writes to"
                )
        self._ended.append((command.node, count > 0, event.peer_failed))
        for number, row in enumerate(slots.tolist()):
            if event.good[number]:
                key = command.keys[number * KEY_BYTES :][:KEY_BYTES]
                for column, slot in enumerate(row):
                    self._check_block(command, key, column, slot)

    def _check_block(self, command: Fetch, key: bytes, column: int, slot: int) -> None:
        read = self.transfer_worker.reads.get(slot)
        if (
            read is None
            or not read.is_alive
            or read.source.served.get(read.slot) != read.generation
        ):
            raise Violation(
                f"{self.name}: a block counts that was not served when it had been read"
            )
        self._check_bytes(command, key, column, slot)

    def _check_bytes(self, command: Fetch | Land, key: bytes, column: int, slot: int) -> None:
        if self.memory.is_damaged:
            return
        scope = command.targets[column]
        word = self.world.words.word(self.memory.read(slot, scope.block_bytes))
        begin, end = f"{scope.tenant}/".encode(), f"/{scope.shard}/".encode() + key
        if not (word.startswith(begin) and word.endswith(end)):
            raise Violation(f"{self.name}: fetched {word!r:.60} instead of {end!r:.60}")


def _pages(grant: PushGrant, begin: int = 0, end: int | None = None) -> set[int]:
    """Of the landing slab, of some of its blocks."""
    extents = np.frombuffer(grant.extents, "<u4")[begin:end, None]
    inside = np.arange(-(-grant.block_bytes // PAGE_BYTES))
    return set((extents + inside).reshape(-1).tolist())
