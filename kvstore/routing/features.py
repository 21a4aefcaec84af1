"""Numbers of one request at each worker of a pool: the whole input of a decision.

    fleet (load) + prefixes (index, tree) ─▶ Features ─▶ filters, costs, policies, receipts

Prefix lengths are tokens, raw: trust and observed hits stand in columns of their own, so that
another policy can weigh them otherwise. Does not cover: what a number is worth (`costs`).
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import Final

import msgspec
import numpy as np

from kvstore.routing.fleet import Fleet
from kvstore.routing.rows import AGES, STALE_S, WEIGHTS, YOUNG_S, Crew, FleetColumn, Floats
from kvstore.routing.tree import ApproximateTree
from kvstore.routing.values import PrefixAnswer, PrefixTrust, RouteRequest
from kvstore.units import NS_PER_S

TRUSTS: Final = tuple(PrefixTrust)
_NONE: Final = TRUSTS.index(PrefixTrust.NONE)
_APPROXIMATE: Final = TRUSTS.index(PrefixTrust.APPROXIMATE)
_CATCHING_UP: Final = TRUSTS.index(PrefixTrust.CATCHING_UP)
_IDLE_S_MAX: Final = 1e6


class FeatureColumn(enum.IntEnum):
    """Columns, with their names in receipts."""

    QUEUE_S = 0
    """Seconds of prefill ahead at the worker, of own requests and of others."""
    QUEUED = 1
    """Requests before their first token."""
    STREAMS = 2
    MEMORY = 3
    """Share of the KV cache in use by the engine's last report, with the need of requests sent
    since.
    """
    MEMORY_TOKENS = 4
    """Tokens that the KV cache holds; 0: not known."""
    HBM = 5
    """Leading tokens in the engine's memory."""
    DRAM = 6
    """Leading tokens in dram of the worker's node; FILE: on its disk or in its dram."""
    FILE = 7
    REMOTE = 8
    """Leading tokens in dram of another node."""
    TRUST = 9
    """Trust in the four lengths above, as a place in `TRUSTS`."""
    HIT_RATIO = 10
    UNFIT = 11
    """0, or the reason (`decide.Dropped`) why the worker does not fit, under any policy."""
    IDLE_S = 12
    """Seconds since a request was sent there."""
    POSITION = 13
    """Row of the worker in the fleet, by which `round-robin` and `session` go."""
    WARM = 14
    """1: the request's LoRA adapter is loaded, or it has none."""
    YOUNG = 15
    """Streams that have just begun, fading with time, and 1 for one that is about to."""
    LINK = 16
    """Bytes/s to the other leg's worker; 0: there is none, or it is on the same node."""
    FETCH_RATIO = 17
    """Observed over predicted tokens, for those that only another node has; HIT_RATIO is for the
    rest.
    """
    STAYS = 18
    """1: the last request of its session was there."""
    WAITING = 19
    """Requests in the engine's own queue."""
    LATE_S = 20
    """Seconds by which the worker's last probe was late."""


class Features(msgspec.Struct):
    """Columns of a decision: shape (len(FeatureColumn), workers)."""

    workers: list[str]
    columns: Floats
    weights: Floats
    """Learned weights: shape (LEARNED, workers)."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Scalars of a decision."""

    prompt_tokens: int
    output_tokens: int
    number: int
    seed: int
    session_hash: int = 0
    """Hash of the session or, without one, of the first key; 0: neither. Policy `session` goes by
    it.
    """
    pressure: float = 0.0
    """Seconds by which one second of compute delays others (`costs.others_per_s`)."""


def load_columns(fleet: Fleet, crew: Crew, now_ns: int) -> Floats:
    """Load of each worker of a crew, as columns of Features; those that depend on the request are
    at their defaults.
    """
    part = fleet.columns[: WEIGHTS.start].take(crew.rows, axis=1)
    costs = fleet.policy.costs
    columns = (crew.base if crew.base is not None else _base(crew, part)).copy()
    head_s, young_s, idle_s = (now_ns - part[AGES]) / NS_PER_S
    other_queued, other_streams, used = fleet.decayed(part, now_ns)
    queued, work_s = part[FleetColumn.QUEUED], part[FleetColumn.WORK_S]
    count = float(np.add.reduce(queued))
    others_s = other_queued * (
        float(np.add.reduce(work_s)) / count if count else 2048 / costs.prefill_tokens_per_s
    )
    shared = part[FleetColumn.SHARED_TOKENS]
    if np.count_nonzero(shared):
        others_s = np.maximum(shared / costs.prefill_tokens_per_s, others_s)
    if count:
        own_s = work_s - np.minimum(np.maximum(0.0, head_s), part[FleetColumn.HEAD_S])
        others_s += np.maximum(0.0, own_s)
    columns[FeatureColumn.QUEUE_S] = others_s
    columns[FeatureColumn.QUEUED] = queued + other_queued
    columns[FeatureColumn.STREAMS] = part[FleetColumn.STREAMS] + np.maximum(
        part[FleetColumn.SHARED_STREAMS], other_streams
    )
    columns[FeatureColumn.MEMORY] = part[FleetColumn.NEED_TOKENS] / crew.room + used
    columns[FeatureColumn.WAITING] = _waiting(part, now_ns)
    columns[FeatureColumn.LATE_S] = part[FleetColumn.LATE_S]
    young = part[FleetColumn.YOUNG] * np.exp(-young_s / YOUNG_S)
    columns[FeatureColumn.YOUNG] = young + (queued > 0)
    columns[FeatureColumn.HIT_RATIO] = part[FleetColumn.HIT_RATIO]
    columns[FeatureColumn.FETCH_RATIO] = part[FleetColumn.FETCH_RATIO]
    columns[FeatureColumn.IDLE_S] = np.minimum(idle_s, _IDLE_S_MAX)
    return columns


