"""The pure core's needs from the world, as Protocols. Mechanisms implement them.

Clock       monotonic time                    node/node.py, testing/clock.py
Memory      memory that holds slots           tiers/dram.py, tests/kit/memory_tier.py
                                              (reference)
FileStore   blocks on a disk                  tiers/file/tier.py, tests/kit/memory_store.py
                                              (reference)
Transport   from and to arenas of others      transport/{nixl,tcp,ucx}.py, tests/kit/loopback.py
                                              (reference)
IndexStore  locations of blocks               stores/redis.py, index/index.py (reference)
CopyEngine  an engine's cache and slots       kernels/device.py, kernels/host.py (reference)
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.breaker import BreakerState
from kvstore.index.feed import Event, Verdict
from kvstore.index.holdings import Statistics
from kvstore.index.index import Answer, Member
from kvstore.tier_events import FileCommand, FileTierEvent
from kvstore.types import Generation, SlotId, SpaceId
from kvstore.wire.space import Slab
from kvstore.wire.transfer_worker import Direction, Done, Failed, Limbo


class Clock(Protocol):
    """Monotonic time. Wall time is never used for leases or deadlines."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary start; never goes back."""


@runtime_checkable
class Memory(Protocol):
    """Memory of one tier, divided into slots by the engine core, which decides everything.

    The tier moves no block by itself. `slot` is in pages of PAGE_BYTES. Callers guarantee that
    ranges lie within `capacity_bytes`; implementations assert it.
    """

    @property
    def capacity_bytes(self) -> int:
        """Bytes that exist; fixed for the life of the tier."""

    @property
    def ready_bytes(self) -> int:
        """Bytes from the start whose pages have arrived; grows up to the capacity."""

    def raise_generations(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Publish new generations. On return every reader sees them; old copies are void."""

    def generation(self, slot: SlotId) -> Generation:
        """The published generation of a slot."""

    def beat(self, now_ns: int) -> None:
        """Publish that the driver was alive at `now_ns`."""

    def read(self, slot: SlotId, into: memoryview) -> None:
        """Copy the bytes of a slot, as many as there is room for; whatever engines do to the memory
        meanwhile, it does not fail."""

    def close(self) -> None:
        """Give the memory back. Mappings of other processes stay."""


class FileStore(Protocol):
    """Blocks between slots and a disk, found again after any restart. The engine core decides which
    are written, read and kept; orders and events are those of `kvstore.tier_events`.

    Every accepted WriteFile and ReadFile gives exactly one FileWritten or FileRead, and its slots
    are the store's until then, as long as it takes. A block is good only if it is the stored one.
    Orders take effect in the order in which they came: a VoidFile covers every WriteFile before it
    and none after it. Calls come from one thread, and none waits for the disk.
    """

    @property
    def path(self) -> Path:
        """Directory of the store."""

    @property
    def note(self) -> bytes:
        """The note that `keep_note` kept before this start; empty: none."""

    @property
    def taken_bytes(self) -> int:
        """Bytes in use, of the capacity."""

    @property
    def breakers(self) -> tuple[BreakerState, BreakerState]:
        """States of the breakers for reads and for writes."""

    def fileno(self) -> int:
        """Readable while `take_events` has something."""

    def take_events(self) -> Iterator[FileTierEvent]:
        """Events in order, up to and with the first that names many blocks. Each is taken when it
        is asked for; those that are not stay."""

    def submit(self, command: FileCommand) -> bool:
        """Take an order. False: a WriteFile or ReadFile is refused, and nothing was taken: the
        queue is full, the disk suspended, or the store closed."""

    def wait_for_voids(self, timeout_s: float) -> bool:
        """Wait, at most `timeout_s`, until all voids so far are on the disk. Returns whether they
        are. The one call that waits, and the one that may come from any thread."""

    def keep_note(self, note: bytes) -> None:
        """Keep a few pages for the next start. Only the last one counts; may be lost."""

    def close(self) -> None:
        """Orderly end: queued writes are written, reads that have not begun fail, and the wait for
        a disk that hangs is bounded. The last events can still be taken. Idempotent."""


class Pieces(NamedTuple):
    """Bytes to move: ranges of the peer's arena, and those of ours. Equally long arrays of u64;
    piece i is `length[i]` bytes between `remote[i]` and `local[i]`."""

    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    length: NDArray[np.uint64]


class Landing(NamedTuple):
    """The only memory that peers may write to. A peer that may write to a part of it may write to
    all of it: the owner checks its grants by the bytes that arrived."""

    begin: int
    """Offset in the arena."""
    memory: NDArray[np.uint8]
    """The bytes from there on, in a mapping of their own."""


class TransportMemory(NamedTuple):
    """A node's memory, as a back end gets it."""

    arena: NDArray[np.uint8]
    """The arena, writable: this node alone moves bytes into and out of it."""
    source: NDArray[np.uint8]
    """The same bytes, for peers to read, in a mapping that cannot be written through."""
    landing: Landing | None = None


Outcome = Done | Failed | Limbo
"""How a transfer ended, for the places in this process's arena: see these. A failed write may still
reach the peer's landing memory, until the peer or its transfer worker is gone. After a Limbo no
other outcome of the transfer follows."""


class TransportCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of a back end, asked of its class: nothing is guessed from its name."""

    takes_writes: bool
    """Landing memory is supported."""
    ends_forgotten: bool
    """Reads of a forgotten peer end. Without this, only the death of the transfer worker ends
    them."""
    is_secure: bool
    """With certificates, peers are authenticated and bytes encrypted; the back end takes the
    address and the files that the node has for its peers."""
    options: Mapping[str, str]
    """Options that an operator may set, and the form of each value; a name that ends in OPTION
    stands for all names with the same beginning."""
    modules: tuple[str, ...] = ()
    """Modules of other packages, of which the back end needs one; pip's extra that installs it has
    the back end's name."""


class Transport(Protocol):
    """Moves bytes between arenas: reads all of a peer's, writes to its landing memory, if it has
    any. One thread; no verb waits for a peer.

    Every posted transfer has at most one outcome. A peer that stopped gives none: deadlines are the
    caller's, and so is the choice of peers and times. A back end that takes no writes refuses
    landing memory when it is opened, and describes none: writes to it are refused like those to any
    peer without.
    """

    refused_count: int
    """Peers refused since the transport was opened, for want of room."""
    capabilities: TransportCapabilities
    """Capabilities of the class."""

    @staticmethod
    def is_at(details: bytes, host: str) -> bool:
        """Whether the details of a descriptor name the machine `host` and no other; True for a back
        end that cannot see that."""
        del details, host
        return True

    def describe(self) -> bytes:
        """Descriptor that a peer needs to read and write here; for a trusted channel only."""

    def connect(self, peer: str, descriptor: bytes) -> None:
        """Transfers with `peer`, which must not be connected, are possible from now on.

        Raises:
            TransportError: the descriptor is of another peer or back end, or makes no sense.
        """

    def post(self, number: int, peer: str, pieces: Pieces, direction: Direction) -> None:
        """Begin a transfer of at least one piece. Callers choose numbers that are not under way,
        and places without another writer meanwhile.

        Raises:
            TransportError: the peer is not connected or takes no writes, or a piece lies outside of
                an arena or the landing memory; nothing was begun.
        """

    def poll(self) -> list[Outcome]:
        """Do the work that is due. Returns the transfers that ended since the last call."""

    def fileno(self) -> int:
        """Readable when `poll` has something to do; -1: there is no such descriptor, and `poll`
        must be called again and again while transfers are under way."""

    def forget(self, peer: str) -> None:
        """Transfers with this peer end soon, as Failed or in Limbo, if the back end can see to it.
        Others go on. The peer may be connected again, also as another process."""

    def close(self) -> None:
        """Give all back. Transfers under way get no outcome: as good as Limbo. Idempotent."""


class CopyWay(enum.Enum):
    """Work of a copy engine on an engine block and a slot."""

    STORE = "store"
    """Engine block → slot, with the checksum of the bytes."""
    LOAD = "load"
    """Slot → engine block."""
    COMPARE = "compare"
    """Writes nothing; measures how far the values in engine block and slot are apart."""
    CLEAR = "clear"
    """The engine block is filled with zeros; there is no slot."""


class BlockCopy(msgspec.Struct):
    """An order to a CopyEngine."""

    number: int
    """Chosen by the caller; no copy under way has it."""
    way: CopyWay
    group: int
    """KV cache group of the block."""
    block_id: int
    begin: int = 0
    """Offset of the slot in the memory, in bytes."""
    header: bytes = b""
    """Bytes before the payload that the checksum covers."""
    is_verified: bool = True
    """Whether the checksum of a load is wanted."""
    after: int = 0
    """Mark of engine work (`CopyEngine.mark`) that must be done before the copy; 0: none."""
    slab_begin: int = -1
    """Offset in the node's slab from which a load takes its bytes, not from the slot; -1: none."""


class CopyEnd(NamedTuple):
    """A copy has ended: nothing touches its block and its slot for it any more."""

    number: int
    checksum: bytes = b""
    """16 bytes, of a store or a verified load: of the bytes in the engine's pages. Where its device
    has no kernels, of those in the slot."""
    error: float = 0.0
    """Relative distance of the values compared."""
    diverged: bool = False
    """The values compared are of another block, model or prompt: another order of computing does
    not explain them."""
    duration_ns: int = 0
    """Time spent on this copy, without the time spent on copies before it."""
    reason: str = ""
    """Why it failed, if it did. The block of such a load holds nothing of use."""


class CopyEngine(Protocol):
    """Moves blocks between a rank's paged cache and the memory that holds slots.

    `mark` is called on the engine's thread, all else on one other. No call waits for a copy. Every
    copy that was begun ends exactly once, in any order, unless the device hangs. The caller
    checks generations, before `begin` and after the end.
    """

    @property
    def copies_max(self) -> int:
        """Copies that may be under way at once."""

    @property
    def trouble(self) -> str:
        """Reason why it is slow or drops stores, with the way to mend it; empty: none."""

    @property
    def pinned_bytes(self) -> int:
        """Memory of slots that is pinned; 0 where copies need none."""

    @property
    def gpu(self) -> str:
        """GPU of the caches, as every process of the machine calls it; empty: none."""

    def block_bytes(self, group: int) -> int:
        """Size of a block of a KV cache group."""

    def attach(self, memory: NDArray[np.uint8], ready_bytes: Callable[[], int]) -> None:
        """Slots are in this memory from now on; no copy is under way. Only bytes below
        `ready_bytes`, which grows, are touched."""

    def pin_ahead(self, end: int) -> None:
        """Pin a bit more of the memory of slots below `end`, while nothing is copied."""

    def map_slab(self, slab: Slab | None) -> str:
        """Loads may come from this memory on the same GPU from now on; None: from none. No copy is
        under way. Returns why that cannot be, or nothing."""

    def mark(self) -> int:
        """A number above 0 that stands for all work which the engine has given its device so far
        (`BlockCopy.after`); 0 if the device has done it all."""

    def begin(self, copy: BlockCopy) -> None:
        """Begin a copy, of which there are fewer than `copies_max` under way."""

    def ended(self) -> list[CopyEnd]:
        """Copies that ended since the last call."""

    def close(self) -> None:
        """Give all back. Copies under way get no end. Idempotent."""


class IndexStore(Protocol):
    """State of a replica of the index, in its own memory or in a shared store.

    Used on one asyncio loop; any number of calls at once, those about one node in the order in
    which they were made. `now_ms` is of a clock that does not go back. An unreachable store raises
    nothing, and no call waits longer than a fraction of a second for its answer: `match` is then
    `STALE` without locations, and `trouble` says why.
    """

    @property
    def trouble(self) -> str:
        """Why the store is not healthy; empty while it is."""

    @property
    def failure_count(self) -> int:
        """How often the store was unreachable, since the start."""

    async def hear(self, event: Event, now_ms: int) -> Verdict:
        """Apply a message of a node, or the end of its stream."""

    async def match(self, tenant: str, space: SpaceId, keys: bytes, now_ms: int) -> Answer:
        """Prefix length of `keys` (32 bytes each) at each location."""

    def members(self, now_ms: int) -> list[Member]:
        """Nodes that are not forgotten, by name."""

    async def tick(self, now_ms: int) -> None:
        """Regular work, a bounded piece at a time; ten times a second or so."""

    def statistics(self) -> Statistics:
        """Sizes and counts."""

    async def close(self) -> None:
        """Close connections."""
