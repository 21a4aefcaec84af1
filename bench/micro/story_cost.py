"""What stories cost the node's loop, beside the lookups that they are about.

Drives `Engine.step` without sockets: a LeaseAsk for a prompt of BLOCKS blocks, its LeaseRelease if
blocks were leased, and the Story of the request. CPU time of each step, its datagram decoded. A
story comes before a tick has examined its lookups, so that it pays for that, too. Requests:

- hit: all blocks are in dram, and were loaded;
- part: the first half is;
- miss: none was ever stored;
- mixed: every other block was, so that a story has as many ranges as are kept;
- long: LONG_ASKS lookups, of as many keys as a datagram has, none of which was ever stored.

A lookup that comes meanwhile waits as long as a story takes. `--profile` prints where the time of
stories goes instead. Writes bench/results/story_cost.json.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from bench.micro.engine_ops import SCHEDULER, SEED, SPACE, Driven
from kvstore.engine.events import Received, Tick
from kvstore.types import KEY_BYTES
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import (
    KEYS_PER_DATAGRAM_MAX,
    LeaseAsk,
    LeaseRelease,
    LeaseReply,
    Message,
    Story,
    decode_from_engine,
    encode,
)

BLOCKS: Final = 128
LONG_ASKS: Final = 8
KINDS: Final = ("hit", "part", "miss", "mixed", "long")
ROUNDS: Final = 1000
GOAL_US: Final = 200.0
"""Median of a story of BLOCKS blocks, whatever became of them."""


class Told(Driven):
    """An engine whose requests are told, and the CPU time of their steps, by kind of message."""

    def __init__(self) -> None:
        super().__init__(slots=1 << 14, blocks=1 << 15, policy="lru")
        stored = b"".join(self.fill(1 << 12, file_too=False))
        size = BLOCKS * KEY_BYTES
        self._stored = [stored[at : at + size] for at in range(0, len(stored) - size, size)]
        self._lease = 0
        self.took_us: dict[str, list[float]] = {"lookup": [], "story": []}

    def request(self, number: int, kind: str) -> None:
        """A request from its lookup to its story."""
        session, leases = self.session, list[int]()
        loaded = blocks = 0
        for keys in self._prompt(number, kind):
            self._lease += 1
            leases.append(self._lease)
            blocks += len(keys) // KEY_BYTES
            [reply] = self._timed("lookup", LeaseAsk(lease=self._lease, keys=keys))
            assert isinstance(reply, LeaseReply)
            loaded += len(reply.slots) // 4
        if loaded:
            self.step(Received(SCHEDULER, LeaseRelease(leases=leases)))
        story = Story(
            request=f"cmpl-{number:032x}-0",
            prompt_tokens=blocks * SPACE.block_tokens,
            loaded_tokens=loaded * SPACE.block_tokens,
            outcome="" if loaded == blocks else "not stored",
            session=session,
            leases=leases,
            queued_ns=NS_PER_MS,
            lookup_ns=NS_PER_MS,
            load_ns=5 * NS_PER_MS,
            first_token_ns=20 * NS_PER_MS,
            saved_ns=100 * NS_PER_MS,
            stored_blocks=blocks,
        )
        self._timed("story", story)
        self.step(Tick())

    def _prompt(self, number: int, kind: str) -> list[bytes]:
        """Keys of its lookups."""
        if kind == "long":
            return [self.random.bytes(KEYS_PER_DATAGRAM_MAX * KEY_BYTES) for _ in range(LONG_ASKS)]
        stored = self._stored[number % len(self._stored)]
        fresh = self.random.bytes(BLOCKS * KEY_BYTES)
        if kind == "mixed":
            places = range(0, len(stored), KEY_BYTES)
            each = ((stored, fresh)[at // KEY_BYTES % 2][at : at + KEY_BYTES] for at in places)
            return [b"".join(each)]
        held = {"hit": BLOCKS, "part": BLOCKS // 2, "miss": 0}[kind] * KEY_BYTES
        return [stored[:held] + fresh[held:]]

    def _timed(self, name: str, message: Message) -> list[Message]:
        """What was sent in answer to this datagram, which is decoded in the time that counts."""
        datagram = encode(message)
        self.now_ns += 1000
        begin_ns = time.thread_time_ns()
        sent = self.step(Received(SCHEDULER, decode_from_engine(datagram)))
        self.took_us[name].append((time.thread_time_ns() - begin_ns) / 1000)
        return sent


def measure(rounds: int) -> dict[str, Any]:
    """Costs by kind of request."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        told = Told()
        for number in range(rounds if kind != "long" else max(1, rounds // 20)):
            told.request(number, kind)
        skipped = len(told.took_us["story"]) // 10  # what the first ones load and allocate
        found[kind] = {
            f"{name}_us": record.summary(took[skipped:]) for name, took in told.took_us.items()
        }
        print(kind, msgspec.json.encode(found[kind]).decode(), flush=True)
    return found


def profile(rounds: int) -> None:
    """Where the time of stories goes, without that of lookups."""
    told, seen = Told(), cProfile.Profile()
    tell = told.engine.explain.tell
    told.engine.explain.tell = lambda *all_of: seen.runcall(tell, *all_of)  # type: ignore[method-assign]
    for number in range(rounds):
        told.request(number, KINDS[number % 4])
    pstats.Stats(seen).sort_stats("tottime").print_stats(25)


def main() -> int:
    parser = argparse.ArgumentParser(description="What stories cost the node's loop.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="requests of each kind")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    options = parser.parse_args()
    gc.freeze()  # as a node does
    if options.profile:
        profile(options.rounds)
        return 0
    result = {"goal_us": GOAL_US, "blocks": BLOCKS, "long_asks": LONG_ASKS}
    result |= measure(options.rounds)
    print(f"written: {record.write('story_cost', result, seed=SEED).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