def _waiting(part: Floats, now_ns: int) -> Floats:
    """Requests in each engine's own queue. A count older than STALE_S halves each STALE_S, down to
    0: else a request that does not fit into memory would wait for ever for an engine whose metrics
    cannot be read any more.
    """
    waiting: Floats = part[FleetColumn.WAITING]
    if not np.count_nonzero(waiting):
        return waiting
    old_s = np.maximum(0.0, (now_ns - part[FleetColumn.SCRAPED_NS]) / NS_PER_S - STALE_S)
    return np.asarray(np.rint(waiting * 0.5 ** (old_s / STALE_S)))


def _base(crew: Crew, part: Floats) -> Floats:
    """Columns that change only with the description of a worker. Keeps them in `crew.base`, and the
    size of each KV cache in `crew.room`.
    """
    base = crew.base = np.zeros((len(FeatureColumn), len(crew.rows)))
    memory = base[FeatureColumn.MEMORY_TOKENS] = part[FleetColumn.MEMORY_TOKENS]
    base[FeatureColumn.POSITION] = crew.rows
    base[FeatureColumn.TRUST] = _NONE
    base[FeatureColumn.WARM] = 1.0
    crew.room = np.where(memory > 0, memory, np.inf)
    return base


# ── prefixes ──────────────────────────────────────────────────────────────────────────────────────


def fill_prefixes(
    columns: Floats, fleet: Fleet, crew: Crew, tree: ApproximateTree, its: RouteRequest, now_ns: int
) -> None:
    """Write columns HBM to TRUST of the workers of a crew, from the index and the tree."""
    prefix, count = its.answer, len(crew.states)
    if not its.keys:
        return
    # hbm, dram, file, remote: blocks. Without an index there are none but in hbm.
    lengths = [[0] * count for _ in range(1 if prefix is None else 4)]
    trust = [_NONE] * count
    if prefix is not None:
        _from_index(lengths, trust, crew, prefix)
    _from_tree(lengths[0], trust, crew, tree, its, now_ns)
    # Without the index there are only lengths of what was sent, whatever the keys.
    suspects = {*fleet.doubtful, *its.load_only} if prefix is not None else set[str]()
    for name in suspects & crew.place_of.keys():
        place = crew.place_of[name]
        if name in its.load_only or crew.states[place].spec.is_red:
            trust[place] = _NONE
            for column in lengths:
                column[place] = 0
    filled = columns[FeatureColumn.HBM : FeatureColumn.HBM + len(lengths)]
    tokens = np.array(lengths, dtype=np.float64) * its.block_tokens
    np.minimum(tokens, its.prompt_tokens - 1, out=filled)
    columns[FeatureColumn.TRUST] = trust


def _from_tree(
    hbm: list[int],
    trust: list[int],
    crew: Crew,
    tree: ApproximateTree,
    its: RouteRequest,
    now_ns: int,
) -> None:
    """Raise `hbm` (leading blocks by worker) to all that was sent, at workers that the index does
    not follow; at others, to blocks sent so lately that the index cannot know them.
    """
    has_index = its.answer is not None
    if has_index:
        for worker, blocks in _sent(tree, its, now_ns, young_only=True).items():
            place = crew.place_of.get(worker)
            if place is not None and blocks > hbm[place]:
                hbm[place], trust[place] = blocks, min(trust[place], _CATCHING_UP)
    if not has_index or crew.has_strangers:
        for worker, blocks in _sent(tree, its, now_ns, young_only=False).items():
            place = crew.place_of.get(worker)
            if place is not None and not (has_index and crew.states[place].spec.is_followed):
                hbm[place], trust[place] = blocks, _APPROXIMATE


def _sent(
    tree: ApproximateTree, its: RouteRequest, now_ns: int, *, young_only: bool
) -> Counter[str]:
    """Worker → leading blocks of this request's prompts that it was sent before, summed over the
    prompts.
    """
    found = Counter[str]()
    for keys in its.chains:
        found.update(tree.match(keys, now_ns, step=its.key_step, young_only=young_only))
    return found


def _from_index(
    lengths: list[list[int]], trust: list[int], crew: Crew, prefix: PrefixAnswer
) -> None:
    hbm, dram, file, remote = lengths
    best = second = 0
    best_node, peers = "", prefix.peers
    for match in prefix.matches:
        code, holder = int(match.trust), match.holder  # as in TRUSTS
        if holder.engine:
            place = crew.place_of_engine.get((holder.node, holder.engine, holder.rank))
            if place is not None:
                hbm[place] = match.hbm_blocks
                trust[place] = code if trust[place] == _NONE else max(code, trust[place])
            continue
        for place in crew.places_of_node.get(holder.node, ()):
            dram[place], file[place] = match.dram_blocks, match.file_blocks
            trust[place] = code if trust[place] == _NONE else max(code, trust[place])
        if peers is not None and holder.node not in peers:
            continue
        if match.dram_blocks > best:
            best, second, best_node = match.dram_blocks, best, holder.node
        elif match.dram_blocks > second:
            second = match.dram_blocks
    if best:
        for node, places in crew.places_of_node.items():  # only workers with a node can fetch
            if peers is not None and node not in peers:
                continue
            length = second if node == best_node else best
            for place in places:
                remote[place] = length
                if trust[place] == _NONE:
                    trust[place] = int(prefix.trust)
