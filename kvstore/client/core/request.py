"""One request under way: its lookup, load, stores and transfer; its leased blocks as load jobs; and
its story once it has ended.

State only. Writers: `lookups.py` of lookup and load, `stores.py` of stores, `pushes.py` of the
transfer, `shadow.py` of shadow checks, `scheduler.py` of the rest. `lookups.py` has the rules and a
picture of the stages.

Does not cover: leases (`lookups.py`), the engine's rules (`plan.HitRules`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, overload

import numpy as np

from kvstore.client.core.costs import BlockWait
from kvstore.client.core.plan import HitPlan, HitRules, LoadJob, Mask, Outcome, SchedulerConfig
from kvstore.types import CHECKSUM_BYTES
from kvstore.wire import messages as wire
from kvstore.wire.requests import DecodePart, PrefillPart

DETAIL_LENGTH_MAX: Final = 255


# ── keys and presence of blocks ───────────────────────────────────────────────────────────────────


class DerivedKeys(Sequence[bytes]):
    """A sequence of keys that takes each from other keys when it is read."""

    def __init__(self, length: Callable[[], int], at: Callable[[int], bytes]) -> None:
        """`length`: their number now. `at`: makes one, by its place in [0, length)."""
        self._length, self._at = length, at

    def __len__(self) -> int:
        return self._length()

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self._at(at) for at in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._at(index % len(self))


def block_keys(keys: Sequence[bytes], step: int) -> Sequence[bytes]:
    """Keys of blocks that are `step` times as long as those that `keys` name: every `step`-th key,
    since each depends on all tokens before its end."""
    if step == 1:
        return keys
    return DerivedKeys(lambda: len(keys) // step, lambda at: keys[(at + 1) * step - 1])


class Presence(dict[int, Mask]):
    """Flags of the blocks of one request that the node knows, by group, as of its last answers."""

    def update_from_answer(self, group: int, first_block: int, bits: bytes) -> None:
        """Take the node's flags of the blocks from `first_block` on, padded to whole bytes. An
        answer about block 0 replaces all earlier answers; one that leaves a gap is ignored."""
        flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").astype(np.bool_)
        before = self.get(group)
        if not first_block:
            self[group] = flags
        elif before is not None and first_block <= len(before):
            self[group] = np.concatenate([before[:first_block], flags])

    def resized(self, group: int, count: int) -> Mask:
        """Flags of the first `count` blocks; unknown ones are absent."""
        mask = self.get(group, np.zeros(0, np.bool_))
        sized: Mask = np.zeros(count, np.bool_)
        sized[: len(mask)] = mask[:count]
        return sized

    def mark(self, group: int, blocks: slice, *, present: bool) -> None:
        """Set the flags of leased blocks, which came after the answer, from a node or disk; or
        clear those of blocks that turned out to be absent. Both end where the answer does."""
        if group in self:
            self[group][blocks] = present


# ── the request ───────────────────────────────────────────────────────────────────────────────────


class LookupStage(enum.Enum):
    """Stage of one request's lookup; `lookups.py` has a picture."""

    NONE = 0
    ASKED = 1
    HELD = 2
    LOADING = 3
    PROMOTING = 4
    SHADOW = 5


WAITING_STAGES = (LookupStage.ASKED, LookupStage.PROMOTING, LookupStage.HELD)
"""The node may hold leases, and no load has begun."""


