"""Reading KV events of engines that come, lose, stop and go."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.config.cluster import (
    ENGINE_COUNT_MAX,
    check_endpoint,
    parse_sources,
)
from kvstore.engine.events import Follow, Unfollow
from kvstore.errors import ConfigError
from kvstore.index import engine_feed
from kvstore.index.chain import block_keys
from kvstore.node.node import MonotonicClock
from kvstore.peers import engine_memory
from kvstore.peers.engine_memory import FRAMES_MAX, EngineMemory
from kvstore.proto.rows import MemoryReport
from kvstore.types import ConnectionId, EngineSource, SpaceId, Tier
from kvstore.wire.feed import Change, Left, Stored
from kvstore.wire.kv_events import PAYLOAD_BYTES_MAX
from tests.integration.node.conftest import eventually
from tests.kit.engine_publisher import (
    BLOCK_TOKENS,
    CLEARED,
    SEED,
    EnginePublisher,
    removed,
    stored,
)
from tests.style.tree import ROOT

SPACE = SpaceId(b"s" * 32)
TOKENS = [random.Random(2).randrange(1000) for _ in range(8 * BLOCK_TOKENS)]
KEYS = block_keys(TOKENS, block_tokens=BLOCK_TOKENS, seed=SEED)
JOINS_S = 60.0


class Heard:
    """What an index would hold: by engine and rank, in tier hbm."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, int], set[bytes]] = {}
        self.lock = threading.Lock()

    def __call__(self, told: Change) -> None:
        with self.lock:
            its = self.held.setdefault((told.engine, told.rank), set())
            if isinstance(told, Left):
                its.clear()
                return
            assert (told.tier, told.tenant, told.space) == (Tier.HBM, "default", SPACE)
            keys = {told.keys[at : at + 32] for at in range(0, len(told.keys), 32)}
            self.held[told.engine, told.rank] = (
                its | keys if isinstance(told, Stored) else its - keys
            )

    def blocks(self, engine: str = "e", rank: int = 0) -> set[int]:
        with self.lock:
            held = self.held.get((engine, rank), set())
            return {number for number, key in enumerate(KEYS) if key in held}


def source(endpoint: str, **changes: Any) -> EngineSource:
    made = EngineSource(
        engine="e",
        rank=0,
        endpoint=endpoint,
        replay_endpoint=f"{endpoint}.replay",
        tenant="default",
        space=SPACE,
        hash_seed=SEED,
    )
    return msgspec.structs.replace(made, **changes)


def follow(connection: int, endpoint: str, **changes: Any) -> Follow:
    told = source(endpoint, replay_endpoint="", block_tokens=BLOCK_TOKENS, names_are_keys=True)
    its = msgspec.structs.replace(told, **changes)
    return Follow(ConnectionId(connection), its)


@contextlib.contextmanager
def reader(*sources: EngineSource) -> Iterator[tuple[EngineMemory, Heard]]:
    heard = Heard()
    memory = EngineMemory(sources, clock=MonotonicClock(), tell=heard)
    with contextlib.closing(memory):
        memory.start()
        yield memory, heard
    assert not any(heard.held.values()), "what is not read any more is taken back"


def comes(heard: Heard, blocks: set[int], **whose: Any) -> bool:
    return eventually(lambda: heard.blocks(**whose) == blocks, timeout_s=JOINS_S)


def is_live(memory: EngineMemory) -> Callable[[], bool]:
    return lambda: [row.state for row in memory.reports()] == ["live"]


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/kv"


@pytest.mark.parametrize("whole", [False, True], ids=["numbers", "whole"])
def test_what_an_engine_has_and_gets_and_loses_is_told(endpoint: str, whole: bool) -> None:
    with EnginePublisher(endpoint) as engine:
        engine.publish(stored(TOKENS, 0, 3, whole=whole))
        with reader(source(endpoint)) as (memory, heard):
            assert comes(heard, {0, 1, 2})
            assert eventually(is_live(memory), timeout_s=JOINS_S)
            assert engine.await_subscriber(timeout_s=JOINS_S)
            engine.publish(stored(TOKENS, 3, 5, whole=whole), removed(TOKENS, 4, whole=whole))
            assert comes(heard, {0, 1, 2, 3})
            engine.publish(removed(TOKENS, 0, whole=whole), is_lost=True)
            engine.publish(removed(TOKENS, 2, whole=whole))
            assert comes(heard, {1, 3}), "the lost one is replayed"
            assert memory.reports() == [
                MemoryReport("e", 0, SPACE.hex()[:16], "default", "live", 2, 0)
            ]
            assert memory.trouble == ""
            assert memory.block_count == 2
            engine.publish(CLEARED)
            assert comes(heard, set())


