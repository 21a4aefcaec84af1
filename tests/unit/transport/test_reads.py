"""Which part is read next, and when a transfer may be called ended."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given, strategies as st

from kvstore.ports import Outcome
from kvstore.transport import reads as reads_module
from kvstore.transport.pieces import make_pieces, total_bytes
from kvstore.transport.reads import PIECES_PER_POST_MAX, Post, Reads
from kvstore.wire.transfer_worker import Direction, Done, Failed, Limbo
from tests.unit.transport.link import begin

BIG = 1 << 30


def _posts(reads: Reads, now_ns: int = 1) -> list[Post]:
    found = []
    while (post := reads.next_post(now_ns)) is not None:
        found.append(post)
    return found


def test_one_that_failed_ends_when_nothing_of_it_is_under_way() -> None:
    reads = Reads()
    begin(reads, 1, BIG)
    first, *others = _posts(reads)
    assert others
    assert reads.ended(Failed(first.number, "why"), 2) == []
    assert _posts(reads, 10**12) == []
    for post in others[:-1]:
        assert reads.ended(Done(post.number), 2) == []
    assert reads.ended(Done(others[-1].number), 2) == [Failed(1, "why")]


@pytest.mark.parametrize("later", [Done(0), Failed(0, "why"), Limbo(0)], ids=repr)
def test_limbo_is_told_once_and_is_for_ever(later: Outcome) -> None:
    reads = Reads()
    begin(reads, 1, BIG)
    first, *others = _posts(reads)
    assert reads.ended(Limbo(first.number), 2) == [Limbo(1)]
    for post in others:
        assert reads.ended(msgspec.structs.replace(later, transfer=post.number), 2) == []
    assert _posts(reads, 10**12) == []


def test_peers_do_not_wait_for_each_other() -> None:
    reads = Reads()
    begin(reads, 1, BIG, "b")
    begin(reads, 2, BIG, "c")
    posts = _posts(reads)
    assert {post.peer for post in posts[:2]} == {"b", "c"}
    for post in posts:
        if post.peer == "c":
            reads.ended(Done(post.number), 2)
    assert {post.peer for post in _posts(reads)} == {"c"}


@pytest.mark.parametrize("paced", [True, False])
def test_reads_go_before_writes_to_the_same_peer(*, paced: bool) -> None:
    """An engine waits for what is read; a push that began earlier runs beside a prefill."""
    reads = Reads(paced=paced)
    begin(reads, 1, BIG, direction=Direction.WRITE)
    under_way = _posts(reads)
    begun = len(under_way)
    begin(reads, 2, BIG, direction=Direction.WRITE)
    begin(reads, 3, BIG)
    order = []
    while under_way:
        order.append(post := under_way.pop(0))
        reads.ended(Done(post.number), 4)
        under_way += _posts(reads, 4)
    behind = order[begun:]
    count = sum(post.direction is Direction.READ for post in behind)
    assert {post.direction for post in behind[:count]} == {Direction.READ}
    assert sum(post.size_bytes for post in behind[:count]) == BIG
    assert sum(post.size_bytes for post in order) == 3 * BIG


def test_reads_go_before_writes_to_other_peers() -> None:
    """A transfer worker has one processor: whoever may post, reads are posted first, and windows
    are full."""
    reads = Reads()
    begin(reads, 1, BIG, "b", Direction.WRITE)
    begin(reads, 2, BIG, "c", Direction.WRITE)
    begin(reads, 3, BIG, "c", Direction.READ)
    posts = _posts(reads)
    assert posts[0].peer == "c"
    of_c = [post.direction for post in posts if post.peer == "c"]
    assert set(of_c) == {Direction.READ}
    first_of_b = next(at for at, post in enumerate(posts) if post.peer == "b")
    assert all(post.direction is Direction.READ for post in posts[:first_of_b])
    assert len(of_c) <= first_of_b


def test_a_push_goes_on_when_nothing_is_read() -> None:
    reads = Reads()
    begin(reads, 1, 5, direction=Direction.WRITE)
    begin(reads, 2, 5)
    first, second = _posts(reads)
    assert (first.direction, second.direction) == (Direction.READ, Direction.WRITE)


def test_reads_and_writes_share_the_window_of_their_peer() -> None:
    reads = Reads()
    begin(reads, 1, BIG, direction=Direction.WRITE)
    posts = _posts(reads)
    begin(reads, 2, BIG)
    assert _posts(reads, 2) == []
    reads.ended(Done(posts[0].number), 3)
    assert {post.direction for post in _posts(reads, 3)} == {Direction.READ}


def test_peers_without_more_to_post_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer worker asks every 100 µs; whom it read from once may be a thousand."""
    looked: list[reads_module._PeerReads] = []

    class Seen(reads_module._PeerReads):
        def __getattribute__(self, name: str) -> object:
            looked.append(self)
            return super().__getattribute__(name)

    monkeypatch.setattr(reads_module, "_PeerReads", Seen)
    reads = Reads()
    for number in range(100):
        begin(reads, number, 5, f"peer-{number}")
    posts = _posts(reads)
    assert [post.peer for post in posts] == [f"peer-{number}" for number in range(100)]
    for post in posts:
        reads.ended(Done(post.number), 2)
    begin(reads, 100, BIG, "peer-7")
    looked.clear()
    assert _posts(reads, 3)
    reads.pause_ns(3)
    assert len(set(looked)) == 1
    reads.forget("peer-7")
    looked.clear()
    assert reads.next_post(4) is None
    assert reads.pause_ns(4) == 0
    assert not looked


