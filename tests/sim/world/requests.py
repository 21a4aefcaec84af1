"""Requests to an engine without a model, and which are drawn.

Does not cover: when they are scheduled (`engine`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.sim.world.groups import BLOCK_TOKENS


class SimRequest:
    """One request: `keys` for its full blocks, as far as its tokens are known."""

    def __init__(self, name: str, keys: list[bytes], *, tokens: int, decode_tokens: int) -> None:
        self.name = name
        self.all_keys = keys
        self.keys = keys[: tokens // BLOCK_TOKENS]
        self.prompt_tokens = tokens
        self.tokens = tokens
        self.tokens_end = tokens + decode_tokens
        self.computed = 0
        self.tables: list[list[int]] = []
        """By KV cache group; empty while it has no block."""
        self.loading = False
        self.load_count = 0
        """Loads planned on each rank."""
        self.load_done = False
        self.aborted = False
        self.loads_ended = 0
        """Loads that ranks reported the end of."""
        self.good_blocks = 0
        """The least that any of those ranks loaded."""
        self.load_failed = False
        self.waiting_since_ns = 0
        """Since it was added, preempted or failed to load: no lease of it is older."""

    def decode(self) -> None:
        """One token more is known."""
        self.tokens += 1
        self.keys[:] = self.all_keys[: self.tokens // BLOCK_TOKENS]


def state_word(request: SimRequest, computed: int) -> bytes:
    """The state of a request after tokens that fill no block."""
    return f"state of {request.name} at {computed}".encode()


def new_random_request(
    source: random.Random, chains: Sequence[list[bytes]], number: int, blocks: int
) -> SimRequest:
    """A prompt over one of the known chains: most share prefixes, lengths are around edges."""
    keys = source.choice(chains)
    longest = min(len(keys), blocks - 2) * BLOCK_TOKENS
    tokens = max(1, source.randrange(1, longest) + source.choice((-1, 0, 0, 1)))
    decode = min(source.choice((0, 0, 1, BLOCK_TOKENS, 40)), len(keys) * BLOCK_TOKENS - tokens)
    decode = max(0, min(decode, (blocks - 2) * BLOCK_TOKENS - tokens))
    return SimRequest(f"r{number}", keys, tokens=tokens, decode_tokens=decode)
