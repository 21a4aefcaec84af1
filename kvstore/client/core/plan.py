"""The values that connector, scheduler core and ranks exchange: the configuration of the scheduler
side, counters, hits, plans for the ranks, one each step, and reports of the ranks.

With one KV cache group a hit is the leading run of blocks that the node has. With several, each
kind of attention needs other blocks: full attention all of them, a window of 1,024 tokens only
those that end where the hit ends. The engine's own rules decide (`HitRules`), so that a hit is
never longer and never shorter than the engine would find in its own cache.

Plans travel inside the engine's own step metadata, to every rank the same. Arrays are bytes as on
the attach socket (`kvstore.wire.messages`): [n][S] over the session's distinct shards, shard minor.
Every rank reads its column; the lowest of the ranks that share a column alone writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.wire.messages import HelloScheduler

Store = Literal["all", "prompt", "none"]
"""Which blocks an engine stores: all, also those that fill during decoding; those of prompts; or
none, and it only loads."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and names of one engine's scheduler side."""

    hello: HelloScheduler
    """First message of each connection, but for the epoch of the weights."""
    block_tokens: int
    """Tokens of a block of the first KV cache group, the one with full attention."""
    group_tokens: tuple[int, ...] = ()
    """Tokens of a block of each KV cache group; empty: there is one group."""
    group_names: tuple[str, ...] = ("full attention",)
    """Names of the KV cache groups, for people."""
    key_tokens: int = 0
    """Tokens between two keys of a request, where blocks are longer; 0: `block_tokens`."""
    lookahead_tokens: int = 0
    """Tokens past a block on which its last entries depend, with drafts that read the model's
    hidden states: a block is stored when they are known, and a hit leaves its last block out."""
    lookup_deadline_ms: int = 20
    """Time from the first question for a request until it is answered 0; longer where computing
    takes long (`kvstore.client.core.costs`)."""
    heartbeat_timeout_ms: int = 250
    push_deadline_ms: int = 60_000
    """Longest wait for blocks that a prefill node sends."""
    prefill_ns_per_token: int = 10_000
    """Cost of computing a token, until a step was measured or the node has a value: a quick
    engine's, so that no request waits for blocks that this one may compute in less time."""
    min_load_tokens: int = 128
    """Cost gate: shorter hits are computed, since two engine steps and a lookup cost more."""
    store: Store = "all"
    verify_every: int = 1
    """Every n-th load is checked against its checksums: 1 all, 0 none."""
    shadow_every: int = 0
    """Every n-th hit is computed all the same, and compared; 0: none."""
    breaker_cooldown_ms: int = 1000

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens of a block, by KV cache group."""
        return self.group_tokens or (self.block_tokens,)

    def keys_per_block(self, group: int) -> int:
        """Keys of a request for each block of a group."""
        return self.block_sizes[group] // (self.key_tokens or self.block_tokens)


class SchedulerStats(Counter[str]):
    """Counts since the last `take`. Names are the metric names without prefix, then a label's value
    behind a colon, if there is one; `_ns` becomes `_seconds`."""

    def take(self) -> dict[str, int]:
        counts = dict(self)
        self.clear()
        return counts


# ── hits ──────────────────────────────────────────────────────────────────────────────────────────

Mask = NDArray[np.bool_]
"""[n] flags of a request's blocks of one group, in chain order."""


Outcome = int | str | None
"""The answer for a request. A number: tokens beyond the prefix-cache hit that can be loaded. A text
of a small fixed set, for metrics and logs: why there are none. None: ask again in the next step."""


class HitPlan(msgspec.Struct, frozen=True):
    """The longest hit that all groups can serve."""

    tokens: int
    """From the start of the prompt."""
    first_blocks: tuple[int, ...]
    """By group: the first block that the hit needs; it needs all from there to its end."""
    lacking_group: int = 0
    """Group whose blocks ended the hit."""