def test_a_peer_whose_transfer_failed_takes_turns_again() -> None:
    reads = Reads()
    begin(reads, 1, BIG)
    first, *others = _posts(reads)
    reads.ended(Failed(first.number, "why"), 2)
    assert reads.next_post(10**12) is None
    for post in others:
        reads.ended(Done(post.number), 3)
    begin(reads, 2, 5)
    begin(reads, 3, 5, "c")
    begin(reads, 4, 5)
    assert [post.peer for post in _posts(reads, 10**12)] == ["b", "c", "b"]


def test_a_forgotten_peer_gets_nothing_more_and_its_transfers_end() -> None:
    reads = Reads()
    begin(reads, 1, BIG)
    posts = _posts(reads)
    begin(reads, 2, BIG)
    assert reads.forget("b") == [Failed(2, "the peer was forgotten")]
    assert _posts(reads) == []
    told = [each for post in posts for each in reads.ended(Failed(post.number, ""), 3)]
    assert told == [Failed(1, "the peer was forgotten")]
    begin(reads, 3, 5)
    (post,) = _posts(reads)
    assert reads.ended(Done(post.number), 5) == [Done(3)]


def test_many_pieces_go_in_several_posts() -> None:
    reads = Reads(paced=False)
    count = 2 * PIECES_PER_POST_MAX + 1
    at = [64 * n for n in range(count)]
    reads.begin(1, "b", make_pieces(at, at, [1] * count), Direction.READ)
    posts = _posts(reads)
    assert [len(post.pieces.length) for post in posts] == [4096, 4096, 1]


@given(
    st.lists(st.tuples(st.sampled_from("bc"), st.integers(1, 1 << 25)), max_size=6), st.integers()
)
def test_all_bytes_are_read_once_in_any_order_of_ends(
    transfers: list[tuple[str, int]], seed: int
) -> None:
    reads, now_ns, moved, order = Reads(), 1, 0, Random(seed)
    under_way: list[Post] = []
    told: list[Outcome] = []
    sizes = [size for _, size in transfers]
    for number, (peer, size) in enumerate(transfers):
        begin(reads, number, size, peer)
    while True:
        now_ns = max(now_ns + 10**9, reads.pause_ns(now_ns))
        under_way += _posts(reads, now_ns)
        if not under_way:
            break
        post = under_way.pop(order.randrange(len(under_way)))
        assert post.size_bytes == total_bytes(post.pieces) > 0
        moved += post.size_bytes
        told += reads.ended(Done(post.number), now_ns)
        assert sum(sizes[each.transfer] for each in told) <= moved, "done before its last post"
    assert all(isinstance(each, Done) for each in told)
    assert sorted(each.transfer for each in told) == list(range(len(transfers)))
    assert moved == sum(sizes)
    assert reads.under_way == 0
