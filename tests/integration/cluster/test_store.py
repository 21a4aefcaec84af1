"""A store that replicas share: who hears a node, and a Redis that hangs, dies, forgets, or has
records of no replica."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from redis import Redis

from kvstore.cli.certs import make_certificates
from kvstore.client.index import IndexClient
from kvstore.errors import ConfigError
from kvstore.index.feed import (
    BEAT_MS,
    FORGET_MS,
    OUT_MS,
    STALE_MS,
    Event,
    FeedClosed,
    Trust,
    Verdict,
)
from kvstore.index.index import Answer
from kvstore.stores.address import store_config
from kvstore.stores.connection import DEADLINES, PREFIX, Deadlines
from kvstore.stores.redis import RedisStore
from kvstore.stores.scripts import ROWS_AT_ONCE
from kvstore.testing.raw_engine import RawEngine, make_keys
from kvstore.types import Incarnation, SpaceId
from kvstore.wire.feed import Change, Left
from kvstore.wire.identity import Identity
from kvstore.wire.load import Load
from tests.integration.cluster import kit
from tests.integration.cluster.kit import CONVERGES_S, TENANT, Site, becomes, matches, trust
from tests.integration.node.conftest import eventually
from tests.kit.redis_process import RedisProcess
from tests.unit.index.words import NODE, SPACE, beat, delta, hello, keys, part, stored

pytestmark = pytest.mark.slow

NOW = 10_000
PATIENCE_S = 90.0
PATIENT = Deadlines(PATIENCE_S, PATIENCE_S)
_T = TypeVar("_T")


class Lab:
    """A Redis, and replicas whose time goes as the test says."""

    def __init__(self, directory: Path, runner: asyncio.Runner) -> None:
        self.directory = directory
        self._runner = runner
        self._stores: list[RedisStore] = []

    def run(self, awaitable: Awaitable[_T]) -> _T:
        async def wait() -> _T:
            return await awaitable

        return self._runner.run(wait())

    def replica(
        self, redis: RedisProcess, deadlines: Deadlines = PATIENT, *, entries: int = 1000
    ) -> Replica:
        store = RedisStore(
            store_config(redis.url, password_file=None, ca=None),
            entry_count_max=entries,
            deadlines=deadlines,
        )
        self._stores.append(store)
        replica = Replica(self, store)
        replica.tick(0)
        return replica

    def close(self) -> None:
        for store in self._stores:
            self.run(store.close())


class Replica:
    def __init__(self, lab: Lab, store: RedisStore) -> None:
        self.store = store
        self._run = lab.run

    def hear(self, event: Event, now_ms: int = NOW) -> Verdict:
        return self._run(self.store.hear(event, now_ms))

    def tick(self, now_ms: int = NOW) -> None:
        self._run(self.store.tick(now_ms))

    def match(self, *numbers: int, now_ms: int = NOW) -> Answer:
        return self._run(self.store.match("t", SPACE, keys(*numbers), now_ms))

    def found(self, *numbers: int, now_ms: int = NOW) -> tuple[int, Trust] | None:
        """Blocks of the one holder, and how far he is believed."""
        found = [(m.file_blocks, m.trust) for m in self.match(*numbers, now_ms=now_ms).matches]
        assert len(found) <= 1
        return found[0] if found else None

    def believes_again(self, now_ms: int) -> bool:
        self.tick(now_ms)
        return not self.store.trouble


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with asyncio.Runner() as runner:
        made = Lab(tmp_path, runner)
        yield made
        made.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with RedisProcess.start(tmp_path_factory.mktemp("redis")) as process:
        yield process


@pytest.fixture
def redis(server: RedisProcess) -> RedisProcess:
    """As it was started, for tests that do not end it."""
    server.cli("config", "set", "maxmemory", "0", "maxmemory-policy", "noeviction")
    server.cli("flushall")
    return server


@pytest.fixture
def one(lab: Lab, redis: RedisProcess) -> Replica:
    """A replica that has heard of a node with block 1."""
    return told(lab.replica(redis), stored(1))


def told(replica: Replica, *changes: Change) -> Replica:
    """It has heard a node begin, and these changes."""
    replica.hear(hello())
    replica.hear(delta(1, *changes))
    return replica


def test_what_one_replica_hears_all_answer(lab: Lab, redis: RedisProcess) -> None:
    one, two = lab.replica(redis), lab.replica(redis)
    two.tick(NOW)
    one.hear(hello())
    one.hear(delta(1, stored(1, 2)))
    assert two.found(1, 2) == (2, Trust.CATCHING_UP), "not yet polled, and true all the same"
    two.tick()
    assert two.found(1, 2, 3) == one.found(1, 2, 3) == (2, Trust.EXACT)
    assert two.match(1).trust is Trust.EXACT


def test_of_two_streams_one_is_heard_and_the_other_takes_over(
    lab: Lab, redis: RedisProcess
) -> None:
    one, two = lab.replica(redis), lab.replica(redis)
    told(one, stored(1, 2))
    two.tick()
    # Its numbers are those of another stream: what it says is neither a repetition nor a gap.
    assert two.hear(hello(sequence=5)) is Verdict.GO_ON
    assert two.hear(delta(6, stored(9))) is Verdict.GO_ON
    assert two.found(9) is None
    assert one.hear(beat(1, load=Load(at_ms=5))) is Verdict.GO_ON
    # The first replica dies: its record changes no more.
    later = NOW + STALE_MS
    two.tick(later - 1)
    assert two.hear(beat(6), later) is Verdict.GO_ON, "that record changed a moment ago"
    later += STALE_MS
    assert two.hear(beat(6), later) is Verdict.ASK
    two.tick(later)
    assert two.found(1, 2, now_ms=later) == (2, Trust.CATCHING_UP), "not empty meanwhile"
    assert [member.load for member in two.store.members(later)] == [Load(at_ms=5)]
    assert two.hear(part(6, 0, stored(1), is_last=True), later) is Verdict.GO_ON
    assert two.found(1, 2, now_ms=later) == (1, Trust.EXACT)
    # It was only stopped: its next step is refused, and it waits in its turn.
    assert one.hear(delta(2, stored(3)), later) is Verdict.GO_ON
    one.tick(later)
    assert one.hear(beat(2), later) is Verdict.GO_ON
    assert two.hear(beat(6), later) is Verdict.GO_ON
    assert two.found(3, now_ms=later) is None
    assert two.found(1, 2, now_ms=later) == (1, Trust.EXACT)


def test_a_stream_that_ends_at_one_replica_goes_on_at_another_at_once(
    lab: Lab, redis: RedisProcess
) -> None:
    one, two = lab.replica(redis), lab.replica(redis)
    told(one, stored(1))
    one.hear(FeedClosed(NODE, Incarnation(1), 1))
    two.tick()
    assert two.hear(hello(stream=2, sequence=1)) is Verdict.ASK


def test_a_stream_that_ended_says_nothing_more_where_another_replica_hears_the_node(
    lab: Lab, redis: RedisProcess
) -> None:
    one, two = lab.replica(redis), lab.replica(redis)
    told(one, stored(1))
    two.tick()
    assert two.hear(hello(sequence=1)) is Verdict.GO_ON
    assert two.hear(beat(1)) is Verdict.GO_ON
    two.hear(FeedClosed(NODE, Incarnation(1), 1))
    assert two.hear(beat(1)) is Verdict.CLOSE


def test_a_stream_that_ends_while_the_store_is_away_leaves_a_gap(
    lab: Lab, redis: RedisProcess
) -> None:
    one = lab.replica(redis, DEADLINES)
    assert eventually(lambda: one.believes_again(0), timeout_s=PATIENCE_S)
    told(one, stored(1))
    redis.pause()
    assert one.match(1) == Answer(Trust.STALE, [])
    one.hear(FeedClosed(NODE, Incarnation(1), 1))
    redis.resume()
    assert eventually(lambda: one.believes_again(NOW), timeout_s=PATIENCE_S)
    assert one.hear(hello(stream=2, sequence=1)) is Verdict.ASK


def test_a_node_that_was_started_anew_is_believed_by_whoever_hears_it_first(
    lab: Lab, redis: RedisProcess
) -> None:
    one, two = lab.replica(redis), lab.replica(redis)
    told(one, stored(1))
    two.tick()
    assert two.hear(hello(incarnation=2)) is Verdict.GO_ON
    assert two.found(1) is None
    one.tick()
    assert one.hear(delta(2, stored(1, 2))) is Verdict.GO_ON, "refused by the store"
    assert one.hear(delta(3, stored(1, 2))) is Verdict.CLOSE
    assert two.found(1) is None


def test_places_that_another_replica_wrote_are_written_again(lab: Lab, redis: RedisProcess) -> None:
    def places() -> str:
        return redis.cli("--no-raw", "hget", f"kvstore:1:n:{NODE}", "places")

    one, two = lab.replica(redis), lab.replica(redis)
    one.hear(hello())
    empty = places()
    one.hear(FeedClosed(NODE, Incarnation(1), 1))
    two.tick()
    two.hear(hello(stream=2))
    two.hear(part(0, 0, stored(1), is_last=True, stream=2))
    assert places() != empty
    one.tick()
    one.hear(hello(incarnation=2))
    assert places() == empty


def test_a_refused_hello_leaves_the_snapshot_that_another_replica_receives(
    lab: Lab, redis: RedisProcess
) -> None:
    one, two = lab.replica(redis), lab.replica(redis)
    two.hear(hello())
    two.hear(hello(incarnation=2))
    two.hear(delta(1, stored(1), incarnation=2))
    two.hear(part(1, 0, stored(1, 2), incarnation=2))
    one.tick()
    assert one.hear(hello(stream=2)) is Verdict.CLOSE, "late, of an incarnation that was replaced"
    two.hear(part(1, 1, is_last=True, incarnation=2))
    two.hear(FeedClosed(NODE, Incarnation(2), 1))
    one.tick()
    assert one.hear(hello(incarnation=2, stream=2, sequence=1)) is Verdict.ASK
    assert one.found(1, 2) == (2, Trust.CATCHING_UP), "not void by what the refused one began"


def test_a_replica_that_starts_is_not_empty(lab: Lab, redis: RedisProcess) -> None:
    one = told(lab.replica(redis), stored(1, 2))
    two = lab.replica(redis)
    assert two.found(1, 2, now_ms=0) == (2, Trust.STALE), "nobody knows if the node lives"
    assert one.hear(beat(1)) is Verdict.GO_ON
    two.tick(BEAT_MS)
    assert two.found(1, 2, now_ms=BEAT_MS) == (2, Trust.EXACT)
    assert two.match(1, now_ms=BEAT_MS).trust is Trust.CATCHING_UP
    assert two.found(1, now_ms=BEAT_MS + OUT_MS) is None, "and now it is silent"


def test_a_store_that_was_flushed_is_filled_again(lab: Lab, redis: RedisProcess) -> None:
    one = told(lab.replica(redis), stored(1, 2))
    redis.cli("flushall")
    assert one.match(1) == Answer(Trust.STALE, [])
    assert one.hear(beat(1)) is Verdict.GO_ON
    one.tick()
    assert one.match(1) == Answer(Trust.CATCHING_UP, [])
    assert one.hear(beat(1)) is Verdict.ASK
    assert one.hear(part(1, 0, stored(1, 2), is_last=True)) is Verdict.GO_ON
    assert one.found(1, 2) == (2, Trust.EXACT)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_store_that_was_killed_is_filled_again(lab: Lab, *, keeps: bool) -> None:
    """With what it wrote to disk it comes back as it was some time ago, which nobody believes."""
    with RedisProcess.start(lab.directory) as redis:
        port = redis.port
        one = told(lab.replica(redis), stored(1, 2))
        if keeps:
            redis.cli("save")
        one.hear(delta(2, stored(3)))
        assert one.found(1, 2, 3) == (3, Trust.EXACT)
        redis.kill()
        assert one.match(1) == Answer(Trust.STALE, [])
        assert "is unreachable" in one.store.trouble
        assert one.hear(delta(3, stored(4))) is Verdict.GO_ON
    with RedisProcess.start(lab.directory, port=port):
        assert eventually(lambda: one.believes_again(NOW), timeout_s=PATIENCE_S)
        found = (2, Trust.STALE) if keeps else None
        assert one.found(1, 2, 3) == found
        assert one.hear(beat(3)) is Verdict.ASK
        one.hear(part(3, 0, stored(1, 2, 3, 4), is_last=True))
        assert one.found(1, 2, 3, 4) == (4, Trust.EXACT)


def test_a_store_that_hangs_holds_up_nobody(lab: Lab, redis: RedisProcess) -> None:
    one = lab.replica(redis, DEADLINES)
    assert eventually(lambda: one.believes_again(0), timeout_s=PATIENCE_S)
    told(one, stored(1))
    redis.pause()
    assert one.match(1) == Answer(Trust.STALE, [])
    assert "no answer in time" in one.store.trouble
    failures = one.store.failure_count
    assert failures >= 1
    for _ in range(500):  # all of them within no time: nobody asks it
        assert one.match(1) == Answer(Trust.STALE, [])
        assert one.hear(beat(1)) is Verdict.GO_ON
    assert one.hear(delta(2, stored(2))) is Verdict.GO_ON
    one.tick()
    assert one.store.failure_count == failures
    redis.resume()
    assert eventually(lambda: one.believes_again(NOW), timeout_s=PATIENCE_S)
    assert one.hear(beat(2)) is Verdict.ASK, "what it missed is a gap"


def test_a_full_store_says_so_and_answers_on(one: Replica, redis: RedisProcess) -> None:
    redis.cli("config", "set", "maxmemory", "1")
    assert one.hear(delta(2, stored(2))) is Verdict.GO_ON
    assert "Raise its maxmemory, or lower --entries." in one.store.trouble
    assert one.found(1) == (1, Trust.EXACT)
    assert one.match(1).trust is Trust.CATCHING_UP
    assert [member.sequence for member in one.store.members(NOW)] == [1], "as it was written"
    redis.cli("config", "set", "maxmemory", "0")
    assert one.hear(beat(2)) is Verdict.ASK
    assert one.store.trouble == ""


def test_a_row_that_gives_way_to_its_own_next_place_begins_anew(
    lab: Lab, redis: RedisProcess
) -> None:
    """While Redis saves, a row that is looked at is as old as before."""
    one = told(lab.replica(redis, entries=1), stored(1, engine="a"))
    server: Any = Redis.from_url(redis.url)
    (row,) = server.keys(PREFIX + b"b:*")
    before = now = server.get(row)
    server.restore(row, 0, server.dump(row), replace=True, idletime=100)
    server.config_set("rdb-key-save-delay", 1_000_000)
    server.bgsave()
    try:
        for sequence in range(2, 100):  # rows are looked for among random keys
            assert one.hear(delta(sequence, stored(1, engine=f"b{sequence}"))) is Verdict.GO_ON
            now = server.get(row)
            if now != before:
                break
        assert now != before
        assert len(now) == len(before), "one place in place of another"
        assert server.hmget(PREFIX + b"counts", "entries", "rows") == [b"1", b"1"]
    finally:
        server.config_set("rdb-key-save-delay", 0)
        server.flushall()  # ends the save, too
        server.close()


def test_a_full_store_is_swept(lab: Lab, redis: RedisProcess) -> None:
    one = told(lab.replica(redis), stored(1), stored(2, engine="e"))
    one.hear(delta(2, Left("e")))
    redis.cli("config", "set", "maxmemory", "1")

    def is_swept() -> bool:
        one.tick()
        assert one.store.trouble == ""
        return one.store.statistics().entry_count == 1

    assert eventually(is_swept, timeout_s=PATIENCE_S)
    assert one.found(1) == (1, Trust.EXACT)


SWEPT = range(6 * ROWS_AT_ONCE)


def begun_to_sweep(lab: Lab, redis: RedisProcess) -> Replica:
    """A replica in the midst of a pass over rows of an engine that left; they stay the node's."""
    replica = lab.replica(redis, entries=2 * len(SWEPT))
    one = told(replica, stored(*SWEPT, engine="e"), stored(*SWEPT))
    one.hear(delta(2, Left("e")))
    one.tick()
    entries = int(redis.cli("hget", "kvstore:1:counts", "entries"))
    assert len(SWEPT) < entries < 2 * len(SWEPT)
    return one


