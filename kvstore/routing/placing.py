"""One attempt of a request: the worker, the prefiller if the prefill is remote, the receipt.

    OpenRequest ─▶ judge (features, decide) ─▶ local or remote ─▶ Placement        or Blocked

Changes nothing but the count of decisions: `core` sends, holds or rejects.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.routing.costs import others_per_s
from kvstore.routing.decide import Case, RouteVerdict, decide, fallbacks, filtered
from kvstore.routing.features import TRUSTS, FeatureColumn, Features, PrefixColumns, load_columns
from kvstore.routing.filters import LANE, is_of_the_moment, unfit, warmth
from kvstore.routing.fleet import Fleet, FleetColumn, Floats
from kvstore.routing.learning import TermWeights
from kvstore.routing.models import ModelSide
from kvstore.routing.policy import UNBOUNDED, RoutingPolicy, policy_hash
from kvstore.routing.pressure import Rung, rungs, saturation
from kvstore.routing.receipts import Receipt
from kvstore.routing.split import PrefillLanes, PrefillSplit, SplitReason
from kvstore.routing.tree import ApproximateTree
from kvstore.routing.values import PrefixAnswer, PrefixTrust, RouteRequest
from kvstore.units import NS_PER_S

FEATURE_NAMES: Final = tuple(column.name.lower() for column in FeatureColumn)
_NONE: Final = TRUSTS.index(PrefixTrust.NONE)
_SMOOTH: Final = 0.02
_FRESH_NS: Final = 20_000_000


class OpenRequest(msgspec.Struct):
    """A request under way."""

    request: RouteRequest
    prefix: PrefixAnswer | None
    side: ModelSide
    service: str
    arrived_ns: int
    number: int
    attempt: int = 0
    failed: set[str] = msgspec.field(default_factory=set)
    """Workers whose leg failed."""
    is_held: bool = False
    was_held: bool = False
    routed_ns: int = 0
    placement: Placement | None = None
    is_local: bool = False
    """Prefillers failed so often that its decoder computes."""
    has_begun: bool = False
    ttft_s: float | None = None
    """Achieved, from arrival."""
    cached_tokens: int | None = None
    output_tokens: int | None = None
    uncached: float = 0.0
    """Tokens of a remote prefill that waits."""
    likely_worker: str | None = None
    """While it is held: the best one at the last try, for promotion or a fetch ahead of time."""


class Placement(msgspec.Struct):
    """Result of an attempt."""

    worker: str
    prefill_worker: str
    reason: SplitReason
    work_s: float
    """Prefill that it brings, to the prefiller or the worker."""
    need_tokens: int
    uncached: float
    hit_tokens: float
    """Predicted."""
    predicted_s: float
    """From now."""
    local_s: float
    """Predicted for a local prefill."""
    raw: Floats
    """Terms at the worker that computes, to learn from."""
    receipt: Receipt | None = None


class Blocked(enum.Enum):
    """Why there is no placement."""

    LOAD = "load"
    """Waiting can help."""
    LANES = "lanes"
    """The remote prefill waits for a prefiller."""
    NO_WORKERS = "no workers"


class Remote(msgspec.Struct):
    """Prefillers for a remote prefill."""

    prefillers: Features
    uncached: float
    is_free: bool
    """Whether one may take it now."""


def _local(
    opened: OpenRequest, features: Features, verdict: RouteVerdict, reason: SplitReason
) -> Placement:
    chosen, request = verdict.order[0], opened.request
    uncached = float(verdict.uncached[chosen])
    held = float(features.columns[FeatureColumn.HBM, chosen])
    return Placement(
        worker=features.workers[chosen],
        prefill_worker="",
        reason=reason,
        work_s=float(verdict.work_s[chosen]),
        need_tokens=int(request.prompt_tokens - held + request.output_tokens_max),
        uncached=uncached,
        hit_tokens=request.prompt_tokens - uncached,
        predicted_s=float(verdict.ttft_s[chosen]),
        local_s=float(verdict.ttft_s[chosen]),
        raw=verdict.raw[:, chosen],
    )


def _remote(placed: Placement, prefillers: Features, legs: RouteVerdict) -> Placement:
    chosen = legs.order[0]
    return msgspec.structs.replace(
        placed,
        prefill_worker=prefillers.workers[chosen],
        work_s=float(legs.work_s[chosen]),
        predicted_s=float(legs.ttft_s[chosen]),
        raw=legs.raw[:, chosen],
    )


def kept(features: Features, verdict: RouteVerdict, count_max: int) -> list[int]:
    """Places of the workers that a receipt has: all in their order, or the best ones."""
    count = len(features.workers)
    if count <= count_max:
        return list(range(count))
    return sorted(verdict.order[:count_max])


class Placer:
    """Judges requests by one policy."""

    def __init__(
        self, policy: RoutingPolicy, fleet: Fleet, tree: ApproximateTree, seed: int
    ) -> None:
        self.fleet = fleet
        self.weights = TermWeights(policy.learning)
        self.splits: dict[str, PrefillSplit] = {}
        self.lanes: dict[str, PrefillLanes] = {}
        self.utilisation = 0.0
        """Share of workers that compute, as arrivals see it; smoothed."""
        self.hit_share = 0.0
        """Share of prompt tokens; smoothed."""
        self._full: dict[str, tuple[int, float]] = {}
        """Pool → when, saturation."""
        self._seen_ns: dict[str, dict[int, int]] = {}
        """Pool → class rank → last arrival."""
        self.tree = tree
        self._prefixes = PrefixColumns(fleet, tree)
        self._seed = seed
        self.adopt(policy)

    def adopt(self, policy: RoutingPolicy) -> None:
        """Go on under another policy."""
        self.policy = policy
        self.policy_hash = policy_hash(policy)
        self.weights.settings = policy.learning
        for pool, split in self.splits.items():
            split.settings = policy.split
            self.lanes[pool].settings = policy.split

    def split_of(self, pool: str) -> tuple[PrefillSplit, PrefillLanes]:
        """Thresholds and queue of a pool."""
        if pool not in self.splits:
            self.splits[pool] = PrefillSplit(self.policy.split)
            self.lanes[pool] = PrefillLanes(self.policy.split)
        return self.splits[pool], self.lanes[pool]

    def columns(self, opened: OpenRequest, rows: npt.NDArray[np.intp], now_ns: int) -> Features:
        """Features of a request at some rows."""
        request, side = opened.request, opened.side
        columns = load_columns(self.fleet, rows, now_ns)
        self._prefixes.fill(columns, rows, request, opened.prefix, now_ns)
        states = [self.fleet.workers[row] for row in rows]
        columns[FeatureColumn.WARM] = 1.0
        if side.adapter:
            columns[FeatureColumn.WARM] = [warmth(state, side.adapter) for state in states]
        columns[FeatureColumn.UNFIT] = [
            unfit(state, side.model, side.adapter, request.subset, opened.failed, now_ns)
            for state in states
        ]
        return Features([state.spec.worker for state in states], columns)

    def place(self, opened: OpenRequest, now_ns: int) -> Placement | Blocked:
        """Where the request goes now."""
        service = self.policy.classes[opened.service]
        rows = self.fleet.rows(opened.side.pool, prefill=False)
        if not rows.size:
            return Blocked.NO_WORKERS
        features = self.columns(opened, rows, now_ns)
        case = self._case(opened)
        weights = self.weights.of(features.workers)
        verdict = decide(features, case, self.policy, weights)
        if not verdict.order:
            return Blocked.LOAD if is_of_the_moment(verdict.codes) else Blocked.NO_WORKERS
        chosen = verdict.order[0]
        opened.likely_worker = features.workers[chosen]
        # At the best worker, not a filter: waiting costs less than the prefix lost elsewhere.
        full = self._saturation(opened, features, service.saturation_max, now_ns)
        queue_s = features.columns[FeatureColumn.QUEUE_S, chosen]
        if full > service.saturation_max or queue_s > self._backlog_s(opened, now_ns):
            return Blocked.LOAD
        reason, remote = self._where(opened, features, verdict, now_ns)
        placed = _local(opened, features, verdict, reason)
        if remote is not None:
            if not remote.is_free:
                opened.uncached = remote.uncached
                return Blocked.LANES
            self._link(remote.prefillers, features.workers[chosen])
            legs = decide(
                remote.prefillers, case, self.policy, self.weights.of(remote.prefillers.workers)
            )
            if not legs.order:
                return Blocked.LANES
            placed = _remote(placed, remote.prefillers, legs)
        placed.receipt = self._receipt(
            opened, features, case, verdict, weights, placed, full, now_ns
        )
        return placed

    def _saturation(
        self, opened: OpenRequest, features: Features, bound: float, now_ns: int
    ) -> float:
        """Saturation at this moment for a class with a bound, else some milliseconds ago, since
        only the ladder reads it then."""
        at_ns, value = self._full.get(opened.side.pool, (-_FRESH_NS, 0.0))
        if bound < UNBOUNDED or now_ns - at_ns >= _FRESH_NS:
            value = saturation(features.columns, self.policy.limits).value
            self._full[opened.side.pool] = (now_ns, value)
        return value

    def _backlog_s(self, opened: OpenRequest, now_ns: int) -> float:
        """Prefill ahead that a request of the class may have at its worker."""
        service = self.policy.classes[opened.service]
        since_ns = now_ns - int(self.policy.limits.urgent_s * NS_PER_S)
        seen = self._seen_ns.get(opened.side.pool, {})
        must_yield = any(rank < service.rank and at >= since_ns for rank, at in seen.items())
        return service.yield_s if must_yield else service.backlog_s

    def _link(self, prefillers: Features, worker: str) -> None:
        """Column LINK: bytes/s from each prefiller to the worker that decodes."""
        fleet, costs = self.fleet, self.policy.costs
        node = fleet.workers[fleet.row_of[worker]].spec.node
        for place, name in enumerate(prefillers.workers):
            is_near = bool(node) and fleet.workers[fleet.row_of[name]].spec.node == node
            prefillers.columns[FeatureColumn.LINK, place] = (
                costs.dram_bytes_per_s if is_near else costs.network_bytes_per_s
            )

    def _receipt(
        self,
        opened: OpenRequest,
        features: Features,
        case: Case,
        verdict: RouteVerdict,
        weights: Floats,
        placed: Placement,
        full: float,
        now_ns: int,
    ) -> Receipt:
        request, prefix = opened.request, opened.prefix
        held_s = (now_ns - opened.arrived_ns) / NS_PER_S if opened.was_held else 0.0
        trust = TRUSTS[int(features.columns[FeatureColumn.TRUST, verdict.order[0]])]
        degraded = rungs(trust, value=full, is_held=opened.was_held, attempt=opened.attempt + 1)
        if placed.reason in (SplitReason.PREFILL_QUEUE, SplitReason.FELL_BACK):
            degraded.append(Rung.SPLIT_REFUSED)
        keep = kept(features, verdict, self.policy.receipt_workers_max)
        columns = features.columns[:, keep].tolist()
        return Receipt(
            number=case.number,
            seed=case.seed,
            at_ns=now_ns,
            request_id=request.request_id,
            tenant=request.tenant,
            service=opened.service,
            pool=opened.side.pool,
            model=opened.side.body_model,
            policy=self.policy.policy,
            policy_hash=self.policy_hash,
            index_trust=TRUSTS[_NONE if prefix is None else TRUSTS.index(prefix.trust)].value,
            index_epoch=prefix.epoch if prefix is not None else 0,
            prompt_tokens=case.prompt_tokens,
            output_tokens=case.output_tokens,
            session_hash=case.session_hash,
            pressure=case.pressure,
            chosen=placed.worker,
            prefill_worker=placed.prefill_worker,
            fallbacks=fallbacks(features, verdict, self.policy),
            split_reason=placed.reason.value,
            degraded=tuple(rung.value for rung in degraded),
            held_s=held_s,
            attempt=opened.attempt + 1,
            predicted_s=held_s + placed.predicted_s,
            workers=tuple(features.workers[place] for place in keep),
            filtered=filtered(features, verdict),
            features=dict(zip(FEATURE_NAMES, columns, strict=True)),
            weights=weights[:, keep].tolist(),
            terms={name: column[keep].tolist() for name, column in verdict.terms.items()},
            scores=verdict.scores[keep].tolist(),
        )

    def sent(self, placed: Placement, request: RouteRequest) -> None:
        """Note a decision in the smoothed shares."""
        share = placed.hit_tokens / max(1, request.prompt_tokens)
        self.hit_share += _SMOOTH * (share - self.hit_share)

    def withdraw(self, request: RouteRequest, placed: Placement) -> None:
        """Forget that a request, of which a leg failed, was sent: both legs are void."""
        for worker in filter(None, (placed.worker, placed.prefill_worker)):
            self.tree.withdraw(
                request.keys,
                worker,
                block_tokens=request.block_tokens,
                after_tokens=placed.hit_tokens,
            )

    def see(self, opened: OpenRequest) -> None:
        """Note an arrival, and what it finds."""
        rank = self.policy.classes[opened.service].rank
        self._seen_ns.setdefault(opened.side.pool, {})[rank] = opened.arrived_ns
        rows = self.fleet.rows(opened.side.pool, prefill=False)
        if rows.size:
            busy = int(np.count_nonzero(self.fleet.columns[FleetColumn.QUEUED, rows]))
            self.utilisation += _SMOOTH * (busy / rows.size - self.utilisation)

    def _case(self, opened: OpenRequest) -> Case:
        request = opened.request
        session = request.session or request.keys[:32].hex()
        pressure = others_per_s(
            self.policy.costs, utilisation=self.utilisation, hit_share=self.hit_share
        )
        return Case(
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens_max,
            number=opened.number,
            seed=self._seed,
            session_hash=xxhash.xxh3_64_intdigest(session.encode()) if session else 0,
            pressure=pressure,
        )

    def _where(
        self, opened: OpenRequest, features: Features, verdict: RouteVerdict, now_ns: int
    ) -> tuple[SplitReason, Remote | None]:
        """Local or remote; a remote one with its prefiller."""
        pool, settings, request = opened.side.pool, self.policy.split, opened.request
        rows = self.fleet.rows(pool, prefill=True)
        if not rows.size:
            return SplitReason.NO_PREFILLERS, None
        if not settings.is_on or request.must_be_local:
            return SplitReason.OFF, None
        split, lanes = self.split_of(pool)
        chosen = verdict.order[0]
        prefillers = self.columns(opened, rows, now_ns)
        unfit_codes = prefillers.columns[FeatureColumn.UNFIT]
        able = unfit_codes == 0
        if opened.is_local or not able.any():
            return SplitReason.FELL_BACK, None
        queued = prefillers.columns[FeatureColumn.QUEUED]
        uncached = float(verdict.uncached[chosen])
        waiting = max(0, len(lanes) - opened.is_held) / able.sum()
        reason = split.where(
            uncached=uncached,
            streams=float(features.columns[FeatureColumn.STREAMS, chosen]),
            prefill_queue=float(queued[able].min() + waiting),
        )
        if not reason.is_remote:
            return reason, None
        busy = {
            name: self._busy(name)
            for name, is_able in zip(prefillers.workers, able, strict=True)
            if is_able
        }
        free = lanes.may_take(uncached, busy)
        for place, name in enumerate(prefillers.workers):
            if name not in free and not unfit_codes[place]:
                unfit_codes[place] = LANE
        return reason, Remote(prefillers, uncached, bool(free))

    def _busy(self, prefiller: str) -> tuple[int, float]:
        flights = self.fleet.flights
        queue = self.fleet.workers[self.fleet.row_of[prefiller]].queue
        return len(queue), max((flights[name].uncached for name in queue), default=0.0)
