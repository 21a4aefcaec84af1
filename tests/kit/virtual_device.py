"""A device with time: streams, copy engines and kernels take as long as NVIDIA's are said to.

What a stream was given begins when what was there before has ended, when the event that it waits
for has happened, and when its copy engine is free: there is one for each direction, which serves
streams in turn, those with a higher priority first. Kernels of several streams run beside one
another, and beside the engine's forward. Time is virtual: it passes by calls, each of which costs
the host something, and by `wait_us`. So a budget in steps or in shares of the link is exact, on a
busy machine too.

Figures, all assumptions until a device has run `bench/gpu`: PCIe 5 × 16 moves 54 GB/s each way
(measured by others on an H20); an entry of a batch costs a copy engine 0.9 us (8 to 10 GB/s in
pieces of 8 KiB); a kernel starts in 3 us; 32 blocks of a grid move 800 GB/s; a hash reads 1.5 TB/s,
and its chain of 512 dependent steps takes 15 us; a call of the bindings 5 us, of a query 1 us.

What it refuses is what `SimulatedDevice` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tests.kit.simulated_device import ENGINE_STREAM, Cost, Kind, SimulatedDevice, _Work

LINK_BYTES_PER_US: Final = 54_000
ENTRY_US: Final = 0.9
KERNEL_US: Final = 3.0
MOVE_BYTES_PER_US: Final = 800_000
HASH_BYTES_PER_US: Final = 1_500_000
CHAIN_US: Final = 15.0
CALL_US: Final = 5.0
QUERY_US: Final = 1.0
SHARED: Final = (Kind.LOAD, Kind.STORE)
"""Each of these serves one stream at a time."""


def duration_us(cost: Cost) -> float:
    """How long work takes once it has begun."""
    match cost.kind:
        case Kind.LOAD | Kind.STORE:
            return cost.piece_count * ENTRY_US + cost.size_bytes / LINK_BYTES_PER_US
        case Kind.MOVE:
            return KERNEL_US + cost.size_bytes / MOVE_BYTES_PER_US
        case Kind.DIGEST:
            return 2 * KERNEL_US + CHAIN_US + cost.size_bytes / HASH_BYTES_PER_US
        case Kind.FORWARD:
            return 0.0


@dataclass(frozen=True)
class _Timed:
    """Work in a queue."""

    work: _Work
    kind: Kind
    duration_us: float
    ordered_us: float


class VirtualDevice(SimulatedDevice):
    """See the module. `moves_bytes` False: only time passes."""

    def __init__(self, seed: int, memory_bytes: int = 0, *, moves_bytes: bool = True) -> None:
        self.now_us = 0.0
        self._moves_bytes = moves_bytes
        self._free_us: dict[int, float] = {ENGINE_STREAM: 0.0}
        """When each stream has ended what it has begun."""
        self._running: dict[int, _Timed] = {}
        self._engine_free_us = dict.fromkeys(SHARED, 0.0)
        self._urgent: set[int] = set()
        self._happened_us: dict[tuple[int, int], float] = {}
        """When each record of an event happened."""
        super().__init__(seed, memory_bytes)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def wait_us(self, duration_us: float) -> None:
        """The host does something else."""
        with self._lock:
            self.now_us += duration_us
            self._catch_up()

    def forward(self, duration_us: float) -> None:
        """The engine launches a step that takes so long."""
        with self._lock:
            work = _Timed(lambda: None, Kind.FORWARD, duration_us, self.now_us)
            self._queues[ENGINE_STREAM].append(work)  # type: ignore[arg-type]

    def turn(self) -> bool:
        """Until the next end of some work. False: nothing is under way."""
        with self._lock:
            self._catch_up()
            ends = [self._free_us[stream] for stream in self._running]
            if not ends:
                return False
            self.now_us = max(self.now_us, min(ends))
            self._catch_up()
            return True

    def _catch_up(self) -> None:
        """All that has ended by now."""
        while (stream := self._next()) is not None:
            queue = self._queues[stream]
            match queue[0]:
                case int() as event:
                    queue.popleft()
                    self._happened[event] += 1
                    self._happened_us[event, self._happened[event]] = self._free_us[stream]
                case _Timed() as timed if stream in self._running:
                    queue.popleft()
                    del self._running[stream]
                    if self._moves_bytes:
                        self._do(timed.work)
                case _Timed() as timed:
                    begin_us = self._begin_us(stream, timed)
                    self._running[stream] = timed
                    self._free_us[stream] = begin_us + timed.duration_us
                    if timed.kind in SHARED:
                        self._engine_free_us[timed.kind] = self._free_us[stream]
                case (event, count):
                    queue.popleft()
                    happened_us = self._happened_us.get((event, count), 0.0)
                    self._free_us[stream] = max(self._free_us[stream], happened_us)
                case other:
                    raise AssertionError(f"{other} in a queue")

    def _next(self) -> int | None:
        """The stream whose next change is the earliest that has come; None: there is none."""
        due = list(self._due())
        return min(due)[2] if due else None

    def _due(self) -> Iterator[tuple[float, bool, int]]:
        for stream, queue in self._queues.items():
            if not queue or not self._may_go(queue[0]):
                continue
            head, at_us = queue[0], self._free_us[stream]
            if isinstance(head, _Timed) and stream not in self._running:
                at_us = self._begin_us(stream, head)
            if at_us <= self.now_us:
                yield at_us, stream not in self._urgent, stream

    def _begin_us(self, stream: int, timed: _Timed) -> float:
        begin_us = max(self._free_us[stream], timed.ordered_us)
        return max(begin_us, self._engine_free_us.get(timed.kind, 0.0))

    # ── what costs time ──────────────────────────────────────────────────────────────────────────

    def _give(self, stream: int, work: _Work, cost: Cost) -> None:
        timed = _Timed(work, cost.kind, duration_us(cost), self.now_us)
        self._queues[stream].append(timed)  # type: ignore[arg-type]

    def _pass_time(self) -> None:
        self.now_us += CALL_US
        self._catch_up()

    def has_happened(self, event: int) -> bool:
        with self._lock:
            self.now_us += QUERY_US - CALL_US
            return super().has_happened(event)

    def stream(self, *, is_urgent: bool) -> int:
        with self._lock:
            made = super().stream(is_urgent=is_urgent)
            self._free_us[made] = 0.0
            if is_urgent:
                self._urgent.add(made)
            return made


def link_share(size_bytes: int, took_us: float) -> float:
    """Share of one direction of the link that so many bytes in that time are."""
    return size_bytes / took_us / LINK_BYTES_PER_US
