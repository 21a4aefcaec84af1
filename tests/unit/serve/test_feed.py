"""A feed and a replica in one process: what is lost on the way is told by a snapshot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from kvstore.client.index import IndexClient
from kvstore.engine.events import Offered
from kvstore.index.feed import Left, Trust
from kvstore.proto import feeds
from kvstore.serve import feed
from kvstore.serve.aio import LoopThread
from kvstore.serve.cluster import ReplicaConfig
from kvstore.serve.driver import NodeBusy
from kvstore.serve.feed import Feeder, Slice
from kvstore.serve.replica import Replica
from kvstore.testing.raw_engine import make_keys
from kvstore.types import Incarnation, SpaceId, Tier
from tests.integration.node.conftest import eventually

SPACE = SpaceId(bytes(32))
KEYS = make_keys(400)
CONVERGES_S = 30.0


class World:
    """A replica, and a node that is nothing but its feed and what it holds."""

    def __init__(self) -> None:
        self.loop = LoopThread("test")
        self.replica = self.start(0)
        self.held: list[bytes | None] = []
        """By row; what is gone leaves its row empty."""
        self.busy = 0
        self.feeder = Feeder(
            self.loop,
            node="n1",
            incarnation=Incarnation(7),
            address="",
            replicas=[self.replica.address],
            credentials=None,
        )
        self.client = IndexClient([self.replica.address], insecure=True, timeout_s=5)

    def start(self, port: int) -> Replica:
        config = ReplicaConfig(
            host="127.0.0.1", port=port, entry_count_max=100_000, option="--listen"
        )
        return Replica(config, None, self.loop)

    def ask(self, row: int) -> Slice:
        if self.busy:
            self.busy -= 1
            raise NodeBusy("later")
        keys = [key for key in self.held[row : row + 100] if key is not None]
        return [self.offer(keys)] if keys else [], row + 100 if row + 100 < len(self.held) else -1

    def offer(self, keys: list[bytes], *, stored: bool = True) -> Offered:
        return Offered(Tier.DRAM, stored, "t", SPACE, b"".join(keys))

    def store(self, keys: list[bytes]) -> None:
        self.held += keys
        self.feeder.put(self.offer(keys))

    def drop(self, keys: list[bytes]) -> None:
        self.held = [None if key in keys else key for key in self.held]
        self.feeder.put(self.offer(keys, stored=False))

    def is_known(self) -> bool:
        """Whether the replica believes exactly what is held."""

        def asks() -> bool:
            found = {node.node: node.trust for node in self.client.nodes().nodes}
            return found == {"n1": Trust.EXACT} and self.seen() == set(self.held) - {None}

        return eventually(asks, timeout_s=CONVERGES_S)

    def seen(self) -> set[bytes]:
        return {key for key in KEYS if self.client.match("t", SPACE, key).matches}

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


@pytest.mark.parametrize("where", ["before", "after"])
def test_what_overflows_is_told_by_a_snapshot(
    world: World, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(feed, "WAITING_KEYS_MAX", 50)
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


def test_what_the_engine_could_not_judge_is_asked_for(world: World) -> None:
    world.feeder.start(world.ask)
    assert world.is_known()
    world.held += KEYS[:250]
    world.feeder.lose()
    assert world.is_known()


def test_long_changes_are_told_in_pieces(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "DELTA_KEYS_MAX", 7)
    world.feeder.start(world.ask)
    world.store(KEYS[:40])
    world.drop(KEYS[3:30])
    assert world.is_known()
    assert world.feeder.counters.deltas >= 40 // 7
    world.feeder.lose()
    assert world.is_known()


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
    world.feeder.lose()
    world.feeder.start(ask)
    assert world.is_known()


def test_what_an_engine_of_the_node_holds_is_told_as_its_own(world: World) -> None:
    def hbm(keys: list[bytes], *, stored: bool = True, rank: int = 1) -> Offered:
        return Offered(Tier.HBM, stored, "t", SPACE, b"".join(keys), "e", rank)

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
        world.feeder.put(told)
    world.feeder.put(hbm(KEYS[5:6], stored=False))
    assert becomes(own=(0, 2), one=(5, 5), two=(5, 5))
    world.feeder.put(Left("e", 1))
    assert becomes(own=(0, 2), two=(5, 5))
    world.feeder.put(hbm(KEYS[:1]))
    assert becomes(own=(0, 2), one=(1, 1), two=(5, 5))
    world.feeder.lose()
    assert becomes(own=(0, 2), two=(7, 7)), "a snapshot has it, too"


def test_who_goes_and_comes_without_an_end_fills_no_queue(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "WAITING_KEYS_MAX", 10)
    for _ in range(11):
        world.feeder.put(Left("e"))
    assert eventually(lambda: world.feeder.counters.keys_lost > 0)


def test_trust_zero_is_a_trust() -> None:
    """EXACT is 0, which is easily taken for nothing."""
    for trust in Trust:
        assert feeds.trust_of(feeds.trust_number(trust)) is trust
    assert feeds.trust_of(feeds.trust_number(None)) is None
