"""A feed and a replica in one process: what is lost on the way is told by a snapshot."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest

from kvstore.client.index import IndexClient, channel
from kvstore.config.cluster import IndexConfig
from kvstore.config.values import HostPort
from kvstore.engine.events import OffersUntold
from kvstore.errors import NodeBusy
from kvstore.index.feed import Trust
from kvstore.index.index import Member
from kvstore.indexer.replica import Replica
from kvstore.net.aio import LoopThread
from kvstore.peers import changes, feed
from kvstore.peers.feed import Feeder, Slice
from kvstore.proto import forms
from kvstore.testing.raw_engine import make_keys
from kvstore.types import KEY_BYTES, Incarnation, SpaceId, Tier
from kvstore.wire.feed import (
    MESSAGE_BYTES_MAX,
    Change,
    Delta,
    FeedBeat,
    Hello,
    Left,
    OfStream,
    Removed,
    SnapshotPart,
    Stored,
    encode,
)
from kvstore.wire.load import EngineEntry, Load
from tests.integration.node.conftest import eventually

SPACE = SpaceId(bytes(32))
KEYS = make_keys(400)
CONVERGES_S = 120.0


class World:
    """A replica, and a node that is nothing but its feed and what it holds."""

    def __init__(self) -> None:
        self.loop = LoopThread("test")
        self.replica = self.start(0)
        self.held: list[bytes | None] = []
        """By row; what is gone leaves its row empty."""
        self.dropped: set[bytes] = set()
        self.busy = 0
        self.feeder = Feeder(
            self.loop, Hello("n1", Incarnation(7), 0, 0), [self.replica.address], None
        )
        self.client = IndexClient([self.replica.address], insecure=True, timeout_s=5)

    def start(self, port: int) -> Replica:
        at = HostPort("127.0.0.1", port)
        config = IndexConfig(listen=at, entries=100_000, plain=True, tls=None)
        return Replica(config, self.loop)

    def ask(self, row: int) -> Slice:
        if self.busy:
            self.busy -= 1
            raise NodeBusy("later")
        keys = [key for key in self.held[row : row + 100] if key is not None]
        return [self.offer(keys)] if keys else [], row + 100 if row + 100 < len(self.held) else -1

    def offer(self, keys: list[bytes], *, stored: bool = True) -> Any:
        return (Stored if stored else Removed)("t", SPACE, Tier.DRAM, b"".join(keys))

    def store(self, keys: list[bytes]) -> None:
        self.held += keys
        self.feeder.log.append(self.offer(keys))

    def drop(self, keys: list[bytes]) -> None:
        self.held = [None if key in keys else key for key in self.held]
        self.dropped.update(keys)
        self.feeder.log.append(self.offer(keys, stored=False))

    def turn(self) -> None:
        """The loop has taken what was put."""
        self.loop.call(asyncio.sleep(0), timeout_s=CONVERGES_S)

    def is_known(self) -> bool:
        """Whether the replica believes exactly what is held."""

        def asks() -> bool:
            found = {node.node: node.trust for node in self.client.nodes().nodes}
            return found == {"n1": Trust.EXACT} and self.seen() == set(self.held) - {None}

        return eventually(asks, timeout_s=CONVERGES_S)

    def seen(self) -> set[bytes]:
        """What the replica has of all that was ever held."""
        known, at, found = self.dropped.union(self.held), 0, set[bytes]()
        asked = [key for key in KEYS if key in known]
        while at < len(asked):
            matches = self.client.match("t", SPACE, b"".join(asked[at:])).matches
            count = max((match.dram_blocks for match in matches), default=0)
            found.update(asked[at : at + count])
            at += count + 1
        return found

    def close(self) -> None:
        self.client.close()
        self.feeder.close()
        self.replica.close()
        self.loop.close()


@pytest.fixture
def world() -> Iterator[World]:
    with contextlib.closing(World()) as made:
        yield made


def test_what_was_there_before_the_first_stream_is_told_without_a_snapshot(world: World) -> None:
    world.store(KEYS[:3])
    world.feeder.start(world.ask)
    assert world.is_known()
    world.drop(KEYS[:1])
    assert world.is_known()
    assert world.feeder.counters.snapshots == 0


def test_engines_are_answered_where_they_are_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "LOAD_S", 0.01)
    monkeypatch.setattr(feed, "BEAT_S", 0.01)
    served = [EngineEntry(engine="e", tenant="t", space=SPACE, model="m", rank=1, queue=0)]
    world.feeder.start(world.ask, engines=lambda: tuple(served))

    def listed(*, engines: bool = True) -> list[EngineEntry]:
        return [each for n in world.client.nodes(engines=engines).nodes for each in n.engines]

    assert eventually(lambda: listed() == served, timeout_s=CONVERGES_S)
    assert listed(engines=False) == []
    watch = world.client.watch(engines=True)
    assert list(next(watch).nodes[0].engines) == served
    served.clear()
    assert eventually(lambda: listed() == [], timeout_s=CONVERGES_S)
    assert next(watch).nodes[0].engines == ()


@pytest.mark.parametrize(
    ("served", "why"),
    [
        ([{"engine": f"{n}"} for n in range(65)], "65 engines in "),
        ([{"engine": "e", "address": "a" * 256}], "an engine that no node serves"),
    ],
)
def test_engines_that_cannot_be_taken_cost_nothing_else(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    served: list[dict[str, Any]],
    why: str,
) -> None:
    monkeypatch.setattr(feed, "LOAD_S", 0.01)
    monkeypatch.setattr(feed, "BEAT_S", 0.01)
    good = EngineEntry(engine="good", tenant="t", space=SPACE)
    bad = [EngineEntry(**({"tenant": "t", "space": SPACE} | each)) for each in served]
    named: list[tuple[EngineEntry, ...]] = [(good,)]
    world.feeder.start(world.ask, engines=lambda: named[-1])

    def listed() -> bool:
        return [n.engines for n in world.client.nodes(engines=True).nodes] == [(good,)]

    assert eventually(listed, timeout_s=CONVERGES_S)
    named.append(tuple(bad))
    assert eventually(lambda: "lists no new engines" in caplog.text, timeout_s=CONVERGES_S)
    assert why in caplog.text
    assert listed()
    world.store(KEYS[:3])
    assert world.is_known()
    assert world.feeder.counters.streams == 1
    assert world.feeder.counters.snapshots == 0


@pytest.mark.parametrize("where", ["before", "after"])
def test_what_overflows_is_told_by_a_snapshot(
    world: World, monkeypatch: pytest.MonkeyPatch, written: list[OfStream], where: str
) -> None:
    monkeypatch.setattr(changes, "LOG_BYTES_MAX", 50 * KEY_BYTES)
    world.busy = 2
    if where == "after":
        world.feeder.start(world.ask)
        world.store(KEYS[:10])
        assert world.is_known()
    for at in range(10, 400, 130):
        world.store(KEYS[at : at + 130])  # of which none fits
    world.drop(KEYS[20:25])
    if where == "before":
        world.feeder.start(world.ask)
    assert world.is_known()
    assert world.feeder.counters.snapshots > 0
    assert world.feeder.counters.keys_lost >= 390
    hello = written[0]
    assert isinstance(hello, Hello)
    assert hello.sequence == (where == "before"), "nothing lost is left for later"


def test_what_the_engine_could_not_judge_is_asked_for(world: World) -> None:
    world.feeder.start(world.ask)
    assert world.is_known()
    world.held += KEYS[:250]
    world.feeder.log.append(OffersUntold())
    assert world.is_known()


def test_long_changes_are_told_in_pieces(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "ROW_KEYS_MAX", 7)
    monkeypatch.setattr(changes, "DELTA_KEYS_MAX", 7)
    world.feeder.start(world.ask)
    world.store(KEYS[:40])
    world.drop(KEYS[3:30])
    assert world.is_known()
    assert world.feeder.counters.deltas >= 40 // 7
    world.feeder.log.append(OffersUntold())
    assert world.is_known()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[OfStream]:
    """All words of feeds, once they are on their way."""
    words: list[OfStream] = []
    write = feed._write

    async def noting(call: Any, word: OfStream) -> None:
        await write(call, word)
        words.append(word)

    monkeypatch.setattr(feed, "_write", noting)
    return words


def test_long_names_fill_no_message_beyond_what_a_replica_takes(
    world: World, written: list[OfStream]
) -> None:
    def hbm(keys: list[bytes], *, stored: bool = True) -> Any:
        return (Stored if stored else Removed)(
            "t" * 255, SPACE, Tier.HBM, b"".join(keys), "e" * 255
        )

    # Of one key, there and gone: nothing of it can be joined.
    for _ in range(changes.DELTA_KEYS_MAX):
        world.feeder.log.append(hbm(KEYS[:1]))
        world.feeder.log.append(hbm(KEYS[:1], stored=False))
    for _ in range(20):
        world.feeder.log.append(Left("e" * 255))
        world.feeder.log.append(hbm(KEYS * 10))
    world.feeder.start(lambda row: ([hbm(KEYS * 100)] * 3 if row else [], 1 if not row else -1))
    assert world.is_known()
    world.feeder.log.append(OffersUntold())

    def is_told() -> bool:
        return any(isinstance(word, SnapshotPart) and word.is_last for word in written)

    assert eventually(is_told, timeout_s=CONVERGES_S)
    assert world.is_known()
    assert world.feeder.counters.streams == 1
    sizes = {type(word): 0 for word in written}
    for word in written:
        sizes[type(word)] = max(sizes[type(word)], len(encode(word)))
    assert max(sizes.values()) < MESSAGE_BYTES_MAX // 2, sizes
    assert sizes[Delta] > feed.MESSAGE_BYTES // 2, "no more of them than need be"


def test_a_snapshot_does_not_wait_for_changes_that_never_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = feed._write

    async def flooded(call: Any, word: OfStream) -> None:
        if isinstance(word, Delta):
            world.feeder.log.append(world.offer(KEYS[:1]))
        await write(call, word)

    monkeypatch.setattr(feed, "_write", flooded)
    world.feeder.start(world.ask)
    world.store(KEYS[:1])
    world.feeder.log.append(OffersUntold())
    world.store(KEYS[1:2])
    assert eventually(lambda: world.feeder.counters.snapshots > 0, timeout_s=CONVERGES_S)
    assert world.is_known()
    assert world.feeder.counters.streams == 1


def test_what_ends_the_feed_again_and_again_is_said_once_in_the_words_of_the_replica(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feed, "BEAT_S", 0.01)
    write = feed._write

    async def refused_after_a_beat(call: Any, word: OfStream) -> None:
        if isinstance(word, FeedBeat):
            world.feeder.log.append(Left("e" * 256))
        await write(call, word)

    monkeypatch.setattr(feed, "_write", refused_after_a_beat)
    world.feeder.start(world.ask)
    assert eventually(lambda: world.feeder.counters.streams >= 5, timeout_s=CONVERGES_S)
    why = "was lost: malformed message: Expected `str` of length <= 255"
    said = [r for r in caplog.records if why in r.getMessage()]
    assert [record.levelname for record in said] == ["WARNING"]


def test_reasons_that_differ_in_numbers_are_one(caplog: pytest.LogCaptureFixture) -> None:
    hello = Hello("n", Incarnation(1), 0, 0)
    link = feed.FeedLink("i:1", feed.FeedSource(hello, None))
    for size in (1, 22, 333):
        link._note("was lost", f"a message of {size}; trying on")
    link._note("is not reached", "a message of 1; trying on")
    assert [record.getMessage() for record in caplog.records] == [
        "the index at i:1 was lost: a message of 1; trying on",
        "the index at i:1 is not reached: a message of 1; trying on",
    ]


def test_a_replica_that_comes_again_is_told_again(world: World) -> None:
    world.store(KEYS[:30])
    world.feeder.start(world.ask)
    assert world.is_known()
    port = world.replica.port
    world.replica.close()
    assert eventually(lambda: world.feeder.trouble != "", timeout_s=CONVERGES_S)
    world.store(KEYS[30:60])
    world.replica = world.start(port)
    assert world.is_known()
    assert world.feeder.trouble == ""


def test_changes_during_a_snapshot_are_not_lost(world: World) -> None:
    answer: Callable[[int], Slice] = world.ask

    def ask(row: int) -> Slice:
        found = answer(row)
        if row == 100:  # what was told already goes, what is to be told comes, and the other way
            world.drop(KEYS[:10])
            world.drop(KEYS[250:260])
            world.store(KEYS[390:])
        return found

    world.held = list(KEYS[:380])
    world.feeder.log.append(OffersUntold())
    world.feeder.start(ask)
    assert world.is_known()


def test_a_bug_in_a_feed_is_logged_once_and_what_it_cost_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feed, "RETRY_MAX_S", 0.01)
    make = changes.joined
    asked: list[Change] = []

    def broken(told: Change, keys: Sequence[bytes]) -> Change:
        asked.append(told)
        if len(asked) <= 3:
            raise KeyError("tier")
        return make(told, keys)

    world.feeder.start(world.ask)
    assert world.is_known()
    monkeypatch.setattr(changes, "joined", broken)
    for bugs in (1, 2, 3):
        world.store(KEYS[bugs : bugs + 1])
        assert eventually(lambda: len(asked) >= bugs, timeout_s=CONVERGES_S)  # noqa: B023
        # What is put before its stream has ended is lost with it, and what is put before the next
        # one has read the tables is in its snapshot: neither makes a change.
        begun = world.feeder.counters
        assert eventually(lambda: begun.streams > bugs, timeout_s=CONVERGES_S)  # noqa: B023
        assert world.is_known()
    assert world.feeder.trouble == ""
    (said,) = [record for record in caplog.records if record.exc_info]
    assert said.getMessage().startswith("a bug: the feed of 127.0.0.1:")


def test_a_node_that_cannot_say_what_it_does_is_asked_again(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feed, "LOAD_S", 0.01)
    monkeypatch.setattr(feed, "BEAT_S", 0.01)
    bugs: list[Exception] = [KeyError("tier"), KeyError("tier"), NodeBusy("later")]

    def load() -> Load:
        if bugs:
            raise bugs.pop()
        return Load(leases=7)

    def told() -> list[int]:
        return [node.load.leases for node in world.client.nodes().nodes if node.load]

    world.feeder.start(world.ask, load)
    assert eventually(lambda: told() == [7], timeout_s=CONVERGES_S)
    assert len([record for record in caplog.records if record.exc_info]) == 1


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_changes_in_a_row_that_was_read_is_not_lost(world: World, *, is_lost: bool) -> None:
    """Before the snapshot has anything to say; or while its first slice is read, and lost."""
    answer: Callable[[int], Slice] = world.ask

    def ask(row: int) -> Slice:
        found = answer(row)
        if row == (0 if is_lost else 100) and world.held[0] is None:
            world.held[0] = KEYS[0]
            world.feeder.log.append(OffersUntold() if is_lost else world.offer(KEYS[:1]))
            world.turn()
        return found

    empty = 1 if is_lost else 200
    world.held = [None] * empty + list(KEYS[empty:])
    world.feeder.log.append(OffersUntold())
    world.feeder.start(ask)
    assert world.is_known()


def test_what_an_engine_of_the_node_holds_is_told_as_its_own(world: World) -> None:
    def hbm(keys: list[bytes], *, stored: bool = True, rank: int = 1) -> Any:
        return (Stored if stored else Removed)("t", SPACE, Tier.HBM, b"".join(keys), "e", rank)

    def found() -> dict[tuple[str, int], tuple[int, int]]:
        answer = world.client.match("t", SPACE, b"".join(KEYS[:9]))
        return {
            (match.holder.engine, match.holder.rank): (match.hbm_blocks, match.dram_blocks)
            for match in answer.matches
            if match.holder.node == "n1"
        }

    def becomes(**expected: tuple[int, int]) -> bool:
        names = {"own": ("", 0), "one": ("e", 1), "two": ("e", 2)}
        wanted = {names[name]: counts for name, counts in expected.items()}
        return eventually(lambda: found() == wanted, timeout_s=CONVERGES_S)

    world.feeder.start(lambda row: ([*world.ask(row)[0], hbm(KEYS[:7], rank=2)], -1))
    world.store(KEYS[:2])
    # Of one run: what is alike but whose it is, is not alike.
    for told in (hbm(KEYS[:3]), hbm(KEYS[3:6]), hbm(KEYS[:4], rank=2), hbm(KEYS[4:5], rank=2)):
        world.feeder.log.append(told)
    world.feeder.log.append(hbm(KEYS[5:6], stored=False))
    assert becomes(own=(0, 2), one=(5, 5), two=(5, 5))
    world.feeder.log.append(Left("e", 1))
    assert becomes(own=(0, 2), two=(5, 5))
    world.feeder.log.append(hbm(KEYS[:1]))
    assert becomes(own=(0, 2), one=(1, 1), two=(5, 5))
    world.feeder.log.append(OffersUntold())
    assert becomes(own=(0, 2), two=(7, 7)), "a snapshot has it, too"


def test_nodes_and_replicas_of_two_versions_say_so_in_one_sentence(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with channel(world.replica.address, None) as dialled:
        older: Any = dialled.stream_stream("/kvstore.index.v1.Index/Feed")
        with pytest.raises(grpc.RpcError) as refused:
            list(older(iter([b"\x0a\x06\x0a\x02n1\x11\x01"]), timeout=CONVERGES_S))
    assert "this index is of a later version of kvstore: run one" in str(refused.value)
    monkeypatch.setattr("kvstore.wire.feed.FEEDS", "kvstore.feed.v3.Feeds")
    world.feeder.start(world.ask)
    trouble = "is not reached (it is of another version of kvstore: run one on nodes and indexes)"
    assert eventually(lambda: trouble in world.feeder.trouble, timeout_s=CONVERGES_S)


def test_trust_zero_is_a_trust() -> None:
    """EXACT is 0, which is easily taken for nothing."""
    for trust in Trust:
        assert forms.trust_of(forms.TRUSTS[trust]) is trust
    for its in (*Trust, None):
        told = Member("a", Incarnation(1), "", its, 0)
        assert forms.member_of(forms.node_row(told, engines=True)).trust is its
