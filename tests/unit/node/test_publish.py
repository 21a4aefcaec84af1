"""The publisher by itself: nothing it does makes the loop wait, and nobody is misled by a loss."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from kvstore.config.node import EventsConfig
from kvstore.engine.events import Changed
from kvstore.errors import NodeBusy
from kvstore.node import publish
from kvstore.node.node import MonotonicClock
from kvstore.node.publish import Held, Publisher
from kvstore.peers import changes
from kvstore.ports import Clock
from kvstore.testing.raw_engine import make_keys
from kvstore.types import KEY_BYTES, Incarnation, Shard, SpaceId, Tier
from kvstore.wire.kv_events import END, SEQUENCE_BYTES, BlockRemoved, BlockStored
from tests.kit.event_indexer import Indexer
from tests.kit.set_clock import SetClock

WAIT_MS = 10_000


def change(*keys: bytes, stored: bool = True, label: str = "m", tier: Tier = Tier.DRAM) -> Changed:
    return Changed(
        tier=tier,
        stored=stored,
        scope=("t", SpaceId(bytes(32)), Shard(0, 1, 0, 1)),
        label=label,
        block_tokens=16,
        keys=b"".join(keys),
    )


def nothing_held(_row: int) -> Held:
    return [], -1


Make = Callable[..., Publisher]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes publishers that are closed in the end."""
    made: list[Publisher] = []

    def start(
        *,
        ask: Callable[[int], Held] | None = nothing_held,
        place: str = "events",
        clock: Clock | None = None,
        whole_hashes: bool = False,
    ) -> Publisher:
        endpoint = f"ipc://{tmp_path / place}"
        config = EventsConfig(
            endpoint=endpoint,
            replay_endpoint=endpoint + ".replay",
            node="n1",
            beyond_loopback=False,
            whole_hashes=whole_hashes,
        )
        publisher = Publisher(config, incarnation=Incarnation(7), clock=clock or MonotonicClock())
        made.append(publisher)
        if ask is not None:
            publisher.start(ask)
        return publisher

    yield start
    for publisher in made:
        publisher.close()


def test_hashes_are_in_the_form_of_the_engines_events(make: Make) -> None:
    (key,) = make_keys(1)
    low = int.from_bytes(key[-8:], "big")
    for number, (whole_hashes, expected) in enumerate([(False, low), (True, key)]):
        publisher = make(ask=None, place=f"events{number}", whole_hashes=whole_hashes)
        for stored in (True, False):
            event = publisher._event(change(key, stored=stored))
            assert isinstance(event, BlockStored if stored else BlockRemoved)
            assert event.block_hashes == [expected]


def follow(publisher: Publisher) -> Indexer:
    return Indexer(publisher.endpoint, publisher.replay_endpoint)


def until(indexer: Indexer, done: Callable[[], bool], *, catching_up: bool = True) -> None:
    """Listen, and ask for what was said before the subscription counted."""
    for _ in range(200):
        indexer.listen(timeout_s=0.05)
        if catching_up:
            indexer.catch_up()
        if done():
            return
    pytest.fail("the indexer never heard of it")


def unsent(publisher: Publisher) -> bool:
    """Whether a reply waits for its reader."""
    return any(reply.unsent for reply in publisher._replies.values())


def test_a_large_change_is_told_in_pieces(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "BATCH_KEYS_MAX", 3)
    publisher = make()
    keys = make_keys(10)
    with follow(publisher) as indexer:
        publisher.log.append(change(*keys))
        until(indexer, lambda: indexer.keys("CPU") == set(keys))
        assert indexer.next_number == 5, "one that clears, and four of three at most"


def test_what_is_dropped_leaves_a_gap_and_a_snapshot_mends_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "LOG_BYTES_MAX", 2 * (changes.ROW_BYTES + KEY_BYTES))
    keys = make_keys(6)
    publisher = make(ask=None)
    for key in keys:
        publisher.log.append(change(key))
    publisher.start(lambda _row: ([change(*keys)], -1))
    with follow(publisher) as indexer:
        until(indexer, lambda: indexer.keys("CPU") == set(keys))
        assert indexer.snapshots == 1
        assert publisher.counters.keys_lost == 4
        indexer.catch_up()
        assert indexer.snapshots == 1, "once is enough"


