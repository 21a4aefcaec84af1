"""What the global prefix index costs, beside Dynamo's `RadixTree` in the same process.

- events: 512 blocks each, as a node tells them, in the form in which they arrive, which is made
  beforehand: the peer's JSON, the only one that it takes, and our msgpack (from_wire); and ours as
  objects;
- matches: the first 32, 128 and 512 blocks of a prompt that is held; ours are whole answers, with
  tiers and trust, the peer's are lengths by worker;
- many: a prompt of 4,000 blocks on 64 nodes, held by all of them to the end, by each to another
  length, and by each in tiers that change from block to block (no two blocks have the same set);
- plain: the same without numba;
- full: 10,000,000 blocks with one holder each, in a fresh process: memory, events and matches.

Both get the same hashes: ours all 32 bytes, the peer the first eight. The sides take turns, and the
medians of each are compared. The peer's part needs `requirements/dynamo.txt` (`make bench-index`).
Writes bench/results/index_ops.json.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from kvstore.index import holdings
from kvstore.index.holdings import Holdings
from kvstore.index.index import Index
from kvstore.types import KEY_BYTES, Incarnation, SpaceId, Tier
from kvstore.wire.feed import Delta, FeedBeat, Hello, Stored, decode_word, encode
from tests.kit.index_check import done

SEED = 1
BATCH = 512
CHAINS = 400
WORKERS = 8
LENGTHS = (32, 128, 512)
NODES, LONG = 64, 4000
ENTRIES = 10_000_000
SPACE = SpaceId(bytes(range(32)))
NOW_MS = 10_000
GOALS = {"bytes_per_entry": 120, "long_p99_us": 1000, "ratio": 1.0}


class Ours:
    """An index that hears what nodes say."""

    def __init__(self, *, entries: int, nodes: int, is_native: bool | None = None) -> None:
        self.index = Index(Holdings(entries, is_native=is_native), now_ms=0)
        self.sequences = [0] * nodes
        self.hellos = [Hello(f"n{node}", Incarnation(1), 1, 0) for node in range(nodes)]
        for hello in self.hellos:
            done(self.index.hear(hello, NOW_MS))

    def delta(self, node: int, keys: bytes, tier: Tier = Tier.DRAM) -> Delta:
        self.sequences[node] += 1
        told = (Stored("t", SPACE, tier, keys),)
        return Delta(f"n{node}", Incarnation(1), 1, self.sequences[node], told)

    def word(self, node: int, keys: bytes) -> bytes:
        """The same as a node sends it."""
        return encode(self.delta(node, keys))

    def tell(self, node: int, keys: bytes, tier: Tier = Tier.DRAM) -> None:
        done(self.index.hear(self.delta(node, keys, tier), NOW_MS))

    def match(self, keys: bytes) -> int:
        return max(m.file_blocks for m in done(self.index.match("t", SPACE, keys, NOW_MS)).matches)


class Peer:
    """Dynamo's tree, as its own router drives it."""

    def __init__(self) -> None:
        from dynamo._core import RadixTree

        self.tree = RadixTree()

    @staticmethod
    def event(number: int, hashes: list[int]) -> bytes:
        blocks = [{"block_hash": h, "tokens_hash": h} for h in hashes]
        data = {"stored": {"parent_hash": None, "blocks": blocks}}
        return json.dumps({"event_id": number, "dp_rank": 0, "data": data}).encode()

    def match(self, hashes: list[int]) -> int:
        return int(max(self.tree.find_matches(hashes, False).scores.values()))


def timed_us(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def hashes_of(keys: bytes) -> list[int]:
    words: list[int] = np.frombuffer(keys, dtype="<u8")[::4].tolist()
    return words


def percentiles(values: Iterable[float]) -> dict[str, float]:
    p50, p99 = np.percentile(list(values), [50, 99])
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2)}


