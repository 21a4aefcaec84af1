"""What reads bytes of other nodes' arenas, as a node sees its transfer worker: a read is awaited to
its end.

What it can do wrong: stop half way, never end (until it is killed for that), die with all that it
does, bring other bytes than lie there; and go on to write for a while after the peer is gone. Its
word that a read has ended is true: after it nothing is written (ADR 11). The oracle looks at the
source, too: what each slot's bytes were, of whom, when the read of it had ended.

Does not cover: when a real transfer worker is killed (`peers.transfer_worker`), back ends
(`transport`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Final, NamedTuple

from kvstore.peers.transfer_worker import GRACE_NS
from kvstore.ports import Pieces
from kvstore.types import PAGE_BYTES, SlotId
from kvstore.units import NS_PER_MS, NS_PER_S
from kvstore.wire.transfer_worker import Descriptor, Direction, encode
from tests.sim.world.ground import Peers
from tests.sim.world.net import SimNet

STOPS_HALF_WAY, NEVER_ENDS, WRONG_BYTES = (
    "read stops half way",
    "read never ends",
    "read brings wrong bytes",
)
LINGERS: Final = "read lingers"
"""Of itself, where a source is gone: not a fault that can be left out."""
_STRIKE_SHARE: Final = 0.15
_LINGERS_SHARE: Final = 0.5
"""Of the reads whose source is gone: their ends are known only when the transfer worker is dead."""
_POLL_MS: Final = 20


class Read(NamedTuple):
    """Where the bytes of a slot came from, and what was there when they had been read."""

    source: Peers
    slot: int
    generation: int
    is_alive: bool


class SimTransferWorker:
    """Of one node process. `move` and `forget` are `TransferWorker`'s."""

    def __init__(
        self, peers: Peers, net: SimNet, transfer_workers: dict[bytes, SimTransferWorker]
    ) -> None:
        self.trouble = ""
        self.descriptor = b""
        self.changed: Callable[[], object] = lambda: None
        self.incoming: dict[int, set[int]] = {}
        """Writes of others that may still reach this node → pages; they end with this child."""
        self._incoming_numbers = itertools.count(1)
        self.reads: dict[int, Read] = {}
        """By the slot that was read into, the last time."""
        self.writing: dict[int, set[int]] = {}
        """Transfer → slots that it may still write to."""
        self.peers, self._net, self._transfer_workers = peers, net, transfer_workers
        self._lives = 0
        self._numbers = itertools.count(1)
        self.start()

    def start(self) -> None:
        """Another child."""
        self._lives += 1
        peers = self.peers
        name = f"{peers.name}/{peers.incarnation}/{self._lives}"
        size_bytes = len(peers.memory.bytes)
        self.descriptor = encode(Descriptor("memory", name, size_bytes, 0, b""))
        self.trouble = ""
        self._transfer_workers[self.descriptor] = self
        self.changed()

    def die(self, reason: str) -> None:
        """All that it does has ended; another one begins soon."""
        if self.trouble:
            return
        self._transfer_workers.pop(self.descriptor, None)
        self._lives += 1
        self.descriptor, self.trouble = b"", f"the transfer worker ended: {reason}"
        self.writing.clear()
        self.incoming.clear()
        self.changed()
        again_s = self.peers.random.randint(1, 500) * NS_PER_MS / NS_PER_S
        self.peers.loop.call_later(again_s, self.start)

    @property
    def memory_is_there(self) -> bool:
        """Whether its process lives."""
        return not self.peers.loop.is_dead

    async def move(
        self,
        peer: str,
        descriptor: bytes,
        pieces: Pieces,
        *,
        timeout_s: float,
        direction: Direction = Direction.READ,
    ) -> str:
        """Read from a peer, or write there. On return nothing touches the places here any more.
        Returns why it failed."""
        if self.trouble:
            return self.trouble
        number = next(self._numbers)
        rows = list(zip(*(array.tolist() for array in pieces), strict=True))
        life = self._lives
        deadline_ns = self.peers.now_ns + int(timeout_s * NS_PER_S)
        if direction is Direction.WRITE:
            return await self._write(descriptor, rows, deadline_ns, life)
        self.writing[number] = {to // PAGE_BYTES for to, _, _ in rows}
        reason = await self._read(descriptor, rows, deadline_ns, life)
        self.writing.pop(number, None)
        return reason

    def forget(self, peer: str) -> None:
        """Each read finds its source by the descriptor: there is nothing to forget."""

    def recycle(self, reason: str) -> None:
        """As `TransferWorker.recycle`."""
        self.die(reason)

    def written_to(self) -> set[int]:
        """Pages that a peer may still write to."""
        return {page for pages in self.incoming.values() for page in pages}

    async def _write(
        self, descriptor: bytes, rows: list[tuple[int, int, int]], deadline_ns: int, life: int
    ) -> str:
        """Returns why it failed; what did may reach the peer all the same, later."""
        target = self._transfer_workers.get(descriptor)
        if target is None:
            return "the peer is gone"
        number = next(target._incoming_numbers)
        target.incoming[number] = {
            page
            for _, to, size in rows
            for page in range(to // PAGE_BYTES, (to + size - 1) // PAGE_BYTES + 1)
        }
        for _, to, _ in rows:
            target.peers.check_write(self.peers.name, to // PAGE_BYTES)
        reason = await self._write_rows(target, descriptor, rows, deadline_ns, life)
        if not reason:
            target.incoming.pop(number, None)
        elif number in target.incoming and self.peers.random.random() < _LINGERS_SHARE:
            self.peers.world.faults[LINGERS] += 1
            # It lies in a socket of the target, whatever becomes of this process.
            late_s = self.peers.random.choice((0, 1, 5, 400, 4000)) * NS_PER_MS / NS_PER_S
            target.peers.loop.call_later(late_s, target.store_late, number, rows)
        return reason

    def store_late(self, number: int, rows: list[tuple[int, int, int]]) -> None:
        """Bytes of a write that failed arrive."""
        if number in self.incoming:
            for _, to, size in rows:
                self._put(to, b"late" * (size // 4))

    async def _write_rows(
        self,
        target: SimTransferWorker,
        descriptor: bytes,
        rows: list[tuple[int, int, int]],
        deadline_ns: int,
        life: int,
    ) -> str:
        peers, stops_at = self.peers, len(rows)
        if self._strikes(STOPS_HALF_WAY):
            stops_at = peers.random.randint(0, len(rows) - 1)
        hangs = self._strikes(NEVER_ENDS)
        for number, (begin, to, size) in enumerate(rows):
            await self._pause()
            while hangs or not self._reaches(target):
                if self._lives != life:
                    return "the transfer worker ended"
                if peers.now_ns >= deadline_ns + GRACE_NS:
                    self.die("a write has no end")
                    return "it had no end"
                await asyncio.sleep(_POLL_MS * NS_PER_MS / NS_PER_S)
            if self._lives != life:
                return "the transfer worker ended"
            if self._transfer_workers.get(descriptor) is not target:
                return "the peer is gone"
            data = bytearray(peers.memory.bytes[begin : begin + size])
            if self._strikes(WRONG_BYTES):
                data[peers.random.randrange(size)] ^= 1
            if number == stops_at:
                target._put(to, bytes(data[: size // 2]))
                return "an error half way"
            target._put(to, bytes(data))
        return ""

    async def _read(
        self, descriptor: bytes, rows: list[tuple[int, int, int]], deadline_ns: int, life: int
    ) -> str:
        """Returns why it failed."""
        peers, stops_at = self.peers, len(rows)
        if self._strikes(STOPS_HALF_WAY):
            stops_at = peers.random.randint(0, len(rows) - 1)
        hangs = self._strikes(NEVER_ENDS)
        for number, row in enumerate(rows):
            await self._pause()
            source = self._transfer_workers.get(descriptor)
            while hangs or (source is not None and not self._reaches(source)):
                if self._lives != life:
                    return "the transfer worker ended"
                if peers.now_ns >= deadline_ns + GRACE_NS:
                    self.die("a read has no end")
                    return "it had no end"
                await asyncio.sleep(_POLL_MS * NS_PER_MS / NS_PER_S)
                source = self._transfer_workers.get(descriptor)
            if self._lives != life:
                return "the transfer worker ended"
            if source is None:
                return await self._linger(rows[number:], life)
            if number == stops_at:
                self._put(row[0], bytes(row[2] // 2))
                return "an error half way"
            self._copy(source, *row)
        return ""

    async def _pause(self) -> None:
        await asyncio.sleep(self.peers.random.choice((0, 1, 1, 5)) * NS_PER_MS / NS_PER_S)

    def _reaches(self, source: SimTransferWorker) -> bool:
        net, here, there = self._net, self.peers.name, source.peers.name
        return not net.is_cut(here, there) and not net.is_cut(there, here)

    async def _linger(self, rows: list[tuple[int, int, int]], life: int) -> str:
        """The source is gone: what was on its way may still be written, until the transfer worker
        is dead."""
        if self.peers.random.random() < _LINGERS_SHARE:
            self.peers.world.faults[LINGERS] += 1
            for to, _, size in rows:
                await self._pause()
                if self._lives != life:
                    break
                self._put(to, b"late" * (size // 4))
            self.die("too many reads have no end")
        return "the peer is gone"

    def _copy(self, source: SimTransferWorker, to: int, begin: int, size: int) -> None:
        its = source.peers
        data = bytearray(its.memory.bytes[begin : begin + size])
        if self._strikes(WRONG_BYTES):
            data[self.peers.random.randrange(size)] ^= 1
        self._put(to, bytes(data))
        slot = begin // PAGE_BYTES
        generation = its.memory.generation(SlotId(slot))
        self.reads[to // PAGE_BYTES] = Read(its, slot, generation, not its.loop.is_dead)

    def _put(self, to: int, data: bytes) -> None:
        self.peers.memory.bytes[to : to + len(data)] = data

    def _strikes(self, fault: str) -> bool:
        world = self.peers.world
        if fault not in world.enabled or world.random.random() >= _STRIKE_SHARE:
            return False
        world.strike(fault, self.peers.machine)
        return True
