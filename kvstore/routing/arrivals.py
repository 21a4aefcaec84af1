"""Requests that arrive: model and pool, class of service, session, expected length of the answer.

    RouteRequest ─▶ `opened` ─▶ OpenRequest        no model has its name ─▶ Rejected

Does not cover: workers (`placing`), what becomes of the request (`core`).
"""

from __future__ import annotations

from kvstore.routing.ahead.pins import Stays
from kvstore.routing.events import Rejected, RejectReason
from kvstore.routing.learning import OutputLengths
from kvstore.routing.models import ModelMap, ModelUnknown
from kvstore.routing.requests import OpenRequest
from kvstore.routing.values import PrefixAnswer, RouteRequest
from kvstore.routing.workers.fleet import Fleet


class NewRequests:
    """See the module."""

    def __init__(self, fleet: Fleet, stays: Stays, lengths: OutputLengths) -> None:
        self._fleet, self._stays, self._lengths = fleet, stays, lengths
        self._models: ModelMap | None = None
        self.count = 0
        """Requests so far: the number of the last one."""

    def forget_models(self) -> None:
        """Make the map of models anew for the next request: workers have joined or left, or the
        policy is another one.
        """
        self._models = None

    @property
    def models(self) -> ModelMap:
        """Names of models by the current policy and workers. Made when a request asks for it: a
        thousand workers may join or leave in one turn.
        """
        if self._models is None:
            self._models = ModelMap(
                self._fleet.policy, (state.spec for state in self._fleet.workers)
            )
        return self._models

    def opened(
        self, request: RouteRequest, prefix: PrefixAnswer | None, now_ns: int
    ) -> OpenRequest | Rejected:
        """The request with its model, pool, class and expected output, ready to be placed; Rejected
        if no model has its name.
        """
        stay = self._stays.find(request, now_ns)
        try:
            side = self.models.resolve(
                request.model,
                session=request.session,
                request_id=request.request_id,
                stays_in=stay.pool if stay is not None else "",
            )
        except ModelUnknown as unknown:
            named = RejectReason.MODEL_UNKNOWN
            reason = named if request.model else RejectReason.MODEL_MISSING
            return Rejected(request.request_id, reason.status, reason, None, unknown.known)
        self.count += 1
        service = self.service_of(request)
        opened = OpenRequest(request, prefix, side, service, now_ns, number=self.count)
        if stay is not None and stay.pool == side.pool:
            opened.stays_at = stay.worker
        most = request.output_tokens_max
        opened.output_tokens_expected = self._lengths.expected(side.body_model, most)
        return opened

    def service_of(self, request: RouteRequest) -> str:
        """Class of service of a request: the one that it names, or the default if there is no such
        class, or if it is more urgent than the default and not open to the tenant.
        """
        policy = self._fleet.policy
        classes, default = policy.classes, policy.default_class
        named = classes.get(request.service)
        if named is None:
            return default
        is_allowed = named.rank >= classes[default].rank or {request.tenant, "*"} & {*named.tenants}
        return request.service if is_allowed else default