class HitRules(Protocol):
    """The engine's rules for models with several KV cache groups."""

    def longest(self, present: Sequence[Mask], *, tokens_max: int) -> HitPlan:
        """The longest hit of at most `tokens_max` tokens, given the blocks of each group."""

    def are_needed(self, group: int, first_block: int, end_block: int) -> Sequence[bool] | None:
        """Flags of the blocks that a later hit can need; None: all."""


# ── plans and reports ─────────────────────────────────────────────────────────────────────────────


class CopyJob(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of the engine's cache, and the slots of their shards."""

    session: int
    block_ids: tuple[int, ...]
    """In chain order, shape [n]."""
    keys: bytes = b""
    """32 bytes each, [n]; checksums cover them."""
    slots: bytes = b""
    generations: bytes = b""
    checksums: bytes = b""
    """[n][S] of 16 bytes, or none. The rank of a load verifies every block whose checksum is not 0,
    that of a comparison does not take damaged bytes for another block."""
    group: int = 0
    """KV cache group of all blocks of the job."""


class LoadJob(CopyJob, frozen=True, kw_only=True):
    """Copy slots into engine blocks. One job per request and group; a lease pins the slots."""

    request: str
    lease: int

    def result(
        self, *, loaded: int = 0, bytes_moved: int = 0, duration_ns: int = 0, reason: str = ""
    ) -> LoadResult:
        """The result of a rank that loaded so many of the blocks."""
        failed = self.block_ids[loaded:]
        return LoadResult(
            self.request, self.lease, loaded, failed, bytes_moved, duration_ns, reason
        )


class StoreJob(CopyJob, frozen=True, kw_only=True):
    """Copy engine blocks into granted slots after the step's forward, then seal.

    A rank that does not write its shard has nothing to copy: its job is done at once.
    """

    job: int
    compare: bool = False
    """Write nothing: compare the blocks with the slots. Every rank does."""


class StepPlan(msgspec.Struct, frozen=True):
    """One step's orders."""

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    fence_blocks: tuple[int, ...] = ()
    """Engine blocks about to be overwritten whose store may still be running: the rank waits for
    those copies before anything of this step runs."""
    step: int = 0
    """Number of a step that is timed: ranks report it when it has run. 0: it is not."""


class LoadResult(msgspec.Struct, frozen=True):
    """How one rank's part of a LoadJob ended."""

    request: str
    lease: int
    loaded_blocks: int
    failed_block_ids: tuple[int, ...]
    """Blocks from the first bad one on, which failed for `reason`; empty when all is well."""
    bytes_moved: int
    duration_ns: int
    reason: str = ""


class CompareResult(msgspec.Struct, frozen=True):
    """One rank's result of a StoreJob with `compare`."""

    job: int
    compared: int
    """Blocks; less than in the job where slots were reused meanwhile, or bytes damaged."""
    diverged: tuple[int, ...]
    """Indices in the job of blocks that hold other values."""
    worst: float
    """Largest relative error of a block."""


class RankReport(msgspec.Struct, frozen=True):
    """Results of one rank since its last report."""

    rank: int
    loads: tuple[LoadResult, ...] = ()
    store_jobs_done: tuple[int, ...] = ()
    """Jobs whose source blocks are no longer read, whether sealed, dropped or compared."""
    blocks_sealed: int = 0
    blocks_dropped: int = 0
    store_bytes: int = 0
    store_ns: int = 0
    fence_ns: int = 0
    """Time for which the engine's thread waited for stores whose blocks it needed."""
    compared: tuple[CompareResult, ...] = ()
    """Results of comparisons among `store_jobs_done`."""
    step: int = 0
    """The last timed step that has run; 0: none since the last report."""

    def plus(self, **more: Any) -> RankReport:
        """The report with these results and counts added to its own."""
        sums = {name: getattr(self, name) + its for name, its in more.items()}
        return msgspec.structs.replace(self, **sums)