def events(chains: list[bytes], ours: Ours, peer: Peer | None) -> dict[str, Any]:
    """Blocks per second of events of 512, chains going to the workers in turn."""
    times: dict[str, list[float]] = {"ours": [], "ours_from_wire": [], "peer": []}
    for number, chain in enumerate(chains):
        worker = number % WORKERS
        word = ours.word(worker, chain)
        event = peer.event(number, hashes_of(chain)) if peer is not None else b""

        def from_wire(word: bytes = word, worker: int = worker) -> None:
            told = decode_word(word, ours.hellos[worker])
            done(ours.index.hear(told, NOW_MS))

        def by_peer(event: bytes = event, worker: int = worker) -> None:
            if peer is not None:
                peer.tree.apply_event(worker, event)

        sides = [("ours_from_wire", from_wire), ("peer", by_peer)]
        for name, call in sides[:: 1 if number % 2 else -1]:
            times[name].append(timed_us(call))
        fresh = hashlib.shake_128(chain).digest(len(chain))  # as new as the other was
        delta = ours.delta(worker, fresh)
        times["ours"].append(timed_us(lambda d=delta: done(ours.index.hear(d, NOW_MS))))  # type: ignore[misc]
    if peer is None:
        del times["peer"]
    return {
        f"{name}_blocks_per_s": round(BATCH / (float(np.median(us)) / 1e6))
        for name, us in times.items()
    }


def matches(chains: list[bytes], ours: Ours, peer: Peer | None, rounds: int) -> dict[str, Any]:
    """Prefixes of chains that are held, in an order that a cache does not know."""
    random = np.random.default_rng(SEED)
    result: dict[str, Any] = {}
    for length in LENGTHS:
        times: dict[str, list[float]] = {"ours_us": [], "peer_us": []}
        for pick in random.integers(len(chains), size=rounds).tolist():
            keys = chains[pick][: length * KEY_BYTES]
            hashes = hashes_of(keys)
            times["ours_us"].append(timed_us(lambda k=keys: ours.match(k)))  # type: ignore[misc]
            assert ours.match(keys) == length
            if peer is not None:
                times["peer_us"].append(timed_us(lambda h=hashes: peer.match(h)))  # type: ignore[misc]
                assert peer.match(hashes) == length
        result[str(length)] = {name: percentiles(us) for name, us in times.items() if us}
    return result


def many(rounds: int) -> dict[str, Any]:
    """One long prompt on many nodes."""
    random = np.random.default_rng(SEED)
    keys = random.bytes(LONG * KEY_BYTES)
    result = {}
    for shape in ("whole", "stairs", "ragged"):
        ours = Ours(entries=1_000_000, nodes=NODES)
        for node in range(NODES):
            blocks = LONG * (node + 1) // NODES if shape == "stairs" else LONG
            ours.tell(node, keys[: blocks * KEY_BYTES], Tier.FILE)
            if shape == "ragged":
                in_dram = np.frombuffer(keys, dtype="V32")[random.random(LONG) < 0.5]
                ours.tell(node, in_dram.tobytes(), Tier.DRAM)
        times = [timed_us(lambda o=ours: o.match(keys)) for _ in range(rounds)]  # type: ignore[misc]
        answer = done(ours.index.match("t", SPACE, keys, NOW_MS))
        assert max(match.file_blocks for match in answer.matches) == LONG
        result[shape] = {"holders": len(answer.matches), "us": percentiles(times)}
    return result


