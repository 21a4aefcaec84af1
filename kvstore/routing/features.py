"""Numbers of one request at each worker of a pool: the whole input of a decision.

    fleet (load) + prefixes (index, tree) ─▶ Features ─▶ filters, costs, scorers, receipts

Prefix lengths are tokens, raw: trust and observed hits stand in columns of their own, so that
another policy can weigh them otherwise. Does not cover: what a number is worth (`costs`).
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore.routing.fleet import Fleet, FleetColumn, Floats, WorkerState
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
    """Prefill ahead, own and others'."""
    QUEUED = 1
    """Requests before their first token."""
    STREAMS = 2
    MEMORY = 3
    """Share of the KV cache that is spoken for."""
    MEMORY_TOKENS = 4
    """0: not known."""
    HBM = 5
    """Leading tokens in the engine's memory, …"""
    DRAM = 6
    """… in the tiers of its node, this one or a faster, …"""
    FILE = 7
    REMOTE = 8
    """… in dram of another node."""
    TRUST = 9
    """Place in `TRUSTS`."""
    HIT_RATIO = 10
    TOKENS_PER_S = 11
    """0: the policy's."""
    LOAD_BYTES_PER_S = 12
    UNFIT = 13
    """0, or the place in `filters.Dropped` of what no policy changes."""
    IDLE_S = 14
    """Since a request was sent there."""
    POSITION = 15
    """Row: what `round-robin` and `session` go by."""
    WARM = 16
    """1: adapter is loaded; 0.5: has room for it."""
    LINK = 17
    """Bytes/s to the other leg's worker; 0: there is none, or it is on the same node."""


class Features(msgspec.Struct):
    """Columns of a decision: shape (len(FeatureColumn), workers)."""

    workers: list[str]
    columns: Floats


def load_columns(fleet: Fleet, rows: npt.NDArray[np.intp], now_ns: int) -> Floats:
    """Features without those of a request."""
    part = fleet.columns[:, rows]
    costs = fleet.policy.costs
    columns = np.zeros((len(FeatureColumn), len(rows)))
    static = _static(fleet, rows)
    columns[FeatureColumn.MEMORY_TOKENS] = static[0]
    columns[FeatureColumn.TOKENS_PER_S] = static[1]
    columns[FeatureColumn.LOAD_BYTES_PER_S] = static[2]
    other_queued, other_streams, other_memory = fleet.decayed(rows, now_ns)
    speed = np.where(static[1] > 0, static[1], costs.prefill_tokens_per_s)
    queued, work_s = part[FleetColumn.QUEUED], part[FleetColumn.WORK_S]
    elapsed_s = np.maximum(0.0, now_ns - part[FleetColumn.HEAD_NS]) / NS_PER_S
    own_s = work_s - np.minimum(elapsed_s, part[FleetColumn.HEAD_S])
    count = queued.sum()
    mean_s = work_s.sum() / count if count else 2048 / costs.prefill_tokens_per_s
    others_s = np.maximum(part[FleetColumn.SHARED_TOKENS] / speed, other_queued * mean_s)
    columns[FeatureColumn.QUEUE_S] = np.maximum(0.0, own_s) + others_s
    columns[FeatureColumn.QUEUED] = queued + other_queued
    columns[FeatureColumn.STREAMS] = part[FleetColumn.STREAMS] + np.maximum(
        part[FleetColumn.SHARED_STREAMS], other_streams
    )
    own_memory = part[FleetColumn.HELD_TOKENS] / np.maximum(1.0, static[0])
    columns[FeatureColumn.MEMORY] = np.where(static[0] > 0, own_memory, 0.0) + other_memory
    columns[FeatureColumn.HIT_RATIO] = part[FleetColumn.HIT_RATIO]
    idle_s = (now_ns - part[FleetColumn.SENT_NS]) / NS_PER_S
    columns[FeatureColumn.IDLE_S] = np.where(
        part[FleetColumn.SENT_NS] > 0, np.minimum(idle_s, _IDLE_S_MAX), _IDLE_S_MAX
    )
    columns[FeatureColumn.POSITION] = rows
    columns[FeatureColumn.TRUST] = _NONE
    return columns


