"""One attempt of a request: the worker, the prefiller if the prefill is remote, the receipt.

    OpenRequest ─▶ judge (features, decide) ─▶ local or remote ─▶ Placement        or Blocked

Changes nothing but the count of decisions: `core` sends, holds or rejects.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Final, Literal

import msgspec
import numpy as np
import xxhash

from kvstore.routing.costs import TRUST_FACTORS, others_per_s
from kvstore.routing.decide import (
    LAST_RESORTS,
    Dropped,
    RouteVerdict,
    decide,
    dropped_names,
    fallbacks,
    is_of_the_moment,
    requests_in_flight,
    unfit,
)
from kvstore.routing.events import Blocked, Ending, Unplaced
from kvstore.routing.features import (
    TRUSTS,
    Case,
    FeatureColumn,
    Features,
    fill_prefixes,
    load_columns,
)
from kvstore.routing.fleet import Fleet
from kvstore.routing.learning import OutputLengths
from kvstore.routing.policy import RoutingPolicy, policy_hash
from kvstore.routing.pressure import Rung, rungs, saturation
from kvstore.routing.receipts import Receipt, ReceiptDraft, RouteOutcome
from kvstore.routing.requests import OpenRequest, Placement
from kvstore.routing.rows import WEIGHTS, Crew, FleetColumn, Floats
from kvstore.routing.split import PrefillSplit, SplitReason, may_take
from kvstore.routing.tree import ApproximateTree
from kvstore.routing.values import PrefixTrust, RouteRequest
from kvstore.units import NS_PER_S

_NONE: Final = TRUSTS.index(PrefixTrust.NONE)
URGENT_S: Final = 10.0
"""Time for which a request counts as recent in `yield_s` of classes."""
_SMOOTH: Final = 0.02
_FRESH_NS: Final = 20_000_000


def _local(opened: OpenRequest, verdict: RouteVerdict, reason: SplitReason) -> Placement:
    features, prompt_tokens, chosen = verdict.features, verdict.case.prompt_tokens, verdict.order[0]
    uncached = float(verdict.uncached[chosen])
    column, unfit_codes = features.columns[:, chosen], features.columns[FeatureColumn.UNFIT]
    trust = float(TRUST_FACTORS[int(column[FeatureColumn.TRUST])])
    held, dram, file, remote = column[FeatureColumn.HBM : FeatureColumn.TRUST].tolist()
    near = max(held, dram, file)
    far = max(0.0, remote - near)
    return Placement(
        worker=features.workers[chosen],
        prefill_worker="",
        reason=reason,
        work_s=float(verdict.work_s[chosen]),
        need_tokens=int(prompt_tokens - held + opened.output_tokens_expected),
        uncached=uncached,
        hit_tokens=prompt_tokens - uncached,
        offered=(near * trust, far * trust),
        predicted_s=float(verdict.ttft_s[chosen]),
        local_s=float(verdict.ttft_s[chosen]),
        raw=verdict.raw[:, chosen],
        has_others=int(np.count_nonzero(unfit_codes)) < len(features.workers) - 1,
    )


def _idle(verdict: RouteVerdict) -> int | None:
    """Place of the best worker without any request; None: all have some."""
    columns = verdict.features.columns
    # Other routers say tokens, not requests.
    busy = requests_in_flight(columns) + columns[FeatureColumn.QUEUE_S]
    return next((place for place in verdict.order if not busy[place]), None)


def _remote(placed: Placement, legs: RouteVerdict) -> Placement:
    chosen = legs.order[0]
    return msgspec.structs.replace(
        placed,
        prefill_worker=legs.features.workers[chosen],
        work_s=float(legs.work_s[chosen]),
        predicted_s=float(legs.ttft_s[chosen]),
        raw=legs.raw[:, chosen],
    )


class Placer:
    """Judges requests by the current policy, and places them."""

    def __init__(self, fleet: Fleet, tree: ApproximateTree, seed: int) -> None:
        self.fleet = fleet
        self.lengths = OutputLengths()
        self.splits: dict[str, PrefillSplit] = {}
        self.laned = defaultdict[str, dict[str, OpenRequest]](dict)
        """Pool → held requests that wait for a prefiller, by id."""
        self.utilisation = 0.0
        """Share of workers with queued requests, as arriving requests find it; smoothed."""
        self.hit_share = 0.0
        """Share of prompt tokens that are expected to be cached; smoothed."""
        self._full: dict[str, tuple[int, float]] = {}
        """Pool → (when it was measured in ns, saturation)."""
        self._seen_ns: dict[str, dict[int, int]] = {}
        """Pool → class rank → when a request of it was sent last."""
        self.tree = tree
        self._seed = seed
        self.adopt(fleet.policy)

    def adopt(self, policy: RoutingPolicy) -> None:
        """Use another policy from now on, which the fleet has already."""
        self.policy_hash = policy_hash(policy)
        # Thresholds were learned from a start and within bounds that may be others now.
        self.splits = {p: each for p, each in self.splits.items() if each.settings == policy.split}

    def split_of(self, pool: str) -> PrefillSplit:
        """Thresholds of a pool's remote prefills."""
        if pool not in self.splits:
            self.splits[pool] = PrefillSplit(self.fleet.policy.split)
        return self.splits[pool]

    def columns(self, opened: OpenRequest, crew: Crew, now_ns: int) -> Features:
        """Features of a request at some workers."""
        request, side, failed = opened.request, opened.side, opened.failed
        columns = load_columns(self.fleet, crew, now_ns)
        fill_prefixes(columns, self.fleet, crew, self.tree, request, now_ns)
        if side.adapter:
            columns[FeatureColumn.WARM] = [side.adapter in state.adapters for state in crew.states]
        if opened.stays_at in crew.place_of:
            columns[FeatureColumn.STAYS, crew.place_of[opened.stays_at]] = 1.0
        suspects: Iterable[int] = range(len(crew.states))
        fit = crew.fit(side.model)
        is_long = request.prompt_tokens + (request.output_tokens_max or 0) > fit.least_tokens
        is_special = side.adapter or request.subset is not None or request.media or is_long
        if not is_special and fit.all_serve:
            named = failed | self.fleet.doubtful if failed else self.fleet.doubtful
            suspects = [crew.place_of[name] for name in named if name in crew.place_of]
        for place in suspects:
            columns[FeatureColumn.UNFIT, place] = unfit(crew.states[place], opened, now_ns)
        weights = self.fleet.columns[WEIGHTS].take(crew.rows, axis=1)
        return Features(crew.names, columns, weights)

    def judge(self, opened: OpenRequest, now_ns: int) -> None:
        """Note the worker that the request would likely go to now, as `likely_worker`."""
        crew = self.fleet.crew(opened.pool, prefill=False)
        if crew.states:
            order = self._weigh(opened, crew, now_ns).order
            opened.likely_worker = crew.names[order[0]] if order else None

    def place(self, opened: OpenRequest, now_ns: int) -> Placement | Blocked:
        """Workers for the request now, or what blocks it."""
        pool = opened.pool
        placed = self._place(opened, self.fleet.crew(pool, prefill=False), now_ns)
        resort = opened.last_resort
        if placed is Blocked.NO_WORKERS or resort:
            # A prefiller may serve it that is one by plan only, rather than a last resort.
            planned = self._place(opened, self.fleet.flexible(pool), now_ns)
            is_better = planned is not Blocked.NO_WORKERS and opened.last_resort < resort
            placed = planned if is_better or placed is Blocked.NO_WORKERS else placed
        return placed

    def _place(self, opened: OpenRequest, crew: Crew, now_ns: int) -> Placement | Blocked:
        service = self.fleet.policy.classes[opened.service]
        if not crew.states:
            return Blocked.NO_WORKERS
        verdict = self._weigh(opened, crew, now_ns)
        if not verdict.order:
            return Blocked.LOAD if is_of_the_moment(verdict.codes) else Blocked.NO_WORKERS
        opened.likely_worker, columns = crew.names[verdict.order[0]], verdict.features.columns
        # At the best worker, not a filter: waiting costs less than the prefix lost elsewhere.
        full = self._saturation(opened, columns, service.saturation_max, now_ns)
        queue_s = columns[FeatureColumn.QUEUE_S, verdict.order[0]]
        is_full = service.saturation_max is not None and full > service.saturation_max
        if is_full or queue_s > self._backlog_s(opened, now_ns):
            idle = _idle(verdict)
            if idle is None:
                return Blocked.LOAD
            verdict.order.remove(idle)
            verdict.order.insert(0, idle)
        reason, prefillers = self._where(opened, verdict, now_ns)
        if prefillers is Blocked.LANES:
            return prefillers
        placed = _local(opened, verdict, reason)
        if prefillers is not None:
            self._link(prefillers, opened.pool, placed.worker)
            legs = decide(prefillers, verdict.case, self.fleet.policy)
            if not legs.order:
                return Blocked.LANES
            placed = _remote(placed, legs)
        placed.draft = self._draft(opened, verdict, placed, full, now_ns)
        return placed

    def rejection(self, opened: OpenRequest, why: Unplaced, now_ns: int) -> ReceiptDraft:
        """The draft of a request that gets no worker: what it would find at each one now."""
        verdict = self._weigh(opened, self.fleet.crew(opened.pool, prefill=False), now_ns)
        full = saturation(verdict.features.columns, self.fleet.policy.limits).value
        outcome = RouteOutcome(attempts=0, end=Ending.FAILED.value, rejected=why.reason)
        outcome.ended_ns = now_ns
        return self._draft(opened, verdict, None, full, now_ns, why.predicted_s).ended(outcome)

    def objective_s(self, opened: OpenRequest) -> float:
        """TTFT above which the request is rejected; 0: none."""
        return self.fleet.policy.classes[opened.service].ttft_s

    def _weigh(self, opened: OpenRequest, crew: Crew, now_ns: int) -> RouteVerdict:
        features, case = self.columns(opened, crew, now_ns), self._case(opened, crew)
        verdict = decide(features, case, self.fleet.policy)
        codes = features.columns[FeatureColumn.UNFIT]
        opened.last_resort = 0
        for place, resort in enumerate(LAST_RESORTS, 1):
            if verdict.order or is_of_the_moment(verdict.codes):
                break
            if len(these := np.flatnonzero(codes == resort)):
                up = [at for at in these if crew.states[at].is_up]
                codes[up or these] = 0
                verdict = decide(features, case, self.fleet.policy)
                opened.last_resort = place
        return verdict

    def _saturation(
        self, opened: OpenRequest, columns: Floats, bound: float | None, now_ns: int
    ) -> float:
        """Saturation of the request's pool: of this moment for a class with a bound, else up to 20
        ms old, since only the degradation ladder reads it then.
        """
        at_ns, value = self._full.get(opened.pool, (-_FRESH_NS, 0.0))
        if bound is not None or now_ns - at_ns >= _FRESH_NS:
            value = saturation(columns, self.fleet.policy.limits).value
            self._full[opened.pool] = (now_ns, value)
        return value

    def _backlog_s(self, opened: OpenRequest, now_ns: int) -> float:
        """Seconds of prefill that may be ahead of a request of this class at its worker; infinite:
        any.
        """
        service = self.fleet.policy.classes[opened.service]
        since_ns = now_ns - int(URGENT_S * NS_PER_S)
        seen = self._seen_ns.get(opened.pool, {})
        must_yield = any(rank < service.rank and at >= since_ns for rank, at in seen.items())
        bounds = (service.backlog_s, service.yield_s if must_yield else None)
        return min((bound_s for bound_s in bounds if bound_s is not None), default=math.inf)

    def _link(self, prefillers: Features, pool: str, worker: str) -> None:
        """Column LINK: bytes/s from each prefiller of a pool to the worker that decodes."""
        fleet, link = self.fleet, prefillers.columns[FeatureColumn.LINK]
        node = fleet.workers[fleet.row_of[worker]].spec.node
        near = fleet.crew(pool, prefill=True).places_of_node.get(node, [])
        link[:] = fleet.policy.costs.network_bytes_per_s
        link[near] = fleet.policy.costs.dram_bytes_per_s

    def _draft(
        self,
        opened: OpenRequest,
        verdict: RouteVerdict,
        placed: Placement | None,
        full: float,
        now_ns: int,
        predicted_s: float = 0.0,
    ) -> ReceiptDraft:
        """Draft of the receipt. `placed` None: rejected, for its `predicted_s` or, if 0, another
        reason.
        """
        features, case = verdict.features, verdict.case
        request, prefix = opened.request, opened.request.answer
        held_s = (now_ns - opened.arrived_ns) / NS_PER_S if opened.was_held else 0.0
        trust = self._trust(opened, features, verdict.order[0]) if verdict.order else TRUSTS[_NONE]
        degraded = rungs(trust, value=full, is_held=opened.was_held, attempt=opened.attempt + 1)
        degraded += [Rung.LAST_RESORT] * bool(opened.last_resort)
        is_refused = placed and placed.reason in (SplitReason.PREFILL_QUEUE, SplitReason.FELL_BACK)
        degraded += [Rung.SPLIT_REFUSED] * bool(is_refused)
        plain = Receipt(
            **msgspec.structs.asdict(case),
            at_ns=now_ns,
            request_id=request.request_id,
            tenant=request.tenant,
            service=opened.service,
            pool=opened.pool,
            model=opened.side.body_model,
            policy=self.fleet.policy.policy,
            policy_hash=self.policy_hash,
            index_trust=(PrefixTrust.NONE if prefix is None else TRUSTS[prefix.trust]).value,
            index_epoch=0 if prefix is None else prefix.epoch,
            prompt_is_estimated=bool(request.text_bytes),
            chosen=placed.worker if placed else "",
            prefill_worker=placed.prefill_worker if placed else "",
            fallbacks=fallbacks(verdict, self.fleet.policy) if placed else (),
            split_reason=placed.reason.value if placed else "",
            degraded=tuple(rung.value for rung in degraded),
            held_s=held_s,
            attempt=opened.attempt + 1,
            role=self.fleet.workers[self.fleet.row_of[placed.worker]].role if placed else "",
            predicted_s=held_s + (placed.predicted_s if placed else predicted_s),
            objective_s=self.objective_s(opened),
            load_only=request.load_only,
            filtered=dropped_names(features.workers, verdict.codes),
        )
        # What is cut off in a large pool is not kept: requests wait for minutes with their drafts.
        workers, most = features.workers, self.fleet.policy.receipt_workers_max
        keep: list[int] | slice = slice(None)  # all in their order, or the best ones
        if len(workers) > most:
            keep = sorted((verdict.order or range(most))[:most])
        return ReceiptDraft(
            plain=plain,
            workers=workers if isinstance(keep, slice) else [workers[at] for at in keep],
            columns=features.columns[:, keep],
            terms={name: column[keep] for name, column in verdict.terms.items()},
            scores=verdict.scores[keep],
            weights=features.weights[:, keep],
            cached=case.prompt_tokens - verdict.uncached[keep],
        )

    def _trust(self, opened: OpenRequest, features: Features, place: int) -> PrefixTrust:
        """Trust in the prefix length that was known of the worker, also if that is 0."""
        request, worker = opened.request, features.workers[place]
        prefix = request.answer
        trust = TRUSTS[int(features.columns[FeatureColumn.TRUST, place])]
        state = self.fleet.workers[self.fleet.row_of[worker]]
        if trust is not PrefixTrust.NONE or state.spec.is_red or worker in request.load_only:
            return trust
        if request.prompt_tokens <= request.block_tokens:  # no engine caches less than a block
            return PrefixTrust.EXACT
        if prefix is None or not state.spec.is_followed:
            return PrefixTrust.APPROXIMATE if request.keys else trust
        return TRUSTS[prefix.trust]

    def sent(self, opened: OpenRequest, placed: Placement, now_ns: int) -> None:
        """Note a request that is sent: only those make less urgent ones yield."""
        share = placed.hit_tokens / max(1, opened.request.prompt_tokens)
        self.hit_share += _SMOOTH * (share - self.hit_share)
        rank = self.fleet.policy.classes[opened.service].rank
        self._seen_ns.setdefault(opened.pool, {})[rank] = now_ns

    def withdraw(self, request: RouteRequest, placed: Placement) -> None:
        """Take a request out of the tree at both workers of an attempt: a leg failed, so both are
        void.
        """
        kept = 0.0 if request.parts else placed.hit_tokens / request.block_tokens
        for worker in filter(None, (placed.worker, placed.prefill_worker)):
            for keys in request.chains:
                self.tree.withdraw(keys, worker, step=request.key_step, after_blocks=kept)

    def sample_utilisation(self, opened: OpenRequest) -> None:
        """Take the share of busy workers that an arriving request finds into `utilisation`."""
        rows = self.fleet.crew(opened.pool, prefill=False).rows
        if rows.size:
            busy = int(np.count_nonzero(self.fleet.columns[FleetColumn.QUEUED].take(rows)))
            self.utilisation += _SMOOTH * (busy / rows.size - self.utilisation)

    def _case(self, opened: OpenRequest, crew: Crew) -> Case:
        request = opened.request
        most_tokens = crew.fit(opened.side.model).most_tokens
        session = request.session or request.keys[:32].hex()
        pressure = others_per_s(
            self.fleet.policy.costs, utilisation=self.utilisation, hit_share=self.hit_share
        )
        return Case(
            # No engine computes more; a longer prompt is refused there.
            prompt_tokens=int(min(request.prompt_tokens, most_tokens)),
            output_tokens=opened.output_tokens_expected,
            number=opened.number,
            seed=self._seed,
            session_hash=xxhash.xxh3_64_intdigest(session.encode()) if session else 0,
            pressure=pressure,
        )

    def _where(
        self, opened: OpenRequest, verdict: RouteVerdict, now_ns: int
    ) -> tuple[SplitReason, Features | Literal[Blocked.LANES] | None]:
        """(reason, prefillers): local with None, remote with its prefillers, or with Blocked.LANES
        if none of them may take it now.
        """
        pool, settings, request = opened.pool, self.fleet.policy.split, opened.request
        crew = self.fleet.crew(pool, prefill=True)
        if not crew.states:
            return SplitReason.NO_PREFILLERS, None
        if not settings.is_on or request.must_be_local:
            return SplitReason.OFF, None
        split, laned = self.split_of(pool), self.laned[pool]
        chosen = verdict.order[0]
        prefillers = self.columns(opened, crew, now_ns)
        unfit_codes = prefillers.columns[FeatureColumn.UNFIT]
        able = unfit_codes == 0
        is_prefiller = self.fleet.row_of[verdict.features.workers[chosen]] in crew.rows
        if opened.is_local or is_prefiller or not able.any():
            return SplitReason.FELL_BACK, None
        queued = prefillers.columns[FeatureColumn.QUEUED]
        uncached = float(verdict.uncached[chosen])
        waiting = max(0, len(laned) - opened.is_held) / able.sum()
        reason = split.where(
            uncached=uncached,
            streams=float(verdict.features.columns[FeatureColumn.STREAMS, chosen]),
            prefill_queue=float(queued[able].min() + waiting),
        )
        if not reason.is_remote:
            return reason, None
        busy = {
            its.spec.worker: (len(its.queue), max((f.uncached for f in its.queue), default=0.0))
            for its, is_able in zip(crew.states, able, strict=True)
            if is_able
        }
        free = may_take(uncached, busy)
        if not free:
            if opened.laned_ns is None:
                opened.uncached = uncached
            return reason, Blocked.LANES
        for place, name in enumerate(prefillers.workers):
            if name not in free and not unfit_codes[place]:
                unfit_codes[place] = Dropped.LANE
        return reason, prefillers
