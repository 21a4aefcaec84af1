"""Attaching: when sessions open and end, who is refused why, whose slots come back when, and which
engines are followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.engine import state as state_module
from kvstore.engine.events import (
    Admit,
    Command,
    Follow,
    Hangup,
    Received,
    Send,
    Unfollow,
)
from kvstore.types import SLOT_BYTES_MIN, ConnectionId, EngineSource, Shard
from kvstore.wire.messages import (
    PROTOCOL_VERSION,
    EngineMessage,
    Grant,
    Hint,
    LeaseAsk,
    Pinned,
    Quiesce,
    Quiet,
    Refused,
    Seal,
    SessionClosed,
    SessionOpen,
    Story,
    Welcome,
)
from kvstore.wire.space import fingerprint
from tests.unit.engine.harness import (
    HALVES,
    LATENT,
    LAYERS,
    SMALL,
    WHOLE,
    Hellos,
    Node,
    Peer,
    arrays,
    attached,
    checksum,
    keys,
    pairs,
    space,
)

# ── forming ──────────────────────────────────────────────────────────────────────────────────────


def test_a_session_opens_when_all_ranks_are_quiet_and_not_before() -> None:
    node = Node()
    shape = Hellos(shards=HALVES)
    first = node.connect(shape.rank_hello(0))
    assert node.admitted == [first]
    assert node.count(first, Quiesce) == 0
    scheduler = node.connect(shape.scheduler_hello())
    assert node.count(first, Quiesce) == 0, "a rank is missing"
    second = node.connect(shape.rank_hello(1))
    asked = node.last(first, Quiesce).session
    assert node.last(second, Quiesce).session == asked
    node.hear(first, Quiet(asked))
    assert node.count(scheduler, SessionOpen) == 0
    node.hear(second, Quiet(asked))
    opened = node.last(scheduler, SessionOpen)
    assert (opened.session, opened.shard_counts) == (asked, (2,))
    kinds = [type(message) for message in node.sent[scheduler]]
    assert kinds == [SessionOpen, Grant]
    assert node.engine.counters.sessions_opened == 1
    assert node.last(scheduler, Grant).session == asked


def test_welcome_says_what_the_node_is_and_only_ranks_get_the_arena() -> None:
    node = Node(slots=32)
    peer = Hellos()
    commands = node.step(
        Received(ConnectionId(1), peer.scheduler_hello()),
        Received(ConnectionId(2), peer.rank_hello(0)),
    )
    admits = [c for c in commands if isinstance(c, Admit)]
    assert [a.with_arena for a in admits] == [False, True]
    assert admits[0].welcome == Welcome(
        protocol=PROTOCOL_VERSION,
        incarnation=7,
        now_ns=node.now_ns,
        arena_bytes=32 * SLOT_BYTES_MIN,
        generation_bytes=4096 + 8 * 32,
    )
    first_quiesce = next(i for i, c in enumerate(commands) if isinstance(c, Send))
    assert commands.index(admits[1]) < first_quiesce


@pytest.mark.parametrize(
    ("session", "why"),
    [
        (0, "was quiet for"),
        (1, "was quiet for"),
        (lambda current: current, "a Quiet for a session that it was quiet for"),
        (lambda current: current + 1, "nobody asked"),
        (2**62, "nobody asked"),
    ],
)
def test_a_quiet_that_was_not_asked_for_ends_the_connection_and_frees_nothing(
    session: int | Callable[[int], int], why: str
) -> None:
    node, peer = attached(Node())
    asked = session if isinstance(session, int) else session(peer.session)
    node.hear(peer.ranks[0], Quiet(asked))
    assert why in node.hangups[peer.ranks[0]]
    assert node.quarantined() == 8


def test_an_answer_that_comes_after_the_next_question_is_no_answer() -> None:
    node, peer = attached(Node(), shards=HALVES)
    asked = []
    for _ in range(2):
        scheduler = node.connect(peer.scheduler_hello())
        asked.append(node.last(peer.ranks[0], Quiesce).session)
    held = node.granted()
    node.hear(peer.ranks[0], Quiet(asked[0]))
    assert node.granted() == held
    assert node.count(scheduler, SessionOpen) == 0
    node.hear(peer.ranks[0], Quiet(asked[1]))
    assert node.granted() == held // 2
    assert not node.hangups.keys() & set(peer.ranks)


def test_engines_share_within_tenant_space_and_epoch_only() -> None:
    node = Node(slots=64)
    old = Peer(node, "a")
    old.store(1, 2)
    new = Peer(node, "b", epoch="w2")
    assert node.last(new.ranks[0], Quiesce).weights_epoch == "w2"
    assert old.hint(1, 2) == [True, True]
    assert new.hint(1, 2) == [False, False]
    assert Peer(node, "c").hint(1) == [True]
    assert Peer(node, "d", tenant="u").hint(1) == [False]
    assert Peer(node, "f", space=space("other", layer_bytes=16 << 10)).hint(1) == [False]


# ── leaving and coming back ──────────────────────────────────────────────────────────────────────


def test_a_rank_that_leaves_ends_the_session_and_its_slots_wait_for_its_end() -> None:
    node, peer = attached(Node())
    peer.store(1)
    peer.lease(5, 1)
    credits = len(peer.unused())
    assert credits == 7
    node.end(peer.ranks[0])
    assert node.last(peer.scheduler, SessionClosed).session == peer.session
    assert node.engine.leases() == []
    assert (node.granted(), node.quarantined()) == (0, credits)
    assert node.engine.counters.slots_quarantined == credits
    assert peer.ranks[0] not in node.released
    assert peer.lease(6, 1).slots == b"", "no lookups without a session"
    assert peer.hint(1) == [False]
    node.tick(3_600_000)
    assert node.quarantined() == credits, "no timer frees what may still be written"
    node.exit(peer.ranks[0])
    assert node.quarantined() == 0
    assert peer.ranks[0] in node.released
    assert {slot for slot, _ in peer.unused()} <= node.raised.keys()


def test_the_same_process_attaching_again_frees_its_quarantine() -> None:
    node, peer = attached(Node())
    before = set(peer.unused())
    node.end(peer.ranks[0])
    assert node.quarantined() == len(before)
    old, peer.ranks[0] = peer.ranks[0], node.connect(peer.rank_hello(0))
    assert node.quarantined() == 0
    assert old in node.released
    peer.be_quiet()
    assert not before & set(peer.credits()), "generations were raised"
    node.exit(old)
    assert node.granted() == len(peer.credits()), "the old pidfd means nothing any more"


def test_a_hello_of_the_same_rank_replaces_the_connection() -> None:
    node, peer = attached(Node())
    old = peer.ranks[0]
    peer.ranks[0] = node.connect(peer.rank_hello(0))
    assert "attached again" in node.hangups[old]
    assert node.quarantined() == 0, "the same process says that it writes no more"
    assert node.last(peer.scheduler, SessionClosed).session == peer.session
    peer.be_quiet()
    node.end(old)
    assert node.count(peer.scheduler, SessionClosed) == 1, "its end was known"


@pytest.mark.parametrize("ended_first", [True, False])
def test_a_killed_rank_leaves_nothing_in_either_order_of_the_news(ended_first: bool) -> None:
    node, peer = attached(Node())
    rank = peer.ranks[0]
    if ended_first:
        node.end(rank)
        node.exit(rank)
    else:
        node.exit(rank)
        assert rank in node.hangups
        node.end(rank)
    assert (node.granted(), node.quarantined()) == (0, 0)
    assert rank in node.released
    assert node.count(peer.scheduler, SessionClosed) == 1


def test_a_scheduler_that_leaves_lets_the_ranks_give_their_credits_back() -> None:
    node, peer = attached(Node())
    peer.store(1)
    peer.lease(3, 1)
    held = node.granted()
    node.end(peer.scheduler)
    assert node.engine.leases() == []
    assert node.granted() == held, "a rank may still write"
    node.hear(peer.ranks[0], Quiet(node.last(peer.ranks[0], Quiesce).session))
    assert node.granted() == 0
    old = peer.session
    peer.scheduler = node.connect(peer.scheduler_hello())
    peer.be_quiet()
    assert peer.session > old
    assert peer.hint(1) == [True], "what was sealed stays"


def test_the_spaces_that_engines_attached_for_last_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_module, "KNOWN_SPACES_MAX", 2)
    node = Node()
    for tenant in ("t", "u", "t", "v"):
        Peer(node, tenant=tenant)
    assert [tenant for tenant, _ in node.state.known] == ["t", "v"]


def test_the_space_of_an_open_session_stays_known_whoever_attaches_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New weights are another space: an engine that is trained has thousands."""
    monkeypatch.setattr(state_module, "KNOWN_SPACES_MAX", 2)
    node = Node()
    stays = Peer(node, "stays")
    for epoch in "123":
        other = Peer(node, "other", epoch=epoch)
        node.end(other.scheduler, *other.ranks)
    stays.store(1)
    assert len(node.state.known) == 2
    assert [block[3] for block in node.offered] == [keys(1)]


