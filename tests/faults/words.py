"""Every word of the attach protocol, and of nodes among themselves, once: what mutations begin
from."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.types import Incarnation, Shard, SpaceId
from kvstore.wire.messages import (
    Distrust,
    Drop,
    Grant,
    Hint,
    HintReply,
    LeaseAsk,
    LeaseMore,
    LeaseRelease,
    LeaseRenew,
    LeaseReply,
    Measured,
    Message,
    Pinned,
    PushCancel,
    PushClose,
    PushEnd,
    PushExpect,
    PushOpen,
    Quiesce,
    Quiet,
    Refused,
    Seal,
    SessionClosed,
    SessionOpen,
    Story,
    Unserved,
    Welcome,
)
from kvstore.wire.peers import (
    Answer,
    Ask,
    GiveBack,
    GivenBack,
    PeerHello,
    PeerWelcome,
    Pushed,
    PushGrant,
    PushOver,
    PushRevoke,
    ServeAnswer,
    ServeAsk,
)
from tests.unit.engine.harness import Hellos, arrays, keys


def words(session: int, places: Sequence[tuple[int, int]]) -> list[Message]:
    """What an engine says in a session, once each; in the words of a rank first."""
    slots, generations = arrays(places)
    sums = b"c" * 16 * len(places)
    return [
        Seal(session, keys(*range(len(places))), slots, generations, sums),
        Drop(session, slots, generations),
        Distrust(slots, generations),
        Pinned(4096, "memlock"),
        Quiet(session),
        Hint(1, keys(1, 2, 3)),
        LeaseAsk(5, keys(1, 2, 3), True),
        LeaseRenew([1, 2, 3]),
        LeaseRelease([1, 2, 3]),
        Measured(1_000, 10),
        PushOpen("cmpl-1"),
        PushExpect("cmpl-2", "p", keys(4, 5), 50),
        PushCancel("cmpl-2"),
        PushClose("cmpl-1", "aborted"),
        Unserved("its cache is on a GPU"),
        Story("r" * 40, session=session, leases=[1, 2], prompt_tokens=99, outcome="hit"),
    ]


def hellos() -> list[Message]:
    """How the processes of a stranger introduce themselves."""
    stranger = Hellos("stranger")
    return [stranger.scheduler_hello(), stranger.rank_hello(0)]


def answers() -> list[Message]:
    """What a node says, once each."""
    slots, generations = arrays([(0, 1), (16, 2)])
    return [
        Welcome(1, 2, 3, 4, 5),
        Refused("no", permanent=True),
        Quiesce(3),
        SessionOpen(3, (1,)),
        SessionClosed(3, "over"),
        HintReply(1, b"\x07"),
        LeaseReply(1, 2, slots, generations),
        LeaseMore(1, slots, generations),
        PushEnd("cmpl-2", reason="no such node"),
        Grant(3, slots, generations),
    ]


def asks_of_peers() -> list[Ask]:
    """What a node asks of another one, once each."""
    space = SpaceId(bytes(32))
    return [
        PeerHello("a", Incarnation(7)),
        ServeAsk(1, "t", space, keys(1, 2, 3)),
        GiveBack(1),
        PushGrant(
            grant=2,
            epoch=3,
            transfer="cmpl-1",
            tenant="t",
            space=space,
            keys=keys(4, 5),
            extents=bytes(8),
            block_bytes=4096,
            deadline_ms=50,
            descriptor=b"d",
        ),
        PushRevoke(2),
    ]


def answers_of_peers() -> list[Answer]:
    """What it is answered."""
    slots, _ = arrays([(0, 1), (16, 2)])
    shards = Shard(0, 4, 0, 1), Shard(0, 4, 1, 2)
    its = {"shards": shards, "block_bytes": (8, 8), "checksums": b"c" * 32}
    return [
        PeerWelcome("b", Incarnation(8), b"d"),
        ServeAnswer(1, slots=slots, **its),  # type: ignore[arg-type]
        GivenBack(1, b"\1"),
        Pushed(grant=2, epoch=3, first=0, **its),  # type: ignore[arg-type]
        PushOver(2, 3, "it was taken back", is_quiet=True),
    ]
