"""KV cache groups of an engine without a model: which blocks each kind of attention keeps.

    full     all blocks, from the first on
    window   those that the next token reads, WINDOW_TOKENS back; the others are let go meanwhile
    state    of recurrent layers: the block that the last token is in. Its content is the state
             there, which the next block begins with; where tokens end with the block, the engine
             hands it over to be stored

Written anew from what vLLM's managers do, and simpler: no block is shared by requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from kvstore.client.core.plan import HitPlan, Mask

Kind = Literal["full", "window", "state"]
BLOCK_TOKENS: Final = 16
WINDOW_TOKENS: Final = 2 * BLOCK_TOKENS
NULL_BLOCK: Final = 0


def block_count(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def first_needed(kind: Kind, computed: int) -> int:
    """The first block that the token after so many reads."""
    if kind == "full":
        return 0
    if kind == "window":
        return max(0, computed - WINDOW_TOKENS + 1) // BLOCK_TOKENS
    return max(0, computed - 1) // BLOCK_TOKENS


def places(kind: Kind, held: int, tokens: int) -> list[bool]:
    """Which blocks behind the first `held` of a table have to be real for so many tokens."""
    wanted = block_count(tokens) - held
    if kind == "state":
        return [at == wanted - 1 for at in range(wanted)]
    return [True] * wanted


def places_of_hit(kind: Kind, tokens: int) -> list[bool]:
    """The same, of an empty table and a hit."""
    first = first_needed(kind, tokens)
    return [at >= first for at in range(block_count(tokens))]


def chunk(kinds: Sequence[Kind], computed: int, tokens_end: int, tokens_max: int) -> int:
    """Tokens of a step: with states it ends with a block, or with the request's tokens."""
    end = min(tokens_end, computed + tokens_max)
    if "state" in kinds and end < tokens_end:
        end = max(end // BLOCK_TOKENS * BLOCK_TOKENS, computed + 1)
    return end - computed


def handed_over(kind: Kind, table: Sequence[int], computed: int) -> list[int]:
    """The table that stores are planned by."""
    if kind != "state":
        return list(table)
    at = computed // BLOCK_TOKENS - 1
    ends = computed % BLOCK_TOKENS == 0
    return [block if ends and i == at else NULL_BLOCK for i, block in enumerate(table)]


class SimRules:
    """`HitRules` of such groups."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._kinds = kinds

    def longest(self, present: Sequence[Mask], *, tokens_max: int) -> HitPlan:
        run = int(np.argmin([*present[0], False]))
        bound = end = min(run, max(0, tokens_max) // BLOCK_TOKENS)
        lacking = 0
        while end:
            lacks = [
                group
                for group, kind in enumerate(self._kinds)
                if not present[group][first_needed(kind, end * BLOCK_TOKENS) : end].all()
            ]
            if not lacks:
                break
            lacking, end = lacks[0], end - 1
        tokens = end * BLOCK_TOKENS
        firsts = tuple(first_needed(kind, tokens) for kind in self._kinds)
        return HitPlan(tokens, firsts, lacking if end < bound else 0)

    def are_needed(self, group: int, first_block: int, end_block: int) -> None:
        return None
