"""Which part of which transfer is moved next, and how transfers end. Pure.

    transfer 7 ─ peer b ─ 64 MiB ──▶ posts 20, 21, 22 …, as many as b's window has room for
    transfer 8 ─ peer b ─ waits for its turn
    transfer 9 ─ peer c ─ post 23: peers take turns and never wait for each other

A transfer ends when all its posts have. One that failed posts no more, but its posts under way
still write: it is reported as failed only when they have ended too. With a post whose end cannot be
known it is in limbo at once, and for ever.

Reads go first: an engine waits for them, while pushes run beside a prefill.

Does not cover: moving bytes (`ports.Transport`), deadlines (`watch`, on the node's side).
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from kvstore.ports import End, Outcome, Pieces
from kvstore.transport.pieces import cut, total_bytes
from kvstore.transport.window import STEP_BYTES, Window
from kvstore.wire.transfer_worker import REASON_CHARS_MAX, Direction, Done, Failed, Limbo

POST_BYTES_MAX: Final = 32 << 20
POSTS_PER_WINDOW: Final = 4
"""Posts that a window is divided into: while one ends, the others are under way."""
PIECES_PER_POST_MAX: Final = 4096

Told = Done | Failed | Limbo


class Post(NamedTuple):
    """One transfer for the back end: a part of a larger one."""

    number: int
    peer: str
    pieces: Pieces
    direction: Direction
    size_bytes: int


class _Transfer:
    def __init__(self, number: int, peer: str, rest: Pieces, direction: Direction) -> None:
        self.number = number
        self.peer = peer
        self.direction = direction
        self.rest: Pieces | None = rest
        """Pieces still to be posted; None: nothing more of the transfer is posted."""
        self.posts = 0
        """Number of its posts under way."""
        self.failed: str | None = None
        self.limbo = False


class _UnderWay(NamedTuple):
    transfer: _Transfer
    peer: _PeerReads
    size_bytes: int
    queued_bytes: int
    posted_ns: int


class _PeerReads:
    def __init__(self) -> None:
        self.window = Window()
        self.waiting: deque[_Transfer] = deque()
        """Transfers that have more to post."""
        self.under_way_bytes = 0

    def reads(self) -> bool:
        """Whether an engine waits for something from this peer."""
        return any(its.direction is Direction.READ for its in self.waiting)

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
        self._turns: deque[str] = deque()
        """Peers with more to post, in the order of their turns. Others are not in it, since it is
        walked every 100 µs.
        """
        self._next_post = 1

    @property
    def under_way(self) -> int:
        """Posts that have not ended."""
        return len(self._under_way)

    def begin(self, number: int, peer: str, pieces: Pieces, direction: Direction) -> list[Told]:
        """Begin a transfer, whose pieces are joined and not empty. Returns Done if it has no
        pieces.
        """
        if not len(pieces.length):
            return [Done(number)]
        known = self._peers.setdefault(peer, _PeerReads())
        if not known.waiting:
            self._turns.append(peer)
        known.waiting.append(_Transfer(number, peer, pieces, direction))
        return []

    def next_post(self, now_ns: int) -> Post | None:
        """The next post to give to the back end; None: there is none now. Ask until there
        is none.
        """
        for is_first in (True, False):  # peers that an engine waits for come first
            for _ in range(len(self._turns)):
                name = self._turns[0]
                self._turns.rotate(-1)
                peer = self._peers[name]
                if peer.reads() >= is_first and (size := self._size(peer, now_ns)):
                    return self._post(name, peer, size, now_ns)
        return None

    def pause_ns(self, now_ns: int) -> int:
        """Time at which to ask again although nothing ended, in ns; 0: no need to."""
        pauses = (self._peers[name].window.pause_ns(now_ns) for name in self._turns)
        return min(filter(None, pauses), default=0)

    def ended(self, outcome: Outcome, now_ns: int) -> list[Told]:
        """A post has ended. Returns the outcome of its transfer if that has ended, too, or is in
        limbo.
        """
        post = self._under_way.pop(outcome.number)
        transfer, window = post.transfer, post.peer.window
        transfer.posts -= 1
        post.peer.under_way_bytes -= post.size_bytes
        if outcome.end is End.DONE:
            window.ended(
                size_bytes=post.size_bytes,
                queued_bytes=post.queued_bytes,
                posted_ns=post.posted_ns,
                now_ns=now_ns,
            )
            return self._settle(transfer)
        window.failed(posted_ns=post.posted_ns, now_ns=now_ns)
        self._stop(transfer, outcome.reason)
        if outcome.end is End.UNKNOWN and not transfer.limbo:
            transfer.limbo = True
            return [Limbo(transfer.number)]
        return self._settle(transfer)

    def forget(self, name: str) -> list[Told]:
        """Post nothing more to this peer. Returns transfers that failed by this; posts under way
        end, or do not.
        """
        peer = self._peers.get(name)
        if peer is None:
            return []
        told: list[Told] = []
        for transfer in list(peer.waiting):
            self._stop(transfer, "the peer was forgotten")
            told += self._settle(transfer)
        del self._peers[name]
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

    def _post(self, name: str, peer: _PeerReads, size: int, now_ns: int) -> Post:
        transfer = peer.next()
        assert transfer.rest is not None
        pieces, rest = cut(transfer.rest, size)
        if len(pieces.length) > PIECES_PER_POST_MAX:
            pieces = Pieces(*(part[:PIECES_PER_POST_MAX] for part in transfer.rest))
            rest = Pieces(*(part[PIECES_PER_POST_MAX:] for part in transfer.rest))
        transfer.rest = rest if len(rest.length) else None
        if transfer.rest is None:
            self._has_posted(transfer)
        size_bytes = total_bytes(pieces)
        transfer.posts += 1
        peer.under_way_bytes += size_bytes
        number, self._next_post = self._next_post, self._next_post + 1
        self._under_way[number] = _UnderWay(
            transfer, peer, size_bytes, peer.under_way_bytes, now_ns
        )
        return Post(number, name, pieces, transfer.direction, size_bytes)

    def _has_posted(self, transfer: _Transfer) -> None:
        """All pieces of a transfer are posted: its peer's queue goes on."""
        peer = self._peers[transfer.peer]
        peer.waiting.remove(transfer)
        if not peer.waiting:
            self._turns.remove(transfer.peer)

    def _stop(self, transfer: _Transfer, why: str) -> None:
        """Post nothing more of a transfer, which has failed."""
        if transfer.failed is None:
            transfer.failed = why
        if transfer.rest is not None:
            self._has_posted(transfer)
            transfer.rest = None

    def _settle(self, transfer: _Transfer) -> list[Told]:
        """The outcome of a transfer, if all its posts have ended; else empty."""
        if transfer.posts or transfer.rest is not None or transfer.limbo:
            return []
        if transfer.failed is None:
            return [Done(transfer.number)]
        return [Failed(transfer.number, transfer.failed[:REASON_CHARS_MAX])]