def full(entries: int) -> dict[str, Any]:
    """Memory of so many blocks of one holder each, in this process."""
    holdings.compiled()
    random = np.random.default_rng(SEED)
    gc.collect()
    before = _rss_bytes()
    ours = Ours(entries=entries, nodes=NODES)
    sample, times, chains = [], [], entries // BATCH
    for number in range(chains):
        keys = random.bytes(BATCH * KEY_BYTES)
        delta = ours.delta(number % NODES, keys)
        times.append(timed_us(lambda d=delta: done(ours.index.hear(d, NOW_MS))))  # type: ignore[misc]
        if number % (chains // 500) == 0:
            sample.append(keys)
    gc.collect()
    grown = _rss_bytes() - before
    statistics = ours.index.statistics()
    asked = [timed_us(lambda k=keys: ours.match(k)) for keys in sample]  # type: ignore[misc]
    words = [FeedBeat(f"n{n}", Incarnation(1), 1, ours.sequences[n]) for n in range(NODES)]
    beats = [timed_us(lambda w=word: done(ours.index.hear(w, NOW_MS))) for word in words]  # type: ignore[misc]
    last = chains * BATCH // NODES
    done(ours.index.hear(Hello("n0", Incarnation(2), 1, 0), NOW_MS))
    sweeps = [timed_us(lambda: done(ours.index.tick(NOW_MS))) for _ in range(50)]
    return {
        "entries": statistics.entry_count,
        "bytes_per_entry": round(grown / statistics.entry_count, 1),
        "bytes_per_entry_at_most": round(statistics.memory_bytes / entries, 1),
        "events_blocks_per_s": round(BATCH / (float(np.median(times)) / 1e6)),
        "match_512_us": percentiles(asked),
        "beat_us": percentiles(beats),
        "tick_us_while_a_node_is_swept": percentiles(sweeps),
        "blocks_of_that_node": last,
    }


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _in_fresh_process(entries: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--only-full", "--entries", str(entries)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _plain(chains: list[bytes], rounds: int) -> dict[str, Any]:
    plain = Ours(entries=200_000, nodes=WORKERS, is_native=False)
    few = chains[:40]
    return {**events(few, plain, None), "match": matches(few, plain, None, rounds)}


def _goals(result: dict[str, Any]) -> dict[str, bool]:
    met = {
        "bytes_per_entry": result["full"]["bytes_per_entry_at_most"] <= GOALS["bytes_per_entry"],
    }
    for shape, found in result["many"].items():
        met[f"long_p99_{shape}"] = found["us"]["p99"] <= GOALS["long_p99_us"]
    told = result["events"]
    if "peer_blocks_per_s" in told:
        met["events"] = (
            told["ours_from_wire_blocks_per_s"] >= GOALS["ratio"] * told["peer_blocks_per_s"]
        )
        for length, both in result["match"].items():
            ratio = both["peer_us"]["p50"] / both["ours_us"]["p50"]
            result["match"][length]["ratio"] = round(ratio, 2)
            met[f"match_{length}"] = ratio >= GOALS["ratio"]
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000, help="matches per measurement")
    parser.add_argument("--entries", type=int, default=ENTRIES, help="blocks of the full index")
    parser.add_argument("--only-full", action="store_true", help="only the full index, here")
    parser.add_argument("--print", action="store_true", help="print the result, write no record")
    options = parser.parse_args()
    if options.only_full:
        print(json.dumps(full(options.entries)))
        return 0
    begin, cpu = time.perf_counter(), time.process_time()
    holdings.compiled()
    compiled = {
        "wall_s": round(time.perf_counter() - begin, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
    }
    random = np.random.default_rng(SEED)
    chains = [random.bytes(BATCH * KEY_BYTES) for _ in range(CHAINS)]
    ours = Ours(entries=1_000_000, nodes=WORKERS)
    peer = Peer() if importlib.util.find_spec("dynamo") else None
    result: dict[str, Any] = {
        "compile": compiled,
        "events": events(chains, ours, peer),
        "match": matches(chains, ours, peer, options.rounds),
        "many": many(options.rounds),
        "plain": _plain(chains, options.rounds // 10),
        "full": _in_fresh_process(options.entries),
        "goals": GOALS,
        "packages": record.environment()["packages"],
    }
    result["goals_met"] = _goals(result)
    if options.print:
        print(json.dumps(result))
    else:
        print(record.write("index_ops", result, seed=SEED).read_text())
    return 0 if all(result["goals_met"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