def test_what_is_kept_no_more_needs_a_snapshot(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "KEPT_BATCHES_MAX", 2)
    monkeypatch.setattr(publish, "BATCH_KEYS_MAX", 1)
    keys = make_keys(9)
    publisher = make(ask=lambda row: ([change(keys[row])], row + 1 if row < 8 else -1))
    publisher.log.append(change(*keys))
    with follow(publisher) as indexer:
        until(indexer, lambda: indexer.keys("CPU") == set(keys))
        assert indexer.snapshots == 1
        assert len(publisher._kept) == 2


def test_bytes_that_are_kept_are_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "KEPT_BYTES_MAX", 2000)
    monkeypatch.setattr(publish, "BATCH_KEYS_MAX", 1)
    publisher = make()
    with follow(publisher) as indexer:
        for key in make_keys(100):
            publisher.log.append(change(key))
        until(indexer, lambda: publisher.counters.batches == 101)
    assert 0 < sum(len(payload) for _, payload in publisher._kept) <= 2000
    assert publisher._kept_bytes == sum(len(payload) for _, payload in publisher._kept)


def test_changes_between_two_slices_are_in_the_live_stream(make: Make) -> None:
    """The last word about a block counts, whether a slice saw it or not."""
    a, b, c = make_keys(3)
    publisher = make(ask=None)

    def ask(row: int) -> Held:
        if row == 0:
            publisher.log.append(change(a, stored=False))  # told by this slice, gone right after
            publisher.log.append(change(c))
            return [change(a, b)], 1
        return [change(c)], -1

    publisher.start(ask)
    with follow(publisher) as indexer:
        indexer.next_number = 2**40  # remembers another incarnation: nothing kept fits
        for number, payload in indexer._ask(END):
            indexer._apply(payload)
            indexer.next_number = number + 1
        assert indexer.keys("CPU") == {a, b, c}
        until(indexer, lambda: indexer.keys("CPU") == {b, c})


def test_a_snapshot_of_a_busy_node_has_no_end(make: Make) -> None:
    asked = threading.Event()

    def busy(_row: int) -> Held:
        asked.set()
        raise NodeBusy("later")

    publisher = make(ask=busy)
    with follow(publisher) as indexer:
        indexer.replay.send_multipart([b"", END])
        assert indexer.replay.poll(WAIT_MS)
        _, sequence, _ = indexer.replay.recv_multipart()
        assert sequence != END, "it begins"
        assert asked.wait(WAIT_MS / 1000)
        indexer.catch_up()  # the next thing that comes is the answer to this
        assert (indexer.snapshots, indexer.next_number) == (0, 1)


@pytest.mark.parametrize(
    "request_frames",
    [[b""], [b"", b"1234567"], [b"", b"123456789"], [b"x", bytes(8)], [b"", bytes(8), b""], [b"?"]],
)
def test_a_request_that_is_none_is_not_answered(make: Make, request_frames: list[bytes]) -> None:
    publisher = make()
    with follow(publisher) as indexer:
        indexer.replay.send_multipart(request_frames)
        indexer.catch_up()
        assert indexer.next_number == 1
        assert publisher.counters.requests_refused == 1


def test_a_huge_request_costs_its_sender_the_connection(make: Make) -> None:
    publisher = make()
    with follow(publisher) as other, follow(publisher) as indexer:
        with other.replay.get_monitor_socket(zmq.EVENT_DISCONNECTED) as fate:
            other.replay.send_multipart([b"", bytes(1 << 20)])
            assert fate.poll(WAIT_MS)
            other.replay.disable_monitor()
        indexer.catch_up()
        assert indexer.next_number == 1
        assert publisher.counters.replays == 1