def test_replicas_share_a_pass_over_the_rows(lab: Lab, redis: RedisProcess) -> None:
    one = begun_to_sweep(lab, redis)
    two = lab.replica(redis)
    two.tick()
    assert two.store.statistics().entry_count == len(SWEPT), "it went on where the other one was"
    one.hear(delta(3, stored(*SWEPT[:8], engine="f")))
    one.hear(delta(4, Left("f")))
    for _ in range(4):
        two.tick()
    assert two.store.statistics().entry_count == len(SWEPT), "the next pass has other slots"


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_pass_begins_again_in_a_store_that_was_restarted(lab: Lab, *, is_alone: bool) -> None:
    """Alone, or with all replicas: none is left to give the store another epoch."""
    with RedisProcess.start(lab.directory) as redis:
        port = redis.port
        one = begun_to_sweep(lab, redis)
        redis.cli("save")
        redis.kill()
        one.tick()
    with RedisProcess.start(lab.directory, port=port) as redis:
        left = one if is_alone else lab.replica(redis)
        assert eventually(lambda: left.believes_again(NOW), timeout_s=PATIENCE_S)
        for _ in range(4):
            left.tick()
        assert left.store.statistics().entry_count == len(SWEPT)


def test_a_store_that_is_back_but_takes_nothing_answers(
    lab: Lab, redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    one = told(lab.replica(redis), stored(1), stored(2, engine="e"))
    one.hear(delta(2, Left("e")))
    redis.cli("replicaof", "127.0.0.1", "1")
    # It was away until now, and what is void cannot be swept.
    two = lab.replica(redis)
    caplog.clear()
    for _ in range(3):
        two.tick(0)
        assert "takes nothing: " in two.store.trouble
        assert "Name its primary in --store." in two.store.trouble
        assert two.found(1, now_ms=0) == (1, Trust.STALE), "as of any record at the first look"
        assert two.match(1, now_ms=0).trust is Trust.CATCHING_UP
    assert caplog.records == [], "said once, at the first of all"
    redis.cli("replicaof", "no", "one")
    two.tick(0)
    assert two.store.trouble == ""


def test_a_store_that_drops_rows_by_itself_is_never_believed_wholly(
    one: Replica, redis: RedisProcess
) -> None:
    redis.cli("config", "set", "maxmemory", "100mb", "maxmemory-policy", "allkeys-lru")
    one.tick()
    assert "set noeviction" in one.store.trouble
    assert one.match(1).trust is Trust.CATCHING_UP
    redis.cli("config", "set", "maxmemory-policy", "volatile-lru")
    one.tick()
    assert one.match(1).trust is Trust.EXACT


def test_no_tenant_and_no_space_is_in_the_store(lab: Lab, redis: RedisProcess) -> None:
    one = lab.replica(redis)
    one.hear(hello())
    space = SpaceId(b"the-space" * 3 + b"-----")
    told = stored(1, tenant="the-tenant", engine="e")
    one.hear(delta(1, told, type(told)("the-tenant", space, told.tier, keys(2))))
    names = redis.cli("--no-raw", "keys", "*").splitlines()
    assert any("kvstore:1:b:" in name for name in names)
    redis.cli("save")
    directory = redis.cli("config", "get", "dir").split()[-1]
    image = Path(directory, "dump.rdb").read_bytes()
    assert b"kvstore:1:" in image
    for secret in (b"the-tenant", b"the-space"):
        assert secret not in image


def test_a_password_comes_from_a_file(lab: Lab) -> None:
    with RedisProcess.start(lab.directory, "--requirepass", "swordfish") as redis:
        for password, is_let_in in (("swordfish", True), ("guess", False), (None, False)):
            file = lab.directory / "password"
            file.write_text(f"{password}\n")
            name = str(file) if password is not None else None
            config = store_config(redis.url, password_file=name, ca=None)
            store = RedisStore(config, entry_count_max=1000, deadlines=PATIENT)
            try:
                if is_let_in:
                    lab.run(store.verify())
                    lab.run(store.tick(0))
                    assert store.trouble == ""
                else:
                    with pytest.raises(ConfigError, match="--store-password-file"):
                        lab.run(store.verify())
            finally:
                lab.run(store.close())


def test_tls_is_verified(lab: Lab) -> None:
    pki = lab.directory / "pki"
    make_certificates(pki, [Identity("client", "redis")], hosts=["127.0.0.1"])
    other = lab.directory / "other"
    make_certificates(other, [Identity("client", "x")])
    flags = [
        *("--tls-cert-file", str(pki / "client-redis.crt")),
        *("--tls-key-file", str(pki / "client-redis.key")),
        *("--tls-ca-cert-file", str(pki / "ca.crt"), "--tls-auth-clients", "no"),
    ]
    with RedisProcess.start(lab.directory, tls=flags) as redis:
        for ca, is_believed in ((pki, True), (other, False)):
            config = store_config(redis.url, password_file=None, ca=str(ca / "ca.crt"))
            store = RedisStore(config, entry_count_max=1000, deadlines=PATIENT)
            lab.run(store.tick(0))
            assert (store.trouble == "") is is_believed
            lab.run(store.close())


NONSENSE = {
    "no number": (
        ["hset", "{P}counts", "entries", "many"],
        "entries in the hash counts is b'many'",
    ),
    "too large a number": (["hset", "{P}counts", "rows", "9" * 99], "rows in the hash counts is"),
    "no slot number": (["set", "{P}ids", str(1 << 40)], "the key ids is 1099511627776"),
    "no body": (["hset", "{P}n:evil", "v", "0.1"], "the record of node 'evil' is none"),
    "no version": (
        ["hset", "{P}n:evil", "v", "x.1", "body", "y"],
        "the record of node 'evil' is none",
    ),
    "another body": (["hset", "{P}n:evil", "v", "0.1", "body", "y"], "for a Body is none"),
    "no name": (["hset", "{P}n:\udcff", "v", "0.1", "body", "y"], "'\\xff', which is no name"),
    "another type": (["rpush", "{P}nodes", "a"], "WRONGTYPE"),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_a_store_of_contents_that_make_no_sense_is_away_until_they_are_mended(
    one: Replica, redis: RedisProcess, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    command, reason = NONSENSE[what]
    command = [word.replace("{P}", "kvstore:1:") for word in command]
    if what == "another type":
        redis.cli("del", command[1])
    elif command[1].startswith("kvstore:1:n:"):
        redis.cli("sadd", "kvstore:1:nodes", command[1].removeprefix("kvstore:1:n:"))
    redis.cli(*command)
    caplog.clear()
    for _ in range(3):
        one.tick()
        assert "is unreachable: " in one.store.trouble
        assert reason in one.store.trouble
        assert one.match(1) == Answer(Trust.STALE, [])
    assert [r.getMessage().count(reason) for r in caplog.records] == [1], "one line, not one a poll"
    redis.cli("del", command[1])
    one.tick()
    assert one.store.trouble == ""
    assert one.match(1).trust is not Trust.STALE


def test_a_record_that_cannot_be_forgotten_is_one_line_and_not_one_a_poll(
    one: Replica, redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    redis.cli("hset", f"kvstore:1:n:{NODE}", "places", "none")
    caplog.clear()
    for _ in range(3):
        one.tick(NOW + FORGET_MS)
        assert "for a KeptSlots is none" in one.store.trouble
    assert len(caplog.records) == 1
    redis.cli("del", f"kvstore:1:n:{NODE}")
    one.tick(NOW + FORGET_MS)
    assert one.store.trouble == ""


def test_replicas_of_one_store_through_all_that_can_happen(tmp_path: Path) -> None:
    site, blocks = Site(tmp_path), make_keys(4)
    with RedisProcess.start(tmp_path) as redis:
        port = redis.port
        flags = ("--store", redis.url)
        with (
            site.index("i1", *flags) as one,
            site.index("i2", *flags) as two,
            site.node("n1", "--index", one.address, "--index", two.address) as node,
            RawEngine(node.socket) as engine,
            site.client(one.address) as first,
            site.client(two.address) as second,
        ):
            engine.open()
            engine.store(blocks[:2])
            assert becomes(first, blocks, {"n1": 2})
            assert becomes(second, blocks, {"n1": 2})
            assert f"store={redis.url}" in one.ready_line
            one.kill()
            engine.store(blocks[2:3])
            assert becomes(second, blocks, {"n1": 3})
            with site.index("i1", *flags, listen=one.address) as again:
                assert becomes(first, blocks, {"n1": 3})
                redis.pause()
                assert eventually(lambda: _is_stale(second, blocks), timeout_s=CONVERGES_S)
                redis.resume()
                assert becomes(second, blocks, {"n1": 3})
                redis.kill()
                assert eventually(lambda: _is_stale(first, blocks), timeout_s=CONVERGES_S)
                engine.store(blocks[3:])
                with RedisProcess.start(tmp_path, port=port):
                    assert becomes(first, blocks, {"n1": 4})
                    assert becomes(second, blocks, {"n1": 4})
                    node.kill()
                    assert eventually(lambda: matches(second, blocks) == {}, timeout_s=CONVERGES_S)
                    assert trust(second, "n1") is None
                assert again.process.poll() is None


def _is_stale(client: IndexClient, blocks: list[bytes]) -> bool:
    """Raises IndexUnavailable when it does not answer at all."""
    answer = client.match(TENANT, kit.SPACE, b"".join(blocks))
    return answer.trust is Trust.STALE and not answer.matches
