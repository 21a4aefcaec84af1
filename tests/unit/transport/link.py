"""A link in virtual time, for windows: a rate, a latency, and another flow that shares it."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.transport.pieces import make_pieces
from kvstore.transport.reads import Post, Reads
from kvstore.units import NS_PER_S
from kvstore.wire.transfer_worker import Direction, Done

STEP_NS = 50_000


class Link:
    """Posts are served in order, at the share of the rate that their queue has of all queues."""

    def __init__(
        self,
        *,
        bytes_per_s: float,
        latency_ns: int,
        other_queue: Callable[[int], int] = lambda _: 0,
    ) -> None:
        """`other_queue`: how many bytes another flow keeps under way at a time."""
        self._rate = bytes_per_s / NS_PER_S
        self.latency_ns, self._other_queue = latency_ns, other_queue
        self.now_ns = 1
        self.ours_bytes = 0.0
        self.others_bytes = 0.0
        self._queue: list[tuple[Post, list[float]]] = []
        """With what is left of each."""
        self._arriving: list[tuple[int, int]] = []
        """Reads, and when their ends are known."""

    def carry(self, reads: Reads, *, until_ns: int) -> dict[int, int]:
        """Until all that was begun is done, or that time: when each transfer was done."""
        queue = self._queue
        done: dict[int, int] = {}
        while self.now_ns < until_ns:
            while (post := reads.next_post(self.now_ns)) is not None:
                queue.append((post, [float(post.size_bytes)]))
            if not queue and not self._arriving and not reads.pause_ns(self.now_ns):
                return done
            self.now_ns += STEP_NS
            self._serve()
            for read in [read for read, at_ns in self._arriving if at_ns <= self.now_ns]:
                for told in reads.ended(Done(read), self.now_ns):
                    assert isinstance(told, Done)
                    done[told.transfer] = self.now_ns
            self._arriving = [each for each in self._arriving if each[1] > self.now_ns]
        return done

    def _serve(self) -> None:
        ours = sum(post.size_bytes for post, _ in self._queue)
        other = self._other_queue(self.now_ns)
        budget = STEP_NS * self._rate
        mine = budget * ours / (ours + other) if ours else 0.0
        self.others_bytes += (budget - mine) if other else 0.0
        while mine > 0 and self._queue:
            post, left = self._queue[0]
            moved = min(mine, left[0])
            left[0] -= moved
            mine -= moved
            self.ours_bytes += moved
            if left[0] < 1:
                self._queue.pop(0)
                self._arriving.append((post.number, self.now_ns + self.latency_ns))


def begin(
    reads: Reads,
    number: int,
    size_bytes: int,
    peer: str = "b",
    direction: Direction = Direction.READ,
) -> None:
    """A transfer in one piece."""
    pieces = make_pieces([0], [0], [size_bytes])
    assert reads.begin(number, peer, pieces, direction) == []