def test_an_unknown_connection_that_ends_is_let_go() -> None:
    node = Node()
    node.end(99)
    assert node.released == [99]
    node.exit(98)
    assert node.released == [99]


# ── several ranks ────────────────────────────────────────────────────────────────────────────────


def test_a_rank_writes_only_its_own_column() -> None:
    node, peer = attached(Node(), shards=HALVES)
    foreign = peer.unused(1)[0]
    peer.seal(1, places=[foreign], rank=0)
    assert node.blocks() == {}
    assert node.engine.counters.stale_slots == 1


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────


def test_another_protocol_is_refused_before_anything_else() -> None:
    node = Node()
    peer = Hellos()
    other = PROTOCOL_VERSION + 1
    for hello in (peer.scheduler_hello(protocol=other), peer.rank_hello(0, protocol=other)):
        connection = node.connect(hello)
        refused = node.refusal(connection)
        assert refused.permanent
        assert refused.reason == (
            f"this node speaks attach protocol {PROTOCOL_VERSION}, the engine {other}: install the"
            " same kvstore version on both"
        )
        assert connection in node.released
    assert node.engine.nodes()[0].owners == 0
    assert node.engine.counters.protocol_refusals == 2


def test_one_connection_more_than_allowed_is_refused_for_now() -> None:
    node = Node(connection_count_max=2)
    Peer(node)
    connection = node.connect(Hellos("other").scheduler_hello())
    refused = node.refusal(connection)
    assert not refused.permanent
    assert refused.reason == "2 connections are attached already"
    assert node.engine.nodes()[0].owners == 1