def _static(fleet: Fleet, rows: npt.NDArray[np.intp]) -> Floats:
    """Of the descriptions: memory, prefill and load speed."""
    specs = [fleet.workers[row].spec for row in rows]
    return np.array(
        [
            [spec.memory_tokens for spec in specs],
            [spec.prefill_tokens_per_s for spec in specs],
            [spec.load_bytes_per_s for spec in specs],
        ],
        dtype=np.float64,
    )


class PrefixColumns:
    """Prefix lengths by worker, from the index and the tree."""

    def __init__(self, fleet: Fleet, tree: ApproximateTree) -> None:
        self._fleet = fleet
        self._tree = tree
        self._version = -1
        self._row_of_engine: dict[tuple[str, str, int], int] = {}
        self._rows_of_node: dict[str, list[int]] = {}

    def _places(self) -> None:
        if self._version == self._fleet.version:
            return
        self._version = self._fleet.version
        self._row_of_engine.clear()
        self._rows_of_node.clear()
        for row, state in enumerate(self._fleet.workers):
            spec = state.spec
            if spec.engine:
                self._row_of_engine[spec.node, spec.engine, spec.rank] = row
            if spec.node:
                self._rows_of_node.setdefault(spec.node, []).append(row)

    def fill(
        self,
        columns: Floats,
        rows: npt.NDArray[np.intp],
        request: RouteRequest,
        prefix: PrefixAnswer | None,
        now_ns: int,
    ) -> None:
        """Write columns HBM to TRUST."""
        if not request.keys:
            return
        self._places()
        fleet = self._fleet
        whole = np.zeros((5, len(fleet.workers)))  # hbm, dram, file, remote, trust
        whole[4] = _NONE
        if prefix is not None:
            self._from_index(whole, prefix)
        sent = self._tree.match(
            request.keys,
            now_ns,
            block_tokens=request.block_tokens,
            young_only=False,
        )
        young = (
            sent
            if prefix is None
            else self._tree.match(
                request.keys, now_ns, block_tokens=request.block_tokens, young_only=True
            )
        )
        for worker, blocks in sent.items():
            row = fleet.row_of.get(worker)
            if row is None:
                continue
            if prefix is None or not _is_followed(fleet.workers[row]):
                whole[0, row], whole[4, row] = blocks, _APPROXIMATE
            elif (recent := young.get(worker, 0)) > whole[0, row]:
                whole[0, row] = recent
                whole[4, row] = min(whole[4, row], _CATCHING_UP)
        whole[:4] *= request.block_tokens
        np.minimum(whole[:4], request.prompt_tokens - 1, out=whole[:4])
        for row, state in enumerate(fleet.workers):
            if state.is_red:
                whole[:4, row], whole[4, row] = 0, _NONE
        columns[FeatureColumn.HBM : FeatureColumn.TRUST + 1] = whole[:, rows]

    def _from_index(self, whole: Floats, prefix: PrefixAnswer) -> None:
        """Lengths in blocks."""
        best = second = 0
        best_node = ""
        for match in prefix.matches:
            trust = TRUSTS.index(match.trust)
            if match.engine:
                row = self._row_of_engine.get((match.node, match.engine, match.rank))
                if row is not None:
                    whole[0, row] = match.hbm_blocks
                    whole[4, row] = trust if whole[4, row] == _NONE else max(trust, whole[4, row])
                continue
            for row in self._rows_of_node.get(match.node, ()):
                whole[1, row], whole[2, row] = match.dram_blocks, match.file_blocks
                whole[4, row] = trust if whole[4, row] == _NONE else max(trust, whole[4, row])
            if match.dram_blocks > best:
                best, second, best_node = match.dram_blocks, best, match.node
            elif match.dram_blocks > second:
                second = match.dram_blocks
        if best:
            for node, rows in self._rows_of_node.items():  # only workers with a node can fetch
                whole[3, rows] = second if node == best_node else best
                for row in rows:
                    if whole[4, row] == _NONE:
                        whole[4, row] = TRUSTS.index(prefix.trust)


def _is_followed(state: WorkerState) -> bool:
    """Whether the index knows its memory."""
    return bool(state.spec.engine or state.spec.node)
