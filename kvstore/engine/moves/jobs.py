"""Jobs: transfers under way, how much may be in motion, and how long they take.

Rules. 1: a job's slots are its own until the transfer has truly ended, however late. 2: a job ends
once. 3: jobs of one kind move `bytes_max` at most together; one block always may.

Does not cover: the choice of blocks to move (`files`, `writes`, `fetches`), how long requests wait
(`kvstore.client.core.costs`), deadlines of I/O.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from kvstore.engine.memory.policies import NONE, Words
from kvstore.types import MOVING_SHARE, Latest, SpaceId
from kvstore.units import KIB, MIB, NS_PER_MS
from kvstore.wire.load import DISK_NS_PER_MIB_MIN, SPACES_MAX, Learned, SpacePace, within_bounds
from kvstore.wire.messages import Measured


def pieces(count: int, size: int) -> Iterator[slice]:
    """Slices of `count` blocks, one per job, in order, each of at most `size` blocks and at least
    one."""
    size = max(1, size)
    return (slice(begin, min(begin + size, count)) for begin in range(0, count, size))


class Moving(Protocol):
    """A job as `Jobs` sees it."""

    @property
    def size_bytes(self) -> int:
        """Size of the slots that the transfer reads or writes."""


J = TypeVar("J", bound=Moving)


class Jobs(dict[int, J]):
    """Running jobs of one kind, by number."""

    def __init__(self, numbers: Iterator[int], arena_bytes: int, *, places: int = 0) -> None:
        """`numbers` is `State.numbers`; `places`: number of the rows or slots that are to have one
        job of this kind at most; 0: it may be any number."""
        super().__init__()
        self._numbers = numbers
        self.at = np.zeros(places + 1, dtype=np.int64)
        """Number of the job of each place; 0: there is none, as for place -1."""
        self.bytes_max = arena_bytes // MOVING_SHARE
        self.moving_bytes = 0

    def room(self, block_bytes: int, *, bytes_max: int | None = None) -> int:
        """Number of further blocks that may be in motion, at least one while no job runs.
        `bytes_max`: a lower limit for this call."""
        limit = self.bytes_max if bytes_max is None else min(bytes_max, self.bytes_max)
        return max(0 if self else 1, (limit - self.moving_bytes) // block_bytes)

    def begin(self, job: J, places: Words = NONE) -> int:
        """Add a job, which has these places from now on; returns its number."""
        number = next(self._numbers)
        self[number], self.at[places] = job, number
        self.moving_bytes += job.size_bytes
        return number

    def leave(self, number: int, places: Words) -> None:
        """Free those of the job's places that have no later job."""
        self.at[places[self.at[places] == number]] = 0

    def end(self, number: int) -> J:
        """Remove a job whose transfer has truly ended."""
        job = self.pop(number, None)
        assert job is not None, f"job {number} ended twice"
        self.moving_bytes -= job.size_bytes
        return job


# ── paces ─────────────────────────────────────────────────────────────────────────────────────────
# Speeds that engines reported, by tenant and space, for the next engine of that space.
#
# Bounded: the latest reports stay. Reported values are clamped to bounds and serve only for the
# start of another engine of the same tenant, which measures for itself from then on.


class Paces:
    """Paces by (tenant, space), the least recently reported first."""

    def __init__(self, learned: Learned) -> None:
        self._by_space = Latest[tuple[str, str], SpacePace](SPACES_MAX)
        for pace in reversed(within_bounds(learned).spaces):
            self._by_space[pace.tenant, pace.space] = pace

    def told(self, tenant: str, space: SpaceId, measured: Measured) -> None:
        """Record the speed that an engine reported. A value of 0 was not measured and leaves the
        old one."""
        old = self.of(tenant, space)
        told = SpacePace(
            tenant,
            space.hex(),
            measured.compute_ns_per_token or old.compute_ns_per_token,
            measured.load_ns_per_token or old.load_ns_per_token,
        )
        (pace,) = within_bounds(Learned(spaces=(told,))).spaces
        self._by_space[tenant, pace.space] = pace

    def of(self, tenant: str, space: SpaceId) -> SpacePace:
        """Pace of this space; zeros where it is not known."""
        nothing = SpacePace(tenant, space.hex())
        return self._by_space.get((tenant, nothing.space), nothing)

    def all(self) -> tuple[SpacePace, ...]:
        """All paces, the last reported first."""
        return tuple(reversed(self._by_space.values()))


# ── pace ──────────────────────────────────────────────────────────────────────────────────────────
# Estimated time of reads from the disk or from another node, learned from every read; requests
# decide by it whether to wait.
#
# A read is timed from request to answer, queue, seeks and checksums included, over the bytes that
# were under way with it. The slowest of the last few counts: a slow disk shows after one read, a
# recovered one after READS. A read under way counts with the time it has taken already; once that
# exceeds the expected time, the excess counts twice, until the read is late. Whether a fetch pays
# at all is decided by the mean of the same samples.
#
# A read that no request waited for counts only if it was quicker than expected: it ran beside the
# computing of its request, which may need the same processors.