def test_a_process_that_only_keeps_slots_in_quarantine_takes_nobodys_place() -> None:
    node = Node(connection_count_max=2)
    gone = Peer(node)
    node.end(gone.scheduler, *gone.ranks)
    assert node.quarantined() > 0
    assert Peer(node, "next").session


def test_more_ranks_than_the_scheduler_speaks_of_are_refused() -> None:
    node = Node()
    shape = Hellos(shards=HALVES)
    ranks = [node.connect(shape.rank_hello(rank)) for rank in range(2)]
    scheduler = node.connect(shape.scheduler_hello(rank_count=1))
    for connection in (*ranks, scheduler):
        assert node.refusal(connection).reason == (
            "2 ranks are attached where its scheduler speaks of 1: two engines may share an"
            " engine_id"
        )
    assert node.engine.nodes()[0].owners == 0


def unfit(*shards: Shard, **changes: Any) -> Refused:
    """What a peer with these shards hears when its last rank differs by `changes`."""
    node = Node(slab_slots=4)
    shape = Hellos(shards=shards, space=space())
    connections = [node.connect(shape.scheduler_hello())]
    for rank in range(len(shards)):
        last = rank == len(shards) - 1
        connections.append(node.connect(shape.rank_hello(rank, **(changes if last else {}))))
    refusals = {node.refusal(connection) for connection in connections}
    assert len(refusals) == 1, "all are told the same"
    assert node.engine.nodes()[0].owners == 0
    assert sorted(node.released) == connections
    return refusals.pop()