def test_an_engine_that_hashes_ahead_is_told_of(endpoint: str) -> None:
    ahead = stored(TOKENS, 0, 2) | {"lookahead_token_ids": [[1, 2], [3, 4]]}
    with EnginePublisher(endpoint) as engine:
        engine.publish(ahead)
        with reader(source(endpoint)) as (memory, heard):
            assert comes(heard, {0, 1})
            (row,) = memory.reports()
            assert row.note == (
                'it hashes 2 token(s) ahead: add "disable_lookahead_block_hashes" to'
                " --speculative-config"
            )
            assert eventually(is_live(memory), timeout_s=JOINS_S)
            assert memory.trouble == f"engine e: {row.note}"


def test_snapshots_and_questions_see_what_was_told(endpoint: str) -> None:
    with (
        EnginePublisher(endpoint) as engine,
        reader(source(endpoint), source(f"{endpoint}2", engine="unreachable")) as (memory, heard),
    ):
        engine.publish(stored(TOKENS, 0, 3))
        assert comes(heard, {0, 1, 2})
        own = Stored("t", SPACE, Tier.DRAM, KEYS[7])
        ask = memory.behind(lambda row: ([own], -1 if row else 1))
        row, offers = 0, []
        while row >= 0:
            slice_, row = ask(row)
            offers += slice_
        (its,) = offers[2:]
        assert offers[:2] == [own, own]
        assert (its.engine, its.tier) == ("e", Tier.HBM)
        assert its.keys == b"".join(KEYS[:3])
        asked: dict[str, Any] = {"tenant": "default", "space": SPACE}
        for keys, blocks in (
            ([0, 1, 2, 3], [3]),
            ([0, 5], [1]),
            ([0, 1], [2]),
            ([4], []),
            ([], []),
        ):
            prompt = b"".join(KEYS[block] for block in keys)
            assert [row.blocks for row in memory.reports(**asked, keys=prompt)] == blocks
        assert memory.reports(tenant="other", space=SPACE, keys=KEYS[0]) == []
        assert memory.reports(tenant="default", space=SpaceId(b"o" * 32), keys=KEYS[0]) == []
        assert memory.trouble == f"KV events of unreachable at {endpoint}2 are not reached"


def test_an_engine_that_comes_again_begins_anew_and_one_that_goes_holds_nothing(
    endpoint: str,
) -> None:
    with reader(source(endpoint)) as (memory, heard):
        with EnginePublisher(endpoint) as engine:
            engine.publish(stored(TOKENS, 0, 3))
            assert comes(heard, {0, 1, 2})
        assert comes(heard, set())
        assert memory.reports()[0].state == "unreachable"
        with EnginePublisher(endpoint) as engine:
            for block in range(4):
                engine.publish(stored(TOKENS, block, block + 1))
            assert comes(heard, {0, 1, 2, 3}), "its numbers are not those of the one before"
            assert engine.asked[0] == 0


def test_an_engine_that_is_stopped_holds_nothing(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_memory, "HEARTBEAT_MS", 100)
    program = (
        "import sys, threading\n"
        "from tests.kit.engine_publisher import EnginePublisher, stored\n"
        "with EnginePublisher(sys.argv[1]) as engine:\n"
        "    engine.publish(stored([int(t) for t in sys.argv[2].split()], 0, 2))\n"
        "    threading.Event().wait()\n"
    )
    command = [sys.executable, "-c", program, endpoint, " ".join(map(str, TOKENS))]
    with (
        reader(source(endpoint)) as (_, heard),
        subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as engine,
    ):
        try:
            assert comes(heard, {0, 1})
            engine.send_signal(signal.SIGSTOP)
            assert comes(heard, set()), "its kernel keeps the connection"
            engine.send_signal(signal.SIGCONT)
            assert comes(heard, {0, 1})
        finally:
            engine.kill()


def test_garbage_is_counted_and_the_engine_is_read_on(endpoint: str) -> None:
    with EnginePublisher(endpoint) as engine, reader(source(endpoint)) as (memory, heard):
        assert engine.await_subscriber(timeout_s=JOINS_S)
        assert eventually(is_live(memory), timeout_s=JOINS_S)
        for frames in ((b"one",), (b"", b"short", b"x"), (b"",) * 9, (b"", b"\xff" * 8, b"")):
            engine.live.send_multipart(frames)
        engine.publish(stored(TOKENS, 0, 2))
        assert comes(heard, {0, 1})
        engine.publish_payload(os.urandom(100))
        assert comes(heard, set())
        engine.publish(stored(TOKENS, 0, 1))
        assert comes(heard, {0})
        assert memory.counters.refused == 5