@dataclass(slots=True, eq=False)
class LookupPart:
    """One LeaseAsk of a request: long prompts and KV cache groups need several."""

    request: Request
    lease: int
    group: int
    first: int
    """Number in the prompt of its first block."""
    count: int
    shards: int
    """Shards of a block of the group."""
    promoting: int = 0
    """Blocks behind those of the reply that are on their way to dram."""
    is_closed: bool = False
    """A LeaseMore came that nobody waited for, and was ignored: later ones do not continue the
    blocks of the reply."""
    file_blocks: int = 0
    """Blocks found that came from disk for this request."""
    peer_blocks: int = 0
    """Blocks found that came from another node for this request."""
    reply: wire.LeaseReply | None = None
    slots: bytes = b""
    generations: bytes = b""
    checksums: bytes = b""
    """[n][S] of the leased blocks, of which there may be more than were asked for; checksums are 0
    where there is nothing to verify."""
    renew_at_ns: int = 0
    ttl_ns: int = 0
    checked: int = 0
    """Blocks that a shadow check has compared, or left out."""
    jobs_out: int = 0
    """Comparisons under way."""

    @property
    def found_blocks(self) -> int:
        """Blocks that the answer leases."""
        return min(len(self.slots) // (4 * self.shards), self.count)

    @property
    def is_short(self) -> bool:
        """Whether not all blocks are leased."""
        return self.found_blocks < self.count

    @property
    def is_verifiable(self) -> bool:
        """Whether every slot has a checksum."""
        sums = np.frombuffer(self.checksums, np.uint8).reshape(-1, CHECKSUM_BYTES)
        return bool(sums.any(axis=1).all())

    def take(self, message: wire.LeaseReply | wire.LeaseMore) -> None:
        """Take the blocks that are leased, and note how many more are on their way. Capped at the
        blocks asked for, so that no wait is longer than their computing."""
        self.slots += message.slots
        self.generations += message.generations
        self.checksums += message.checksums or bytes(len(message.slots) // 4 * CHECKSUM_BYTES)
        self.file_blocks += message.from_file
        self.peer_blocks += message.from_peer
        self.promoting = min(message.promoting, max(0, self.count - self.found_blocks))

    def places(self, blocks: slice | Sequence[int]) -> dict[str, bytes]:
        """Arrays of a CopyJob for some of the leased blocks, by their index in the lease."""
        arrays = {}
        for name, size in (("slots", 4), ("generations", 8), ("checksums", CHECKSUM_BYTES)):
            row = self.shards * size
            held = np.frombuffer(getattr(self, name), np.uint8)[: self.found_blocks * row]
            arrays[name] = held.reshape(-1, row)[blocks].tobytes()
        return arrays


@dataclass(slots=True, eq=False)
class Request:
    """See the module."""

    id: str
    tag: int
    """Number of the request in hints and their replies."""
    keys: Sequence[bytes]
    """Keys of its whole blocks; the engine adds to them."""
    prompt_tokens: int
    block_tokens: int
    """Tokens of a block of the first KV cache group."""
    next_blocks: list[int]
    """By KV cache group: blocks before are stored, or left out."""
    hint_sequence: int
    transfer: PrefillPart | DecodePart | None = None
    """Part in a transfer."""
    traceparent: str = ""
    """Header of its client or router; empty: none."""
    tail: bytes = b""
    """Key of the prompt's tail, where it is stored or looked up; empty: it is not."""
    arrived_ns: int = 0
    due_tokens: int = 0
    """Tokens at which the next block is complete, of any KV cache group, or the first token is to
    be seen."""
    local_tokens: int = 0
    """Tokens in the engine's own cache when it last asked."""
    left_tokens: int = 0
    """Tokens of its prompt left to compute, as far as they are counted in the queue; 0 before the
    node has answered."""
    is_queued: bool = False
    """Whether `left_tokens` are computed now or in turn; False: the request waits for blocks."""
    loaded_tokens: int = 0
    file_tokens: int = 0
    """Loaded tokens that came from disk for it."""
    peer_tokens: int = 0
    answer: Outcome = None
    answered_ns: int = 0
    """When the engine got its first answer after the last question to the node."""
    first_token_ns: int = 0
    """When the engine was first seen to have a token of its answer; 0: not yet."""
    admitted_ns: int = 0
    """When its load was planned; 0: it has none."""
    load_ns: dict[int, int] = field(default_factory=dict)
    """Time of its copies, by rank."""
    is_old: bool = False
    """Its blocks, or some before them, are of before a reset: none is stored."""
    present: Presence = field(default_factory=Presence)
    """Blocks that the node has, by its answers to hints."""

    # ── lookup and load ──────────────────────────────────────────────────────────────────────────

    stage: LookupStage = LookupStage.NONE
    hinted_ns: int = 0
    """When the node was sent hints that name all blocks of the request."""
    hinted_session: int = 0
    """Session of these hints; 0: none were sent."""
    detail: str = ""
    """A rank's reason for a load that failed."""
    asked_leases: list[int] = field(default_factory=list)
    """Leases of the last question about the first KV cache group, in chain order; kept after
    their release."""
    replied_at_ns: int = 0
    """When the last question was answered in full; 0 while it is not."""
    wait: BlockWait | None = None
    """The wait for blocks that are on their way; None: there is none."""
    waited: bool = False
    """Whether the last question led to a wait."""
    has_weighed: bool = False
    """Whether blocks on their way were weighed against computing since it was asked."""
    queue_ns_max: float = 0.0
    """The most computing that came before its own while it waited."""
    lost_ns: float = 0.0
    """Time that its waits took beyond what they saved."""
    failed: str = ""
    """Why this request is answered 0 for ever; empty while it is not."""
    session: int = 0
    first_block: int = 0
    """First block of the last question."""
    found_blocks: int = 0
    end_tokens: int = 0
    """Tokens of the prompt if its tail is looked up, too; 0: it is not."""
    is_probe: bool = False
    """Loads do not pay: this is the shortest load, to measure."""
    is_shadow: bool = False
    """If it is a hit, it may be computed and compared."""
    is_trial: bool = False
    """Loads failed before: the load of this request, if it has one, is the breaker's probe."""
    is_verified: bool = False
    """Every block of its load is compared with its checksum."""
    asked_at_ns: int = 0
    """When the lookup began."""
    asked_again_ns: int = 0
    """When its last question was asked."""
    plan: HitPlan | None = None
    """Blocks of all KV cache groups that the hit takes; with one group always None."""
    rounds: int = 0
    """Plans so far."""
    waiting_since_ns: int = 0
    """Since when the engine has got the answer to ask again, for any reason; 0: its last answer
    was another."""
    parts: list[LookupPart] = field(default_factory=list)
    load_reports_left: int = 0
    """Reports to come of its load: one of each rank for each KV cache group."""
    miss_reason: str = ""

    # ── transfer ─────────────────────────────────────────────────────────────────────────────────

    is_paused: bool = False
    """Preempted while it was prefilled for another node."""
    pushed_until_ns: int = 0
    """While a prefill node sends its blocks nothing is asked, at most until then."""
    expected: set[tuple[int, int]] = field(default_factory=set)
    """Group and first block of its PushExpects that have no PushEnd yet."""

    @property
    def awaits_answer(self) -> bool:
        """Whether the node has been asked about the request and has not answered yet."""
        return self.stage is LookupStage.ASKED

    @property
    def local_blocks(self) -> int:
        """Leading blocks that the engine had itself when it last asked."""
        return self.local_tokens // self.block_tokens

    @property
    def transfer_id(self) -> str:
        """Id of the transfer that the request has a part in; empty: none."""
        return self.transfer.transfer if self.transfer is not None else ""

    @property
    def tail_tokens(self) -> int:
        """Tokens of the prompt if its tail is stored, too; 0: it is not."""
        return self.prompt_tokens if self.tail and isinstance(self.transfer, PrefillPart) else 0

    @property
    def seeks_tail(self) -> bool:
        """Whether the tail is looked up: on a decode engine, until the request's answer has made a
        whole block of it. A prefill engine computes one token in any case."""
        is_whole = len(self.keys) > self.prompt_tokens // self.block_tokens
        return bool(self.tail) and not (is_whole or self.tail_tokens)

    @property
    def sought(self) -> Sequence[bytes]:
        """Keys that are looked up."""
        return self._with_tail() if self.seeks_tail else self.keys

    @property
    def stored(self) -> Sequence[bytes]:
        """Keys that are stored."""
        return self._with_tail() if self.tail_tokens else self.keys

    def _with_tail(self) -> Sequence[bytes]:
        """Keys of the prompt's whole blocks, and the key of its tail: of the tokens behind them,
        which fill a part of a block."""
        keys, tail, whole = self.keys, self.tail, self.prompt_tokens // self.block_tokens
        return DerivedKeys(lambda: whole + 1, lambda at: keys[at] if at < whole else tail)

    def full_blocks(self, settled_tokens: int, size: int) -> int:
        """Blocks of `size` tokens that may be stored; the tail is that of the first group."""
        is_tail_due = 0 < self.tail_tokens <= settled_tokens
        return self.tail_tokens // size + 1 if is_tail_due else settled_tokens // size

    @property
    def file_blocks(self) -> int:
        """Blocks found of the first group that came from disk for this request."""
        return sum(part.file_blocks for part in self.parts if not part.group)

    @property
    def peer_blocks(self) -> int:
        """Blocks found of the first group that came from another node for this request."""
        return sum(part.peer_blocks for part in self.parts if not part.group)

    # ── answers ──────────────────────────────────────────────────────────────────────────────────

    @property
    def leading_blocks(self) -> int:
        """Blocks of the first group that are leased without a gap."""
        leading = 0
        for part in self.parts:
            if part.group:
                break
            leading += part.found_blocks
            if part.is_short:
                break
        return leading

    @property
    def short_parts(self) -> list[LookupPart]:
        """Questions about the groups beside the first of which not all blocks are leased."""
        return [part for part in self.parts if part.group and part.is_short]

    @property
    def coming_tokens(self) -> int:
        """Tokens of the blocks on their way that would lengthen the hit."""
        if self.plan is not None:  # without one of these blocks there is no such hit
            short = self.short_parts
            if any(part.found_blocks + part.promoting < part.count for part in short):
                return 0
            return self.plan.tokens - self.first_block * self.block_tokens if short else 0
        coming = 0
        for part in self.parts:
            coming += part.promoting
            if part.found_blocks + part.promoting < part.count:
                break
        return coming * self.block_tokens

    def surveys(self, config: SchedulerConfig, shard_counts: Sequence[int]) -> Iterator[wire.Hint]:
        """The hints that ask which blocks of the groups beside the first the node knows."""
        for group in range(1, len(config.block_sizes)):
            names = block_keys(self.sought, config.keys_per_block(group))
            size = max(8, wire.KEYS_PER_DATAGRAM_MAX // shard_counts[group] // 8 * 8)
            for begin in range(0, len(names), size):
                yield wire.Hint(self.tag, b"".join(names[begin : begin + size]), group, begin)

    def next_plan(self, rules: HitRules, config: SchedulerConfig, tokens_max: int) -> HitPlan:
        """The longest hit of all groups, by the answers so far: the first group has what its leases
        hold, the others what the node knows, all of them what the engine itself has."""
        local_tokens, key_count = self.first_block * self.block_tokens, len(self.sought)
        present = [
            self.present.resized(group, key_count // config.keys_per_block(group))
            for group in range(len(config.block_sizes))
        ]
        present[0][:] = False
        present[0][: self.first_block + self.found_blocks] = True
        for mask, size in zip(present, config.block_sizes, strict=True):
            mask[: local_tokens // size] = True
        return rules.longest(present, tokens_max=tokens_max)

    def load_job(
        self, group: int, blocks: range, *, keys: Sequence[bytes], table: Sequence[int]
    ) -> LoadJob:
        """The job that fills blocks of one group, which the answers about it lease.

        Args:
            group: number of the group.
            blocks: numbers in the prompt.
            keys: of all its blocks.
            table: the engine's blocks of it.
        """
        parts = [part for part in self.parts if part.group == group]
        shares = [
            part.places(slice(*(max(0, end - part.first) for end in (blocks.start, blocks.stop))))
            for part in parts
        ]
        arrays = {name: b"".join(share[name] for share in shares) for name in shares[0]}
        assert len(arrays["slots"]) == 4 * parts[0].shards * len(blocks) > 0, blocks
        if not arrays["checksums"].strip(b"\0"):
            arrays["checksums"] = b""
        return LoadJob(
            request=self.id,
            lease=parts[0].lease,
            session=self.session,
            block_ids=tuple(table[blocks.start : blocks.stop]),
            keys=b"".join(keys[blocks.start : blocks.stop]),
            group=group,
            **arrays,
        )

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    def end_wait(self, queued_ns: float, now_ns: int) -> None:
        """End the wait with the blocks that came; `queued_ns` of computing comes before the
        request's own."""
        assert self.wait is not None
        self.lost_ns += self.wait.ended(queued_ns, now_ns)
        self.wait, self.stage = None, LookupStage.HELD

    def may_outlive_leases(self, now_ns: int) -> bool:
        """Whether its leases, renewed or not, could end under a load that begins now."""
        age_ns = now_ns - self.asked_at_ns
        return any(p.reply and age_ns > (wire.LEASE_LIVES_MAX - 1) * p.ttl_ns for p in self.parts)

    def cut_load(self, tokens: int) -> None:
        """Lower the count of loaded tokens to at most `tokens`, and those from disk and other nodes
        with it."""
        self.loaded_tokens = min(self.loaded_tokens, tokens)
        self.file_tokens = min(self.file_tokens, self.loaded_tokens)
        self.peer_tokens = min(self.peer_tokens, self.loaded_tokens - self.file_tokens)

    def story(self, saved_ns: int, now_ns: int) -> wire.Story:
        """The story of the request, which ends now and whose load saved `saved_ns` of computing."""
        asked, answered, replied = self.asked_at_ns, self.answered_ns, self.replied_at_ns
        return wire.Story(
            request=cut_name(self.id),
            prompt_tokens=self.prompt_tokens,
            local_tokens=self.local_tokens,
            loaded_tokens=self.loaded_tokens,
            file_tokens=self.file_tokens,
            peer_tokens=self.peer_tokens,
            outcome=self.miss_reason if answered else "not asked",
            detail=self.detail[:DETAIL_LENGTH_MAX],
            session=self.session,
            leases=self.asked_leases,
            first_block=self.first_block,
            queued_ns=max(0, (asked or answered) - self.arrived_ns),
            lookup_ns=max(0, (replied or answered) - asked) if asked else 0,
            promotion_ns=max(0, answered - replied) if self.waited else 0,
            load_ns=max(self.load_ns.values(), default=0),
            saved_ns=saved_ns,
            stored_blocks=self.next_blocks[0],
            first_token_ns=max(0, self.first_token_ns - self.arrived_ns),
            transfer=self.transfer_id,
            admitted_ns=max(0, self.admitted_ns - self.arrived_ns),
            total_ns=max(0, now_ns - self.arrived_ns),
            traceparent=self.traceparent,
        )


def cut_name(request: str) -> str:
    """A request's id, cut to REQUEST_BYTES_MAX bytes of UTF-8: users choose ids, of any length."""
    cut = request.encode("utf-8", "replace")[: wire.REQUEST_BYTES_MAX]
    return cut.decode("utf-8", "ignore") or "?"


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


def keys_per_ask(shards: int) -> int:
    """Most keys of one LeaseAsk, whose answer has `shards` slots for each key."""
    return max(1, wire.KEYS_PER_DATAGRAM_MAX // shards)


def needed_blocks(
    plan: HitPlan | None, sizes: Sequence[int], local_tokens: int, end_tokens: int
) -> list[range]:
    """Blocks of each group that a hit which ends at `end_tokens` takes beyond the engine's own; a
    hit with a tail ends within a block. `sizes`: tokens of a block, by group."""
    ranges = []
    for group, size in enumerate(sizes):
        first = 0 if plan is None else plan.first_blocks[group]
        ranges.append(range(max(local_tokens // size, first), -(-end_tokens // size)))
    return ranges