@pytest.mark.parametrize(
    ("shards", "changes", "sentence"),
    [
        (HALVES, {"space": SMALL}, "its ranks report different models or settings: all ranks must"),
        ((HALVES[0], HALVES[0]), {}, "its ranks do not cover all layers and heads exactly once"),
        ((HALVES[0],), {}, "its ranks do not cover all layers and heads exactly once"),
        ((WHOLE, HALVES[0]), {}, "its ranks do not cover all layers and heads exactly once"),
        (
            (Shard(0, 2, 0, 1), Shard(0, 1, 0, 2), Shard(2, LAYERS, 0, 2)),
            {},
            "its ranks do not cover all layers and heads exactly once",
        ),
        ((Shard(0, LAYERS + 1, 0, 1),), {}, "rank 0 reports layers or heads that the model does"),
        ((Shard(0, LAYERS, 1, 3),), {}, "rank 0 reports layers or heads that the model does"),
        ((Shard(0, LAYERS, 1, 1),), {"block_bytes": 1}, "rank 0 reports layers or heads that the"),
        (HALVES, {"rank": 2}, "its ranks are not numbered from 0 to 1"),
        (HALVES, {"block_bytes": 99}, "rank 1 reports blocks of 99 bytes where its layers and"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_for_good(
    shards: tuple[Shard, ...], changes: dict[str, Any], sentence: str
) -> None:
    refused = unfit(*shards, **changes)
    assert refused.reason.startswith(sentence)
    assert refused.permanent


def test_a_block_larger_than_a_slab_names_the_option_that_helps() -> None:
    node = Node(slab_slots=2)
    shape = Hellos(space=space())
    node.connect(shape.scheduler_hello())
    rank = node.connect(shape.rank_hello(0))
    assert node.refusal(rank).reason == (
        f"a block of rank 0 takes {3 * SLOT_BYTES_MIN} bytes, more than a slab of "
        f"{2 * SLOT_BYTES_MIN}: start the node with a larger --slab (and --dram)"
    )


# ── who may say what ─────────────────────────────────────────────────────────────────────────────


def test_a_second_hello_ends_the_connection() -> None:
    node, peer = attached(Node())
    node.hear(peer.scheduler, peer.scheduler_hello())
    assert node.hangups[peer.scheduler] == "a second Hello on one connection"
    assert node.engine.counters.protocol_refusals == 1


def test_the_first_datagram_must_be_a_hello() -> None:
    node = Node()
    commands = node.hear(50, Quiet(1))
    assert isinstance(commands[0], Hangup)
    assert node.hangups[50] == "the first datagram must be a Hello"
    assert node.released == [50]
    assert node.engine.counters.protocol_refusals == 1


@pytest.mark.parametrize("role", ["scheduler", "rank"])
def test_messages_of_the_other_role_end_the_connection(role: str) -> None:
    node, peer = attached(Node())
    messages: list[EngineMessage] = (
        [Quiet(1), Pinned(1)]
        if role == "scheduler"
        else [Hint(1, keys(1)), LeaseAsk(1, keys(1)), Story(request="r")]
    )
    for message in messages:
        connection = peer.scheduler if role == "scheduler" else peer.ranks[0]
        node.hear(connection, message)
        assert node.hangups[connection] == f"{type(message).__name__} from a {role}"
        peer = Peer(node)


# ── ranks that hold the same shard (ADR 2): one writes, all read ─────────────────────────────────


def test_a_replica_that_seals_is_hung_up_and_changes_nothing() -> None:
    node, peer = attached(Node(), shards=LATENT)
    place = peer.unused()[0]
    slots, generations = arrays([place])
    node.hear(peer.ranks[1], Seal(peer.session, keys(1), slots, generations, checksum(1)))
    assert "does not write" in node.hangups[peer.ranks[1]]
    assert node.blocks() == {}
    assert node.count(peer.scheduler, SessionClosed) == 1
    assert node.quarantined() == 0, "it was served nothing"


@pytest.mark.parametrize("exited", [False, True])
def test_a_replica_that_leaves_ends_the_session_but_not_the_writers_slots(exited: bool) -> None:
    node, peer = attached(Node(), shards=LATENT)
    granted = node.granted()
    assert granted > 0
    peer.lease(1)
    if exited:
        node.exit(peer.ranks[1])
    else:
        node.end(peer.ranks[1])
    assert node.count(peer.scheduler, SessionClosed) == 1
    assert (node.granted(), node.quarantined()) == (granted, 0), "the writer may be copying"
    peer.ranks[1] = node.connect(peer.rank_hello(1, process="another"))
    node.hear(peer.ranks[1], Quiet(node.last(peer.ranks[1], Quiesce).session))
    assert node.count(peer.scheduler, SessionOpen) == 1, "the writer is not quiet yet"
    peer.be_quiet()
    assert node.count(peer.scheduler, SessionOpen) == 2
    peer.store(5)
    assert len(pairs(peer.lease(2, 5))) == 1


# ── engines that publish KV events ───────────────────────────────────────────────────────────────


def follows(commands: list[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, Follow | Unfollow)]


def test_an_engine_that_publishes_is_followed_from_its_session_to_the_end_of_its_scheduler() -> (
    None
):
    node = Node(follows=True)
    shape = Hellos(shards=HALVES)
    hello = shape.scheduler_hello(events="ipc:///e", events_replay="ipc:///r", data_rank=3)
    ranks = [node.connect(shape.rank_hello(rank)) for rank in range(2)]
    scheduler = node.connect(hello)
    session = node.last(ranks[0], Quiesce).session
    assert follows(node.hear(ranks[0], Quiet(session))) == []
    source = EngineSource(
        engine=shape.name,
        rank=3,
        endpoint="ipc:///e",
        replay_endpoint="ipc:///r",
        tenant=shape.tenant,
        space=fingerprint(shape.space, weights_epoch=shape.epoch),
        hash_seed=shape.space.hash_seed,
        block_tokens=shape.space.block_tokens,
        names_are_keys=True,
    )
    said = Follow(ConnectionId(scheduler), source)
    assert follows(node.hear(ranks[1], Quiet(session))) == [said]
    assert follows(node.end(ranks[1])) == [], "it computes without us"
    over = [Unfollow(ConnectionId(scheduler))]
    assert follows(node.exit(scheduler)) == over
    assert follows(node.end(scheduler)) == [], "once"


@pytest.mark.parametrize(("wanted", "events"), [(False, "ipc:///e"), (True, "")])
def test_who_does_not_publish_or_where_nobody_wants_it_is_not_followed(
    wanted: bool, events: str
) -> None:
    node, shape = Node(follows=wanted), Hellos()
    rank = node.connect(shape.rank_hello(0))
    scheduler = node.connect(shape.scheduler_hello(events=events))
    opened = node.hear(rank, Quiet(node.last(rank, Quiesce).session))
    assert node.count(scheduler, SessionOpen) == 1
    assert follows([*opened, *node.end(scheduler)]) == []
