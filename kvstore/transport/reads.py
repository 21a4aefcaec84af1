"""Which part of which transfer is moved next, how much may be under way, how transfers end. Pure.

    transfer 7 ─ peer b ─ 64 MiB ──▶ posts 20, 21, 22 …, as many as b's `Window` has room for
    transfer 8 ─ peer b ─ waits for its turn
    transfer 9 ─ peer c ─ post 23: peers take turns and never wait for each other

A transfer ends when all its posts have. One that failed posts no more, but its posts under way
still write: it is reported as failed only when they have ended too. With a post whose end cannot be
known it is in limbo at once, and for ever.

Reads go first: an engine waits for them, while pushes run beside a prefill.

Does not cover: moving bytes (`ports.Transport`), deadlines (`peers.transfer_worker`).
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from kvstore.ports import Outcome, Pieces
from kvstore.transport.pieces import cut, total_bytes
from kvstore.units import NS_PER_S
from kvstore.wire.transfer_worker import REASON_CHARS_MAX, Direction, Done, Failed, Limbo

POST_BYTES_MAX: Final = 32 << 20
POSTS_PER_WINDOW: Final = 4
"""Posts that a window is divided into: while one ends, the others are under way."""
PIECES_PER_POST_MAX: Final = 4096

# ── windows ───────────────────────────────────────────────────────────────────────────────────────
# How many bytes may be under way from one peer: additive increase, multiplicative decrease.
#
# The input is completion times. A post with which, counting all posts before it, `queued` bytes are
# under way takes
#
#     base + queued / rate   on a link that is ours alone: the least of late times teach both
#     more                   on one that others use: then the window is halved, and grows again, a
#                            step for each window of bytes, once times are as they were
#
# So others are given way, like LEDBAT (RFC 6817) does. Below one step the window is a duty: one
# step at a time, and pauses between them, so that even one step does not crowd a slow link.
#
# The window always suffices for an eighth of the link's known rate. Times look the same for a busy
# link and for a busy host, on either side, that lets each post wait for a processor: there giving
# way helps nobody, and where posts take a hundred times as long as expected even one step at a time
# would be a hundredth of the link. Behind a queue of others this is an eighth of the queue, or
# less.
#
# Wrong where a link was busy from the first byte on: its times are then the base of comparison, for
# EPOCH_NS.

STEP_BYTES: Final = 1 << 20
START_BYTES: Final = 16 << 20
CEILING_BYTES: Final = 256 << 20
LEAST_BYTES: Final = STEP_BYTES // 4
GROW_BELOW: Final = 1.15
CUT_ABOVE: Final = 1.3
"""A post that takes longer than this times the expected time halves the window. One flow as strong
as ours makes it 2.
"""
SLACK_NS: Final = 4_000_000
"""Delay that a busy host adds to any time, in ns: no reason to give way."""
QUEUE_NS: Final = 10_000_000
"""Time by which the window may exceed what fills the link, in ns: more would hide the queues of
others behind our own.
"""
SHARE: Final = 8
"""The window suffices for at least one part in this many of what the link carries."""
EPOCH_NS: Final = 60 * NS_PER_S
"""Length of an epoch. The least times are those of the current epoch and the one before, since
routes change.
"""


class _Least:
    """Least times of posts in one epoch."""

    def __init__(self) -> None:
        self.ns_per_byte = float("inf")
        self.took_ns = float("inf")
        self.queued_bytes = 0


class Window:
    """Window of one peer, in bytes."""

    def __init__(self) -> None:
        self.size_bytes: float = START_BYTES
        self._slow_start = True
        self._cut_ns = 0
        """Time of the last cut: posts from before it say nothing about the window after it."""
        self._pause_until_ns = 0
        self._epochs = (_Least(), _Least())
        self._epoch_end_ns = 0

    def room_bytes(self, under_way_bytes: int, now_ns: int) -> int:
        """Bytes that may be posted now, in addition to those under way."""
        if self.size_bytes < STEP_BYTES:
            idle = not under_way_bytes and now_ns >= self._pause_until_ns
            return STEP_BYTES if idle else 0
        return max(0, int(self.size_bytes) - under_way_bytes)

    def pause_ns(self, now_ns: int) -> int:
        """Time until which nothing may be posted, whatever ends; 0: no such time."""
        waits = self.size_bytes < STEP_BYTES and now_ns < self._pause_until_ns
        return self._pause_until_ns if waits else 0

    def ended(self, *, size_bytes: int, queued_bytes: int, posted_ns: int, now_ns: int) -> None:
        """A post is done. `queued_bytes` were under way when it was posted, itself included."""
        took_ns = max(1, now_ns - posted_ns)
        self._learn(queued_bytes, took_ns, now_ns)
        expected_ns = self._expected_ns(queued_bytes)
        if took_ns > CUT_ABOVE * expected_ns + SLACK_NS:
            self.failed(posted_ns=posted_ns, now_ns=now_ns)
        elif took_ns < GROW_BELOW * expected_ns + SLACK_NS:
            step = size_bytes if self._slow_start else STEP_BYTES * size_bytes / self.size_bytes
            self.size_bytes += min(step, size_bytes)
        # At least what reads the share 1 / SHARE of the link, where posts take so long; at most
        # what fills the link, with some to spare.
        due = took_ns / self._ns_per_byte / SHARE
        enough = max(2 * STEP_BYTES, (self._expected_ns(0) + QUEUE_NS) / self._ns_per_byte)
        self.size_bytes = min(max(self.size_bytes, due), enough, CEILING_BYTES)
        if self.size_bytes < STEP_BYTES:
            self._pause_until_ns = now_ns + int(took_ns * (STEP_BYTES / self.size_bytes - 1))

    def failed(self, *, posted_ns: int, now_ns: int) -> None:
        """A post failed, or took too long: cut the window."""
        if posted_ns >= self._cut_ns:
            self._cut_ns, self._slow_start = now_ns, False
            self.size_bytes = max(LEAST_BYTES, self.size_bytes / 2)

    def _learn(self, queued_bytes: int, took_ns: int, now_ns: int) -> None:
        if now_ns >= self._epoch_end_ns:
            self._epochs = (self._epochs[1], _Least())
            self._epoch_end_ns = now_ns + EPOCH_NS
        least = self._epochs[1]
        least.ns_per_byte = min(least.ns_per_byte, took_ns / queued_bytes)
        if took_ns < least.took_ns:
            least.took_ns, least.queued_bytes = took_ns, queued_bytes

    @property
    def _ns_per_byte(self) -> float:
        return min(epoch.ns_per_byte for epoch in self._epochs)

    def _expected_ns(self, queued_bytes: int) -> float:
        quickest = min(self._epochs, key=lambda epoch: epoch.took_ns)
        base_ns = max(0.0, quickest.took_ns - quickest.queued_bytes * self._ns_per_byte)
        return base_ns + queued_bytes * self._ns_per_byte


# ── transfers ─────────────────────────────────────────────────────────────────────────────────────


class Post(NamedTuple):
    """One transfer for the back end: a part of a larger one."""

    number: int
    peer: str
    pieces: Pieces
    direction: Direction
    size_bytes: int


class _Transfer:
    def __init__(self, number: int, peer: _PeerReads, rest: Pieces, direction: Direction) -> None:
        self.number, self.peer, self.direction = number, peer, direction
        self.rest: Pieces | None = rest
        """Pieces still to be posted; None: nothing more of the transfer is posted."""
        self.posts = 0
        """Number of its posts under way."""
        self.failed: str | None = None
        self.limbo = False


class _UnderWay(NamedTuple):
    transfer: _Transfer
    size_bytes: int
    queued_bytes: int
    posted_ns: int


class _PeerReads:
    def __init__(self, name: str) -> None:
        self.name = name
        self.window = Window()
        self.waiting: deque[_Transfer] = deque()
        """Transfers that have more to post."""
        self.under_way_bytes = 0

    def next(self) -> _Transfer:
        """The transfer whose turn it is: reads before pushes."""
        reads = (its for its in self.waiting if its.direction is Direction.READ)
        return next(reads, self.waiting[0])


class Reads:
    """Transfers of one transfer worker."""

    def __init__(self, *, paced: bool = True) -> None:
        """`paced`: windows limit what is under way; False posts each transfer whole and at once, to
        measure what windows cost.
        """
        self._paced = paced
        self._peers: dict[str, _PeerReads] = {}
        self._under_way: dict[int, _UnderWay] = {}
        self._turns: deque[_PeerReads] = deque()
        """Peers with more to post, in the order of their turns. Others are not in it, since it is
        walked every 100 µs.
        """
        self._next_post = 1

    @property
    def under_way(self) -> int:
        """Posts that have not ended."""
        return len(self._under_way)

    def begin(self, number: int, peer: str, pieces: Pieces, direction: Direction) -> list[Outcome]:
        """Begin a transfer, whose pieces are joined and not empty. Returns Done if it has no
        pieces.
        """
        if not len(pieces.length):
            return [Done(number)]
        known = self._peers.setdefault(peer, _PeerReads(peer))
        if not known.waiting:
            self._turns.append(known)
        known.waiting.append(_Transfer(number, known, pieces, direction))
        return []

    def next_post(self, now_ns: int) -> Post | None:
        """The next post to give to the back end; None: there is none now. Ask until there
        is none.
        """
        for is_first in (True, False):  # peers that an engine waits for come first
            for _ in range(len(self._turns)):
                peer = self._turns[0]
                self._turns.rotate(-1)
                is_awaited = peer.next().direction is Direction.READ
                if is_awaited >= is_first and (size := self._size(peer, now_ns)):
                    return self._post(peer, size, now_ns)
        return None

    def pause_ns(self, now_ns: int) -> int:
        """Time at which to ask again although nothing ended, in ns; 0: no need to."""
        pauses = (peer.window.pause_ns(now_ns) for peer in self._turns)
        return min(filter(None, pauses), default=0)

    def ended(self, outcome: Outcome, now_ns: int) -> list[Outcome]:
        """A post has ended. Returns the outcome of its transfer if that has ended, too, or is in
        limbo.
        """
        post = self._under_way.pop(outcome.transfer)
        transfer, window = post.transfer, post.transfer.peer.window
        transfer.posts -= 1
        transfer.peer.under_way_bytes -= post.size_bytes
        if isinstance(outcome, Done):
            window.ended(
                size_bytes=post.size_bytes,
                queued_bytes=post.queued_bytes,
                posted_ns=post.posted_ns,
                now_ns=now_ns,
            )
            return self._settle(transfer)
        window.failed(posted_ns=post.posted_ns, now_ns=now_ns)
        self._stop(transfer, outcome.reason if isinstance(outcome, Failed) else "")
        if isinstance(outcome, Failed) or transfer.limbo:
            return self._settle(transfer)
        transfer.limbo = True
        return [Limbo(transfer.number)]

    def forget(self, name: str) -> list[Outcome]:
        """Post nothing more to this peer. Returns transfers that failed by this; posts under way
        end, or do not.
        """
        peer, told = self._peers.pop(name, None), list[Outcome]()
        for transfer in list(peer.waiting) if peer is not None else ():
            self._stop(transfer, "the peer was forgotten")
            told += self._settle(transfer)
        return told

    def _size(self, peer: _PeerReads, now_ns: int) -> int:
        """Bytes to post to this peer now; 0: nothing."""
        if not self._paced:
            return 1 << 62
        room = peer.window.room_bytes(peer.under_way_bytes, now_ns)
        wanted = min(int(peer.window.size_bytes) // POSTS_PER_WINDOW, POST_BYTES_MAX)
        size = max(STEP_BYTES, wanted // STEP_BYTES * STEP_BYTES)
        # Whole posts, but for a window that is narrower than one and has nothing under way.
        return size if room >= size or (room and not peer.under_way_bytes) else 0

    def _post(self, peer: _PeerReads, size: int, now_ns: int) -> Post:
        transfer = peer.next()
        assert transfer.rest is not None
        of_many = int(transfer.rest.length[:PIECES_PER_POST_MAX].sum())
        pieces, rest = cut(transfer.rest, min(size, of_many))
        transfer.rest = rest
        if not len(rest.length):
            self._has_posted(transfer)
        size_bytes = total_bytes(pieces)
        transfer.posts += 1
        peer.under_way_bytes += size_bytes
        number, self._next_post = self._next_post, self._next_post + 1
        self._under_way[number] = _UnderWay(transfer, size_bytes, peer.under_way_bytes, now_ns)
        return Post(number, peer.name, pieces, transfer.direction, size_bytes)

    def _has_posted(self, transfer: _Transfer) -> None:
        """All pieces of a transfer are posted: its peer's queue goes on."""
        transfer.rest = None
        transfer.peer.waiting.remove(transfer)
        if not transfer.peer.waiting:
            self._turns.remove(transfer.peer)

    def _stop(self, transfer: _Transfer, why: str) -> None:
        """Post nothing more of a transfer, which has failed."""
        if transfer.failed is None:
            transfer.failed = why
        if transfer.rest is not None:
            self._has_posted(transfer)

    def _settle(self, transfer: _Transfer) -> list[Outcome]:
        """The outcome of a transfer, if all its posts have ended; else empty."""
        if transfer.posts or transfer.rest is not None or transfer.limbo:
            return []
        if transfer.failed is None:
            return [Done(transfer.number)]
        return [Failed(transfer.number, transfer.failed[:REASON_CHARS_MAX])]
