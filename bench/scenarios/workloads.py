"""Requests for cache benchmarks: chains of block keys, recorded or generated from a seed.

Covers: a request log in Mooncake's form, chats that grow under shared system prompts, one-off
documents read through a hot set, documents of Zipf popularity. Block numbers are unique per chain
position, as a chained hash is. Does not cover: running them (`policies.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from kvstore.types import KEY_BYTES

BLOCK_TOKENS: Final = 512


class Request(msgspec.Struct, frozen=True):
    """One prompt: its full blocks, by number from the start, and its length."""

    blocks: tuple[int, ...]
    prompt_tokens: int


class Workload(msgspec.Struct, frozen=True):
    """Requests in the order in which they arrive."""

    name: str
    requests: tuple[Request, ...]

    @property
    def block_count(self) -> int:
        """Different blocks: what a cache without limit would hold."""
        return len({block for request in self.requests for block in request.blocks})

    def key_table(self) -> bytes:
        """32-byte keys, block number after block number."""
        top = 1 + max(max(request.blocks, default=0) for request in self.requests)
        return b"".join(hashlib.sha256(str(n).encode()).digest() for n in range(top))


def keys_of(table: bytes, blocks: Sequence[int]) -> bytes:
    """The keys of some blocks, as they travel."""
    return b"".join(table[KEY_BYTES * block : KEY_BYTES * (block + 1)] for block in blocks)


def recorded(path: Path) -> Workload:
    """A log of one JSON object a line: `input_length`, and `hash_ids` of 512-token blocks, the last
    of which may not be full and is left out then."""
    requests = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        full = entry["input_length"] // BLOCK_TOKENS
        requests.append(Request(tuple(entry["hash_ids"][:full]), entry["input_length"]))
    return Workload("trace", tuple(requests))


class _Numbers:
    """Block numbers that nobody has had."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> tuple[int, ...]:
        first, self._next = self._next, self._next + count
        return tuple(range(first, self._next))


def chats(seed: int, *, requests: int) -> Workload:
    """Conversations of 1 to some ten rounds under 16 system prompts of unequal popularity.

    A round adds 1 to 8 blocks; the next one of the same conversation comes after some 400 other
    requests on average, and not at all with probability 0.4.
    """
    random, numbers = np.random.default_rng(seed), _Numbers()
    systems = [numbers.take(int(n)) for n in random.integers(2, 24, size=16)]
    popularity = _zipf(16, 1.1)
    waiting: list[tuple[float, tuple[int, ...]]] = []
    made: list[Request] = []
    for now in range(requests):
        waiting.sort()
        if waiting and waiting[0][0] <= now:
            _, history = waiting.pop(0)
        else:
            history = systems[int(random.choice(16, p=popularity))]
        blocks = history + numbers.take(int(random.integers(1, 9)))
        made.append(_request(random, blocks))
        if random.random() < 0.6:
            waiting.append((now + random.exponential(400.0), blocks))
    return Workload("chats", tuple(made))


def scan(seed: int, *, requests: int) -> Workload:
    """Every other request reads a document that nobody reads again, 16 to 64 blocks; the others ask
    about one of 400 hot documents of 8 to 32 blocks, each as likely as the next."""
    random, numbers = np.random.default_rng(seed), _Numbers()
    hot = [numbers.take(int(n)) for n in random.integers(8, 33, size=400)]
    made = []
    for now in range(requests):
        if now % 2:
            blocks = numbers.take(int(random.integers(16, 65)))
        else:
            blocks = hot[int(random.integers(400))] + numbers.take(1)
        made.append(_request(random, blocks))
    return Workload("scan", tuple(made))


def zipf(seed: int, *, requests: int) -> Workload:
    """Questions of one block about one of 3,000 documents of 4 to 60 blocks; the n-th is asked
    about in proportion to n ** -0.9."""
    random, numbers = np.random.default_rng(seed), _Numbers()
    documents = [numbers.take(int(n)) for n in random.integers(4, 61, size=3000)]
    chosen = random.choice(3000, size=requests, p=_zipf(3000, 0.9))
    made = [_request(random, documents[int(i)] + numbers.take(1)) for i in chosen]
    return Workload("zipf", tuple(made))


GENERATED: Final[dict[str, Callable[[int, int], Workload]]] = {
    "chats": lambda seed, requests: chats(seed, requests=requests),
    "scan": lambda seed, requests: scan(seed, requests=requests),
    "zipf": lambda seed, requests: zipf(seed, requests=requests),
}


def _zipf(count: int, exponent: float) -> np.ndarray:
    weights = np.arange(1, count + 1) ** -exponent
    normal: np.ndarray = weights / weights.sum()
    return normal


def _request(random: np.random.Generator, blocks: tuple[int, ...]) -> Request:
    return Request(blocks, len(blocks) * BLOCK_TOKENS + int(random.integers(BLOCK_TOKENS)))


def next_uses(workload: Workload) -> Iterator[tuple[int, ...]]:
    """Per request and block: the number of the request that names it next, or one past the last."""
    never = len(workload.requests)
    later: dict[int, int] = {}
    found: list[tuple[int, ...]] = []
    for number in range(never - 1, -1, -1):
        blocks = workload.requests[number].blocks
        found.append(tuple(later.get(block, never) for block in blocks))
        later.update(dict.fromkeys(blocks, number))
    return reversed(found)
