"""Two nodes, real movers: what one holds the other serves, and nothing that dies costs more than a
miss."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvstore.testing.index_process import IndexProcess, Lab
from kvstore.testing.peers import PeerPair, at_rest, metric, mover_of
from kvstore.testing.raw_engine import EngineGone, RawEngine, make_keys

TRANSPORTS = ("tcp", "nixl")
BLOCKS = 300
SEED = 20261121


@pytest.fixture(scope="module", params=TRANSPORTS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PeerPair]:
    folder = tmp_path_factory.mktemp("pair")
    # An engine that hangs up here leaves its credits in doubt: its process, this one, lives on.
    with PeerPair.start(folder, transport=request.param, dram="1GiB") as pair:
        yield pair


def right(engine: RawEngine, reply: object, keys: list[bytes]) -> bool:
    """Whether every byte of every rank's leased blocks is that of its key."""
    blocks = [engine.read(reply, rank=rank) for rank in range(len(engine.ranks))]  # type: ignore[arg-type]
    count = len(blocks[0])
    return all(
        block == key * (engine.block_bytes // len(key))
        for its in blocks
        for block, key in zip(its, keys[:count], strict=True)
    )


@pytest.mark.parametrize(
    ("there", "here"), [(1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2)]
)
def test_every_parallel_size_is_served_from_the_other_node(
    pair: PeerPair, there: int, here: int
) -> None:
    keys = make_keys(50, seed=f"{there}-{here}")
    with (
        RawEngine(pair.b.socket, engine_id="b", rank_count=there) as holder,
        RawEngine(pair.a.socket, engine_id="a", rank_count=here) as asker,
    ):
        holder.open()
        asker.open()
        holder.store(keys)
        reply = pair.borrow(asker, keys)
        assert right(asker, reply, keys)
        asker.release(reply)
    at_rest(pair.a)
    at_rest(pair.b)


def test_who_did_not_store_it_is_never_given_it(pair: PeerPair) -> None:
    keys = make_keys(20, seed="mine")
    with (
        RawEngine(pair.b.socket, engine_id="b", tenant="one") as holder,
        RawEngine(pair.a.socket, engine_id="a", tenant="two") as asker,
        RawEngine(pair.a.socket, engine_id="c", tenant="one", model="other") as stranger,
        RawEngine(pair.a.socket, engine_id="d", tenant="one") as friend,
    ):
        for engine in (holder, asker, stranger, friend):
            engine.open()
        holder.store(keys)
        pair.borrow(friend, keys)
        assert asker.lease(keys).slots == b""
        assert stranger.lease(keys).slots == b""


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


ACTS: dict[str, Callable[[PeerPair], psutil.Process]] = {
    "mover here": lambda pair: mover_of(pair.a),
    "mover there": lambda pair: mover_of(pair.b),
    "node here": lambda pair: psutil.Process(pair.a.pid),
    "node there": lambda pair: psutil.Process(pair.b.pid),
}


CASES = [
    *((transport, victim, signal.SIGKILL) for transport in TRANSPORTS for victim in ACTS),
    ("tcp", "mover here", signal.SIGSTOP),
    ("tcp", "mover there", signal.SIGSTOP),
    ("tcp", "node there", signal.SIGSTOP),
]


@pytest.mark.parametrize(("transport", "victim", "number"), CASES)
def test_what_dies_or_stops_while_blocks_come_costs_a_miss_at_most(
    transport: str, victim: str, number: signal.Signals, tmp_path: Path
) -> None:
    chance = random.Random(f"{SEED}-{transport}-{victim}-{number}")
    # An engine that hangs up here leaves its credits in doubt: its process, this one, lives on.
    with PeerPair.start(tmp_path, transport=transport, dram="1GiB") as pair:
        holder = RawEngine(pair.b.socket, engine_id="b", timeout_s=60)
        holder.open()
        for turn in range(2):
            keys = make_keys(BLOCKS, seed=str(turn))
            holder.store(keys)
            process = ACTS[victim](pair)
            with RawEngine(pair.a.socket, engine_id="a", timeout_s=60) as asker:
                asker.open()
                timer = threading.Timer(chance.uniform(0.0, 0.08), _send, (process, number))
                timer.start()
                try:
                    with contextlib.suppress(EngineGone):
                        reply = asker.lease(keys)
                        assert right(asker, reply, keys)
                        asker.release(reply)
                finally:
                    timer.join()
                    _send(process, signal.SIGCONT)
            with RawEngine(pair.a.socket, engine_id="c", timeout_s=60) as again:
                again.open()
                if victim == "node there":
                    holder.close()
                    holder = RawEngine(pair.b.socket, engine_id="b", timeout_s=60)
                    holder.open()
                reply = pair.borrow(again, keys)
                assert right(again, reply, keys)
                again.release(reply)
        holder.close()
        for node in (pair.a, pair.b):
            at_rest(node)
            assert metric(node, "kvstore_loop_failures_total") == 0


ASKER = """
import sys
from pathlib import Path
from kvstore.testing.raw_engine import RawEngine, make_keys

with RawEngine(Path(sys.argv[1]), engine_id="victim", timeout_s=60) as engine:
    engine.open()
    print("open", flush=True)
    sys.stdin.readline()
    engine.lease(make_keys(int(sys.argv[2]), seed=sys.argv[3]))
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_stops_while_its_blocks_come_leaves_nothing(
    pair: PeerPair, number: signal.Signals
) -> None:
    chance = random.Random(f"{SEED}-{number}")
    for turn in range(3):
        seed = f"{number}-{turn}"
        keys = make_keys(BLOCKS, seed=seed)
        command = [sys.executable, "-c", ASKER, str(pair.a.socket), str(BLOCKS), seed]
        pipe = subprocess.PIPE
        with (
            RawEngine(pair.b.socket, engine_id="b", timeout_s=60) as holder,
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as victim,
        ):
            try:
                assert victim.stdin is not None
                assert victim.stdout is not None
                assert victim.stdout.readline() == "open\n"
                holder.open()
                holder.store(keys)
                victim.stdin.write("go\n")
                victim.stdin.flush()
                timer = threading.Timer(chance.uniform(0.0, 0.1), victim.send_signal, (number,))
                timer.start()
                timer.join()
                with RawEngine(pair.a.socket, engine_id="c", timeout_s=60) as other:
                    other.open()
                    reply = pair.borrow(other, keys)
                    assert right(other, reply, keys)
                    other.release(reply)
            finally:
                victim.kill()
        for node in (pair.a, pair.b):
            at_rest(node)


def test_an_index_that_stops_or_dies_while_blocks_come_costs_a_miss_at_most(tmp_path: Path) -> None:
    flags = Lab(tmp_path).flags("index", "i1")
    index = IndexProcess.start(tmp_path, flags)
    try:
        with (
            PeerPair.start(tmp_path, transport="tcp", dram="1GiB", index=index.address) as pair,
            RawEngine(pair.b.socket, engine_id="b", timeout_s=60) as holder,
            RawEngine(pair.a.socket, engine_id="a", timeout_s=60) as asker,
        ):
            holder.open()
            asker.open()
            chance = random.Random(SEED)
            for number in (signal.SIGSTOP, signal.SIGKILL):
                keys = make_keys(BLOCKS, seed=str(number))
                holder.store(keys)
                end = threading.Timer(
                    chance.uniform(0.0, 0.05), index.process.send_signal, (number,)
                )
                end.start()
                reply = asker.lease(keys)
                end.join()
                assert right(asker, reply, keys)
                asker.release(reply)
                unknown = asker.lease(make_keys(BLOCKS, seed=f"{number}-unknown"))
                assert unknown.slots == b"", "an answer without an index"
                asker.release(unknown)
                if number is signal.SIGSTOP:
                    index.resume()
                else:
                    address = index.address
                    index.kill()
                    index = IndexProcess.start(tmp_path, flags, listen=address)
                reply = pair.borrow(asker, keys)
                assert right(asker, reply, keys)
                asker.release(reply)
    finally:
        index.kill()