@pytest.mark.parametrize("frames", [(b"",) * (FRAMES_MAX + 1), (bytes(PAYLOAD_BYTES_MAX),) * 3])
def test_a_message_of_too_many_frames_or_bytes_ends_the_connection(
    endpoint: str,
    frames: tuple[bytes, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine_memory, "REOPEN_MS_MAX", 100)
    with EnginePublisher(endpoint) as engine, reader(source(endpoint)) as (memory, heard):
        assert engine.await_subscriber(timeout_s=JOINS_S)
        engine.publish(stored(TOKENS, 0, 2))
        assert comes(heard, {0, 1})
        engine.live.send_multipart(frames)
        assert eventually(lambda: memory.counters.refused == 1, timeout_s=JOINS_S)
        engine.publish(stored(TOKENS, 2, 3))
        assert comes(heard, {0, 1, 2}), "it is joined again"
    assert "Message too long" in caplog.text


def test_attached_engines_are_followed_until_they_are_gone(endpoint: str) -> None:
    with (
        EnginePublisher(endpoint, replays=False) as engine,
        EnginePublisher(f"{endpoint}2", replays=False) as other,
        reader() as (memory, heard),
    ):
        memory.carry_out(follow(1, endpoint))
        assert engine.await_subscriber(timeout_s=JOINS_S)
        assert eventually(is_live(memory), timeout_s=JOINS_S)
        # Whole names of an engine with a connector are keys: no parent is needed.
        engine.publish(stored(TOKENS, 2, 4, whole=True))
        assert comes(heard, {2, 3})
        memory.carry_out(follow(1, endpoint))
        engine.publish(stored(TOKENS, 0, 1, whole=True))
        assert comes(heard, {0, 2, 3}), "said again, it stays"
        memory.carry_out(follow(2, f"{endpoint}2"))
        assert comes(heard, set()), "it came back before its end was noticed"
        assert other.await_subscriber(timeout_s=JOINS_S)
        assert eventually(is_live(memory), timeout_s=JOINS_S)
        memory.carry_out(Unfollow(ConnectionId(1)))
        other.publish(stored(TOKENS, 0, 1, whole=True))
        assert comes(heard, {0})
        memory.carry_out(Unfollow(ConnectionId(2)))
        assert comes(heard, set())
        assert memory.reports() == []


def test_whoever_attaches_or_asks_does_not_wait_for_an_engine_that_says_much(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_held, may_go_on = threading.Event(), threading.Event()
    turn = engine_memory._Follower.turn

    def held(self: Any, *args: Any) -> Any:
        is_held.set()
        assert may_go_on.wait(JOINS_S)
        return turn(self, *args)

    monkeypatch.setattr(engine_memory._Follower, "turn", held)
    asked: list[Any] = []

    def ask(memory: EngineMemory) -> None:
        memory.carry_out(follow(1, f"{endpoint}2", engine="other"))
        memory.carry_out(Unfollow(ConnectionId(1)))
        asked.append(memory.reports(tenant="default", space=SPACE, keys=KEYS[0]))
        asked.append((memory.block_count, memory.trouble != ""))

    with reader(source(endpoint)) as (memory, _):
        assert is_held.wait(JOINS_S)
        asking = threading.Thread(target=ask, args=(memory,))
        asking.start()
        asking.join(JOINS_S / 2)
        did_wait = asking.is_alive()
        may_go_on.set()
        asking.join()
    assert not did_wait
    assert asked == [[], (0, True)]


def test_engines_take_turns_while_one_says_much(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_feed, "PIECE_WORK_MAX", 2)
    happened: list[str] = []
    turn = engine_memory._Follower.turn

    def noted(self: Any, *args: Any) -> None:
        said, say = list[Any](), self.feed._say

        def count(change: Any) -> None:
            said.append(change)
            say(change)

        with monkeypatch.context() as patch:
            patch.setattr(self.feed, "_say", count)
            turn(self, *args)
        happened.append(f"{self.source.engine} {len(said)}")

    monkeypatch.setattr(engine_memory._Follower, "turn", noted)
    with (
        EnginePublisher(endpoint, replays=False) as engine,
        reader(
            source(endpoint, replay_endpoint=""),
            source(f"{endpoint}2", replay_endpoint="", engine="other"),
        ) as (memory, heard),
    ):
        assert engine.await_subscriber(timeout_s=JOINS_S)
        assert eventually(lambda: memory.reports()[0].state == "live", timeout_s=JOINS_S)
        engine.publish(stored(TOKENS, 0, 8))
        engine.publish(removed(TOKENS, 7))
        assert comes(heard, set(range(7)))
    its = [each for each in happened if not each.endswith(" 0")]
    first, last = happened.index(its[0]), len(happened) - happened[::-1].index("e 1")
    assert happened[first:last].count("other 0") >= 4, happened


def test_an_attached_engine_cannot_lead_the_node_elsewhere(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with reader(source(endpoint)) as (memory, _):
        for number, place in enumerate(("tcp://10.0.0.1:5557", "udp://x", "", "ipc://kv")):
            memory.carry_out(follow(1 + number, place))
        memory.carry_out(follow(7, endpoint, replay_endpoint="tcp://10.0.0.1:1"))
        memory.carry_out(follow(8, f"{endpoint}3"))
        for number in range(9, 9 + ENGINE_COUNT_MAX):
            memory.carry_out(follow(number, f"{endpoint}4", engine=f"e{number}"))
        assert eventually(lambda: len(memory.reports()) >= ENGINE_COUNT_MAX)
        assert eventually(lambda: "are followed already" in caplog.text)
        assert len(memory.reports()) == ENGINE_COUNT_MAX
        assert {row.engine for row in memory.reports()} >= {"e", "e9"}
    assert "KV events at 10.0.0.1 come from another machine without TLS" in caplog.text
    assert "give that another NAME" in caplog.text


def test_what_engine_events_says_is_read() -> None:
    text = f"gpu0=ipc:///run/kv,space={SPACE.hex()}"
    assert parse_sources([text], insecure=False) == (
        source("ipc:///run/kv", engine="gpu0", replay_endpoint=""),
    )
    more = f"{text},replay=tcp://localhost:5558,tenant=t,rank=3,seed=7"
    (found,) = parse_sources([more], insecure=False)
    assert found == source(
        "ipc:///run/kv",
        engine="gpu0",
        replay_endpoint="tcp://127.0.0.1:5558",
        tenant="t",
        rank=3,
        hash_seed="7",
    )
    assert len(parse_sources([text, more], insecure=False)) == 2
    assert check_endpoint("tcp://[::1]:5", insecure=False) == "tcp://[::1]:5"
    assert check_endpoint("tcp://10.0.0.1:5", insecure=True) == "tcp://10.0.0.1:5"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("gpu0", "must be NAME=ENDPOINT,space=HEX"),
        ("=ipc:///x", "must be NAME=ENDPOINT,space=HEX"),
        ("e=ipc:///x", "give it space=HEX, 64 hex digits"),
        ("e=ipc:///x,space=3f9a", "give it space=HEX, 64 hex digits"),
        ("e=ipc:///x,space=", "'space=' must be one of replay=…, space=…"),
        ("e=ipc:///x,size=3", "'size=3' must be one of"),
        ("e=ipc:///x,rank=1,rank=2", "each once"),
        ("e=ipc:///x,rank=one", "rank 'one' must be a data-parallel rank"),
        ("e=ipc://x", "must be ipc:///PATH or tcp://ADDRESS:PORT"),
        ("e=tcp://*:5557", "must be ipc:///PATH or tcp://ADDRESS:PORT"),
        ("e=tcp://0.0.0.0:5557", "must be ipc:///PATH or tcp://ADDRESS:PORT"),
        ("e=tcp://127.0.0.1:0", "must be ipc:///PATH or tcp://ADDRESS:PORT"),
        ("e=tcp://10.0.0.1:5557", "or add --insecure if intended"),
        ("e=ipc:///x,replay=tcp://10.0.0.1:5557", "or add --insecure if intended"),
    ],
)
def test_what_cannot_be_says_how_to_mend_it(wrong: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_sources([wrong], insecure=False)
    assert sentence in str(raised.value)


def test_engines_have_each_a_name_and_are_not_many() -> None:
    one = f"e=ipc:///x,space={SPACE.hex()}"
    with pytest.raises(ConfigError, match="names an engine twice"):
        parse_sources([one, one], insecure=False)
    with pytest.raises(ConfigError, match="64 engines at most"):
        parse_sources([f"{n}{one}" for n in range(65)], insecure=False)