READS = 4
SMALL_READ_BYTES = 256 * KIB
"""A shorter read counts as this long: it is mostly latency."""
NS_PER_BYTE_GUESS = 1.0
"""Estimate until the first read was measured."""


class _TimedRead(NamedTuple):
    size_bytes: int
    ahead_bytes: int
    """Bytes that the disk has to read until this read is done, its own included."""
    asked_bytes: int
    """Bytes of all reads so far, this one included."""
    begin_ns: int


class ReadPace:
    """Pace of reads from one place, the disk tier or another node, and the reads under way."""

    def __init__(self, learned_ns_per_mib: int = 0) -> None:
        self._guess = (MIB, learned_ns_per_mib or int(NS_PER_BYTE_GUESS * MIB))
        self._samples: deque[tuple[int, float]] = deque(maxlen=READS)
        """(bytes, nanoseconds) of the last READS measurements."""
        self._reads: dict[int, _TimedRead] = {}
        self._late: dict[int, _TimedRead] = {}
        """Late reads, which may never end."""
        self.begun_bytes = 0
        """Bytes under way, without late reads."""
        self._asked_bytes = 0
        """Bytes of all reads so far."""

    @property
    def measured_ns_per_mib(self) -> int:
        """Slowest measured pace, for the next start; 0: no read was measured."""
        return round(max(ns / size for size, ns in self._samples) * MIB) if self._samples else 0

    def ns_per_byte(self, now_ns: int) -> float:
        """Pace of the slowest of the last reads and the oldest one under way."""
        return max(ns / size for size, ns in [*self._learned(), *self._so_far(now_ns)])

    def mean_ns_per_byte(self, now_ns: int) -> float:
        """Pace of the last reads and the oldest one under way, taken together."""
        reads = [*self._learned(), *self._so_far(now_ns)]
        return sum(ns for _, ns in reads) / sum(size for size, _ in reads)

    def begun(self, job: int, size_bytes: int, now_ns: int) -> None:
        """A read was requested."""
        self.begun_bytes += size_bytes
        self._asked_bytes += size_bytes
        ahead_bytes = max(self.begun_bytes, SMALL_READ_BYTES)
        self._reads[job] = _TimedRead(size_bytes, ahead_bytes, self._asked_bytes, now_ns)

    def late(self, job: int) -> None:
        """A read is late and nobody waits for it: it counts again only when it ends."""
        self._late[job] = read = self._reads.pop(job)
        self.begun_bytes -= read.size_bytes

    def ended(self, job: int, now_ns: int, *, counts: bool, was_awaited: bool = True) -> None:
        """A read has truly ended. `counts`: its time is a measurement; `was_awaited`: a request
        waited for it."""
        read = self._late.pop(job, None)
        if read is None:
            read = self._reads.pop(job)
            self.begun_bytes -= read.size_bytes
        if counts:
            least_ns = read.ahead_bytes * DISK_NS_PER_MIB_MIN // MIB
            sample = read.ahead_bytes, max(now_ns - read.begin_ns, least_ns)
            if (
                was_awaited
                or not self._samples
                or sample[1] < _expected_ns(self._samples, sample[0])
            ):
                self._samples.append(sample)

    def forget_slowest(self) -> None:
        """Drop the slowest sample: a place that is not read from because it was slow would
        otherwise stay slow for ever."""
        if self._samples:
            self._samples.remove(max(self._samples, key=lambda sample: sample[1] / sample[0]))

    def estimate_ms(self, job: int, now_ns: int, *, queued_bytes: int = 0) -> int:
        """Estimated time in ms until this read ends, after those requested before it; until all
        reads under way end, if `job` is none of them, or if `queued_bytes` come after them."""
        samples, size = [*self._learned(), *self._so_far(now_ns)], self.begun_bytes
        if queued_bytes:
            size += queued_bytes
        elif (read := self._reads.get(job)) is not None:
            # Reads end in about their order: those that ended were asked for before it.
            ended_bytes = self._asked_bytes - self.begun_bytes
            size = max(read.size_bytes, read.asked_bytes - ended_bytes)
        return int(_expected_ns(samples, max(size, SMALL_READ_BYTES)) / NS_PER_MS) + 1

    def _learned(self) -> list[tuple[int, float]]:
        return list(self._samples) or [self._guess]

    def _so_far(self, now_ns: int) -> list[tuple[int, float]]:
        """Sample (bytes, nanoseconds) of the oldest read under way: the time taken so far, and by
        how much that exceeds the expected time once more. Empty if no read is under way."""
        oldest = next(iter(self._reads.values()), None)
        if oldest is None:
            return []
        taken_ns = now_ns - oldest.begin_ns
        late_ns = max(0.0, taken_ns - _expected_ns(self._learned(), oldest.ahead_bytes))
        return [(oldest.ahead_bytes, taken_ns + late_ns)]


def _expected_ns(samples: Iterable[tuple[int, float]], size_bytes: int) -> float:
    """Time expected for `size_bytes`, by the slowest of the samples. A longer read than a sample
    takes longer in proportion; a shorter one is quicker only by the root of the ratio, because an
    unknown part of every read is latency."""
    return max(ns * max(size_bytes / size, math.sqrt(size_bytes / size)) for size, ns in samples)
