"""Sums over the requests that have ended: hits, misses by reason, and what loads saved and cost.

    Story, rows of explain ──count──▶ Ledger ──▶ /metrics, the page, `kvstore inspect savings`

A block of a prompt that is not in the engine's own cache is either a hit or a miss, with the reason
that explain gives for it. Blocks behind a gap miss for the reason of the gap.

A request that loaded from several tiers is split among them: saved time, lookup and copies by
tokens, waits by the tokens that were waited for. Time for which nothing came is of tier NOTHING.
Bounded: PAIRS_MAX pairs of model and tenant have names, and NAMES_MAX pairs and (pair, tier)
together; first come, first named, and all later ones are OTHER. Does not cover: single requests
(`explain`), money (`kvstore.cli.look`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from kvstore.engine.why.findings import TIERS, RangeReport
from kvstore.engine.why.reasons import CLASSES, Reason
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import Story
from kvstore.wording import printable

PAIRS_MAX: Final = 32
NAMES_MAX: Final = 38
"""Most named rows: they make three time series each, so that a node has at most 400."""
NAME_LENGTH_MAX: Final = 64
OTHER: Final = "other"
NOTHING: Final = "none"
"""Tier of time that was spent without loading a block."""
_BEHIND: Final = (Reason.BEHIND_A_GAP, Reason.BEHIND_A_GAP_ON_DISK)

Pair = tuple[str, str]
"""(model, tenant)."""


class Traffic(msgspec.Struct):
    """Sums of one model and tenant."""

    prompt_tokens: int = 0
    loaded_tokens: int = 0
    stored_bytes: int = 0


class Savings(msgspec.Struct):
    """Sums over all requests of one model and tenant that loaded from one tier."""

    loaded_tokens: int = 0
    saved_ns: int = 0
    """Estimated time to compute the loaded tokens."""
    spent_ns: int = 0
    """Time spent on lookups, on waits for blocks from disk or other nodes, and on copies."""
    lost_ns: int = 0
    """Part of `spent_ns` that exceeds what a request saved; counted for the tier that cost it
    most."""
    net_gpu_ns: int = 0
    """(`saved_ns` - `spent_ns`) times the engine's number of GPUs; negative: a loss."""


class SavingsReport(msgspec.Struct, frozen=True):
    """One model, tenant and tier of this node, since its start."""

    model: str
    tenant: str
    tier: str
    """dram, file or peer; none: time spent without loading a block."""
    loaded_tokens: int
    saved_ms: int
    spent_ms: int
    lost_ms: int
    """Part of `spent_ms` that exceeds what its requests saved."""
    net_gpu_ms: int
    """(saved - spent) times the GPUs of each engine; negative: a loss."""


class Ledger:
    """Sums of one node, since its start."""

    def __init__(self) -> None:
        self.hits = dict.fromkeys(TIERS, 0)
        """Blocks by tier."""
        self.misses = dict.fromkeys(CLASSES.values(), 0)
        """Blocks by class of reasons."""
        self.accounts: dict[Pair, Traffic] = {}
        self.savings: dict[tuple[str, str, str], Savings] = {}
        """Sums by (model, tenant, tier)."""

    def count(
        self, pair: Pair, story: Story, rows: Iterable[RangeReport], *, gpu_count: int = 1
    ) -> None:
        """Add a request that ended. `pair`: model and tenant; `rows`: results for its blocks;
        `gpu_count`: GPUs of its engine."""
        gap = CLASSES[Reason.NOT_REMEMBERED]
        for row in rows:
            if row.reason:
                gap = gap if row.reason in _BEHIND else CLASSES[row.reason]
                self.misses[gap] += row.blocks
            elif row.tier != "engine":
                self.hits[row.tier or "dram"] += row.blocks
        its = self._account(pair)
        its.prompt_tokens += story.prompt_tokens
        its.loaded_tokens += story.loaded_tokens
        for tier, part in _parts(story).items():
            part.net_gpu_ns = (part.saved_ns - part.spent_ns) * gpu_count
            if part != Savings():
                saving = self._saving(pair, tier)
                for field in Savings.__struct_fields__:
                    setattr(saving, field, getattr(saving, field) + getattr(part, field))

    def stored(self, pair: Pair, size_bytes: int) -> None:
        """Add bytes that an engine of this model and tenant stored."""
        self._account(pair).stored_bytes += size_bytes

    def report(self) -> list[SavingsReport]:
        """One row per model, tenant and tier, the greatest saving first and losses last."""
        rows = []
        for name, its in self.savings.items():
            tokens, *times_ns = msgspec.structs.astuple(its)
            rows.append(SavingsReport(*name, tokens, *(ns // NS_PER_MS for ns in times_ns)))
        return sorted(rows, key=lambda row: (-row.net_gpu_ms, row.model, row.tenant, row.tier))

    def total(self) -> Savings:
        """Sums over all models, tenants and tiers."""
        every = self.savings.values()
        return Savings(*(sum(getattr(a, f) for a in every) for f in Savings.__struct_fields__))

    @property
    def _is_full(self) -> bool:
        return len(self.accounts) + len(self.savings) >= NAMES_MAX

    def _account(self, pair: Pair) -> Traffic:
        pair = _cut(pair)
        if pair not in self.accounts and (self._is_full or len(self.accounts) >= PAIRS_MAX):
            pair = (OTHER, OTHER)
        return self.accounts.setdefault(pair, Traffic())

    def _saving(self, pair: Pair, tier: str) -> Savings:
        pair = _cut(pair)
        name = (*pair, tier)
        if name not in self.savings and (self._is_full or pair not in self.accounts):
            name = (OTHER, OTHER, tier)
        return self.savings.setdefault(name, Savings())


def _cut(pair: Pair) -> Pair:
    """The names shortened and made printable, since they come from outside. Names that are equal
    then share one row, as a page names each once."""
    model, tenant = (printable(name[:NAME_LENGTH_MAX]) for name in pair)
    return model, tenant


def _parts(story: Story) -> dict[str, Savings]:
    """The request's savings, split by tier."""
    file = min(story.file_tokens, story.loaded_tokens)
    peer = min(story.peer_tokens, story.loaded_tokens - file)
    tokens = {"dram": story.loaded_tokens - file - peer, "file": file, "peer": peer}
    saved = _split(story.saved_ns, tokens)
    copies = _split(story.lookup_ns + story.load_ns, tokens)
    waits = _split(story.promotion_ns, {"file": file, "peer": peer})
    parts = {}
    for tier in (*tokens, NOTHING):
        spent_ns = copies.get(tier, 0) + waits.get(tier, 0)
        parts[tier] = Savings(tokens.get(tier, 0), saved.get(tier, 0), spent_ns)
    lost_ns = sum(part.spent_ns - part.saved_ns for part in parts.values())
    worst = max(parts.values(), key=lambda part: part.spent_ns - part.saved_ns)
    worst.lost_ns = max(0, lost_ns)
    return parts


def _split(total: int, weights: Mapping[str, int]) -> dict[str, int]:
    """`total` split in proportion to weights, without a remainder; all of it goes to NOTHING if the
    weights are 0."""
    whole, seen, given, parts = sum(weights.values()), 0, 0, {}
    if not whole:
        return {NOTHING: total}
    for tier, weight in weights.items():
        seen += weight
        parts[tier] = total * seen // whole - given
        given += parts[tier]
    return parts
