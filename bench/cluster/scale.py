"""An index of a whole cluster, simulated: 1,000 nodes, 100,000,000 (block, holder) pairs.

Every node holds chains of 500 blocks; each tenth chain is held by ten nodes. Memory and matches are
taken with numbers of nodes that grow tenfold, so that the law shows, up to the greatest that fits
three quarters of the memory that is free. Each size is a fresh process; one that fails costs no
smaller one.

Churn, at the greatest: a minute in which one chain of a hundred is dropped and another stored in
its place, evenly spread, with prompts asked between. Words and prompts are served one after the
other, by the times that they really took: what waits is the *lag* of a word until it is in all
answers. Then a node starts again: until all of its snapshot is known and it is trusted.

Does not cover: gRPC (`index`), whose cost per word adds to that of a lag.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench.cluster.figures import SEED, NotMeasured, at_most, plain
from kvstore.index import holdings
from kvstore.index.feed import Trust
from kvstore.index.holdings import Holdings
from kvstore.index.index import Index
from kvstore.types import KEY_BYTES, Incarnation, SpaceId, Tier
from kvstore.wire.feed import Change, Delta, Hello, Removed, SnapshotPart, Stored
from tests.kit.index_check import done

CHAIN: Final = 500
SHARED_EVERY, SHARED_BY = 10, 10
CHURN: Final = 0.01
ASKED_PER_MINUTE: Final = 6000
MATCHES: Final = 2000
MINUTE_S: Final = 60.0
NOW_MS: Final = 10_000
SPACE: Final = SpaceId(bytes(32))
BYTES_GUESS: Final = 100
"""Per entry, to judge what fits."""
GOAL_BYTES: Final = 120
GOAL_MATCH_US: Final = 1000
GOAL_LAG_MS: Final = 1000
TIMEOUT_S: Final = 1500


class Cluster:
    """Nodes that tell an index what they hold."""

    def __init__(self, entries: int, nodes: int) -> None:
        self.nodes = nodes
        self.chains = max(SHARED_EVERY, entries // nodes // CHAIN)
        """Of each node."""
        flat = Holdings(nodes * self.chains * CHAIN + nodes * CHAIN)
        self.index = Index(flat, now_ms=0, node_count_max=nodes)
        self._sequences = [0] * nodes
        self._renewed: dict[tuple[int, int], int] = {}
        for node in range(nodes):
            done(self.index.hear(Hello(f"n{node}", Incarnation(1), 1, 0), NOW_MS))

    def fill(self) -> None:
        for number in range(self.chains):
            for node in range(self.nodes):
                self.tell(node, self.stored(node, number))

    def keys(self, node: int, chain: int) -> bytes:
        """Of the chain that a node has at this place now."""
        of = node // SHARED_BY if chain % SHARED_EVERY == 0 else self.nodes + node
        renewed = self._renewed.get((node, chain), 0)
        return np.random.default_rng((SEED, of, chain, renewed)).bytes(CHAIN * KEY_BYTES)

    def renew(self, node: int, chain: int) -> tuple[Change, Change]:
        """Another one in its place."""
        before = Removed("t", SPACE, Tier.DRAM, self.keys(node, chain))
        self._renewed[node, chain] = self._renewed.get((node, chain), 0) + 1
        return before, self.stored(node, chain)

    def stored(self, node: int, chain: int) -> Stored:
        return Stored("t", SPACE, Tier.DRAM, self.keys(node, chain))

    def tell(self, node: int, *changes: Change) -> float:
        """Seconds until it is in all answers."""
        self._sequences[node] += 1
        word = Delta(f"n{node}", Incarnation(1), 1, self._sequences[node], changes)
        begin_s = time.perf_counter()
        done(self.index.hear(word, NOW_MS))
        return time.perf_counter() - begin_s

    def ask(self, keys: bytes) -> tuple[float, dict[str, int]]:
        """Seconds, and how many blocks each node has."""
        begin_s = time.perf_counter()
        answer = done(self.index.match("t", SPACE, keys, NOW_MS))
        took_s = time.perf_counter() - begin_s
        return took_s, {match.holder.node: match.dram_blocks for match in answer.matches}

    def restart(self, node: int) -> float:
        """Seconds of this process until all that a node holds is known again, and believed."""
        name, born = f"n{node}", Incarnation(2)
        told = [self.stored(node, number) for number in range(self.chains)]
        begin_s = time.perf_counter()
        done(self.index.hear(Hello(name, born, 1, 1), NOW_MS))
        for number, stored in enumerate(told):
            last = number == len(told) - 1
            done(self.index.hear(SnapshotPart(name, born, 1, 1, number, last, (stored,)), NOW_MS))
        took_s = time.perf_counter() - begin_s
        _, found = self.ask(told[-1].keys)
        trust = next(m.trust for m in self.index.members(NOW_MS) if m.node == name)
        assert found[name] == CHAIN, found
        assert trust is Trust.EXACT, trust
        return took_s


def lags(cluster: Cluster) -> dict[str, Any]:
    """A minute of churn, one after the other on one core."""
    random = np.random.default_rng(SEED)
    dropped: list[tuple[int, bytes]] = []
    words: list[float] = []
    asked: list[float] = []
    free_s = 0.0
    for at_s, is_word in _minute(cluster):
        node, chain = int(random.integers(cluster.nodes)), int(random.integers(cluster.chains))
        if is_word:
            change = cluster.renew(node, chain)
            took_s = cluster.tell(node, *change)
            if len(dropped) < MATCHES:
                dropped.append((node, change[0].keys))  # type: ignore[union-attr]
        else:
            took_s, found = cluster.ask(cluster.keys(node, chain))
            assert found[f"n{node}"] == CHAIN, found
            asked.append(took_s)
        free_s = max(free_s, at_s) + took_s
        if is_word:
            words.append(free_s - at_s)
    wrong = sum(f"n{node}" in cluster.ask(keys)[1] for node, keys in dropped)
    return {
        "words": len(words),
        "keys_per_word": 2 * CHAIN,
        "lag_ms": _percentiles(words, 1e3),
        "match_us": _percentiles(asked, 1e6),
        "wrong_answers_after": wrong,
        "asked_after": len(dropped),
    }


def _minute(cluster: Cluster) -> Iterator[tuple[float, bool]]:
    """When words come (True), and prompts."""
    words = max(1, int(cluster.nodes * cluster.chains * CHURN))
    times = [(MINUTE_S * n / words, True) for n in range(words)]
    times += [(MINUTE_S * (n + 0.5) / ASKED_PER_MINUTE, False) for n in range(ASKED_PER_MINUTE)]
    yield from sorted(times)


def one_size(entries: int, nodes: int, *, churns: bool) -> dict[str, Any]:
    """In this process, which should be fresh."""
    holdings.compiled()
    gc.collect()
    before = _rss_bytes()
    cluster = Cluster(entries, nodes)
    begin_s = time.perf_counter()
    cluster.fill()
    filled_s = time.perf_counter() - begin_s
    statistics = cluster.index.statistics()
    grown = _rss_bytes() - before
    random = np.random.default_rng(SEED)
    asked = []
    for _ in range(MATCHES):
        node, chain = int(random.integers(nodes)), int(random.integers(cluster.chains))
        took_s, found = cluster.ask(cluster.keys(node, chain))
        assert found[f"n{node}"] == CHAIN, found
        asked.append(took_s)
    return {
        "entries": statistics.entry_count,
        "nodes": nodes,
        "resident_bytes": grown,
        "bytes_per_entry": round(grown / statistics.entry_count, 1),
        "filled_s": round(filled_s, 2),
        "match_us": _percentiles(asked, 1e6),
        "churn": lags(cluster) if churns else None,
        "restart_of_a_node_s": round(cluster.restart(0), 3) if churns else None,
    }


def measure(*, entries: int, nodes: int) -> dict[str, Any]:
    """Sizes that grow tenfold, up to `entries` or what fits."""
    each = entries // nodes
    counts = [n for n in (nodes // 100, nodes // 10, nodes) if n and fits(n * each)]
    if not counts:
        raise NotMeasured("not even the smallest index fits the memory that is free")
    *smaller, largest = counts
    found = [in_fresh_process(n * each, n, churns=False) for n in smaller]
    failed = ""
    try:
        found.append(in_fresh_process(largest * each, largest, churns=True))
    except subprocess.SubprocessError as error:
        if not smaller:
            raise
        failed = f"{largest * each:,} entries failed: {error}"
        found[-1] = in_fresh_process(smaller[-1] * each, smaller[-1], churns=True)
    last = found[-1]
    churn = last["churn"]
    return {
        "figures": {
            "bytes_per_entry": at_most(
                GOAL_BYTES, last["bytes_per_entry"], entries=last["entries"]
            ),
            "match_p99_us": at_most(GOAL_MATCH_US, last["match_us"]["p99"]),
            "match_p99_us_while_it_churns": at_most(GOAL_MATCH_US, churn["match_us"]["p99"]),
            "lag_p99_ms": at_most(GOAL_LAG_MS, churn["lag_ms"]["p99"]),
            "wrong_answers_after_churn": at_most(0, churn["wrong_answers_after"]),
            "restart_of_a_node_s": plain(last["restart_of_a_node_s"]),
        },
        "detail": {
            "wanted_entries": entries,
            "scaled_down": last["entries"] < 0.9 * entries,
            "failed": failed,
            "chain_blocks": CHAIN,
            "sizes": found,
        },
    }


def fits(entries: int) -> bool:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return entries * BYTES_GUESS <= int(line.split()[1]) * 1024 * 0.75
    return True


def in_fresh_process(entries: int, nodes: int, *, churns: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, json.dumps([entries, nodes, churns])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _percentiles(seconds: list[float], unit: float) -> dict[str, float]:
    p50, p99 = np.percentile(np.asarray(seconds) * unit, [50, 99])
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}


if __name__ == "__main__":
    size, count, with_churn = json.loads(sys.argv[1])
    print(json.dumps(one_size(size, count, churns=with_churn)))