def test_who_does_not_take_his_replay_is_given_up(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "BATCH_KEYS_MAX", 100)
    monkeypatch.setattr(publish, "REPLAY_COUNT_MAX", 1)
    clock = SetClock(0)
    publisher = make(clock=clock)
    keys = make_keys(100)
    for _ in range(500):  # 4 KiB each: more than sockets buffer
        publisher.log.append(change(*keys))
    context = zmq.Context()
    with follow(publisher) as indexer:
        until(indexer, lambda: indexer.next_number == 501)
        while indexer.listen(timeout_s=0.0):
            pass  # what the replay was faster with
        stuck = context.socket(zmq.DEALER)
        stuck.setsockopt(zmq.RCVHWM, 1)
        stuck.connect(publisher.replay_endpoint)
        stuck.send_multipart([b"", bytes(SEQUENCE_BYTES)])
        try:
            assert stuck.poll(WAIT_MS)
            publisher.log.append(change(*keys))
            while indexer.next_number < 502:  # the live stream goes on meanwhile
                assert indexer.listen(timeout_s=WAIT_MS / 1000)
            until(indexer, lambda: unsent(publisher), catching_up=False)
            indexer.replay.send_multipart([b"", END])
            publisher.log.append(change(*keys))
            until(indexer, lambda: indexer.next_number == 503, catching_up=False)
            assert not indexer.replay.poll(0), "one at a time"
            clock.ns = publish.REPLAY_STUCK_NS
            assert indexer.replay.poll(WAIT_MS), "answered when the other one's turn is over"
            assert stuck.poll(0)
        finally:
            context.destroy(linger=0)


def test_who_asks_again_and_again_delays_nobody_else(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "BATCH_KEYS_MAX", 1)
    publisher, context, batches = make(ask=None), zmq.Context(), 2000
    publisher.log.append(change(*make_keys(batches)))
    publisher._publish_waiting()
    clients = {name: context.socket(zmq.DEALER) for name in (b"honest", b"flooder")}

    def ask(name: bytes) -> None:
        clients[name].send_multipart([b"", bytes(SEQUENCE_BYTES)])
        before = publisher.counters.replays
        while publisher.counters.replays == before:
            publisher._turn()

    try:
        for name, client in clients.items():
            client.setsockopt(zmq.RCVHWM, 0)
            client.setsockopt(zmq.IDENTITY, name)
            client.connect(publisher.replay_endpoint)
            ask(name)
        while b"honest" in publisher._replies:
            ask(b"flooder")
            publisher._turn()
        while publisher._replies or publisher._asked:
            publisher._turn()
        told = {name: received(client) for name, client in clients.items()}
    finally:
        context.destroy(linger=0)
    assert (len(told[b"honest"]), told[b"honest"][-1]) == (batches + 1, END)
    assert told[b"flooder"][-(batches + 1) :] == told[b"honest"], "the last question is answered"
    assert told[b"flooder"].count(END) == 1
    begun = len(told[b"flooder"]) - (batches + 1)
    assert begun < batches // 4, "of the first answer, until he asked again, and of no other"


def received(client: zmq.Socket[bytes]) -> list[bytes]:
    """Sequence numbers of all that came, up to the end of an answer."""
    told: list[bytes] = []
    while not told or told[-1] != END:
        assert client.poll(WAIT_MS)
        told.append(client.recv_multipart()[1])
    return told


def test_a_socket_that_somebody_took_away_is_named(make: Make, tmp_path: Path) -> None:
    publisher = make(ask=None)
    assert publisher.trouble == ""
    (tmp_path / "events.replay").rename(tmp_path / "elsewhere")
    assert publisher.trouble == (
        f"{tmp_path}/events.replay is no longer this node's events socket: restart the node"
    )
    (tmp_path / "events.replay").touch()
    assert "events.replay is no longer" in publisher.trouble


def test_who_closes_before_the_start_leaves_nothing(make: Make, tmp_path: Path) -> None:
    make(ask=None, place="b")
    assert {path.name for path in tmp_path.iterdir()} >= {"b", "b.replay"}
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o600
