"""The index, asked on the router's loop: answers within milliseconds or none; engines and spaces.

    match ─▶ first replica ─ deadline ─▶ Answer        failures ─▶ breaker: no call for a second
    follow ─▶ Watch(nodes, engines) ─▶ members, again and again; the next replica after an end

A router without an index routes by its own tree; so a late answer is worth nothing, and a silent
replica must not cost each request its deadline: after FAILURES_MAX in a row nobody is asked until
one probe has succeeded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final, NamedTuple

import grpc

from kvstore.breaker import Breaker
from kvstore.client.index import aio_channel, reason_of
from kvstore.client.tls import Tls
from kvstore.index.index import Member
from kvstore.proto import forms, index_pb2 as pb
from kvstore.proto.index_pb2_grpc import IndexStub
from kvstore.router.engines.workers import Worker, Workers
from kvstore.router.keys.child import KeyPlan
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.values import PrefixAnswer
from kvstore.wire.load import EngineEntry

TIMEOUT_S_PER_KEY: Final = 2e-6
FAILURES_MAX: Final = 3
COOLDOWN_MS: Final = 250
RETRY_S: Final = 1.0
_log = logging.getLogger(__name__)


Listed = tuple[str, EngineEntry]
"""(node, an engine that it lists in the index)."""


class IndexCalls:
    """Calls to the replicas of the index; on one loop."""

    def __init__(self, endpoints: Sequence[str], tls: Tls | None, *, timeout_s: float) -> None:
        """`endpoints`: none: there is no index. `timeout_s`: limit for a match of few keys; each
        key adds TIMEOUT_S_PER_KEY.
        """
        self.endpoints, self._timeout_s = endpoints, timeout_s
        credentials = tls.channel_credentials() if tls is not None else None
        self._channels = [aio_channel(each, credentials) for each in endpoints]
        self._stubs = [IndexStub(each) for each in self._channels]
        self._first = 0
        self._breaker = Breaker(failures_max=FAILURES_MAX, cooldown_ms=COOLDOWN_MS)
        self.trouble = ""
        """Reason why the index is not asked for matches; empty: it is asked."""
        self.lost = ""
        """Why no replica lists nodes and engines; empty: one does."""
        self._lost_count = 0
        self.match_count = 0
        self.late_count = 0
        self.epoch = 0
        """Counts updates of the lists of nodes and engines."""
        self.listed: tuple[Listed, ...] = ()
        self.addresses: dict[str, str] = {}
        """Node → address for other nodes and routers; a node without an address neither serves nor
        fetches blocks.
        """

    async def match(self, tenant: str, space: bytes, keys: bytes) -> PrefixAnswer | None:
        """Matches of keys in a space; None: no answer in time."""
        if not self._breaker.allows(time.monotonic_ns()):
            return None
        self.match_count += 1
        timeout_s = self._timeout_s + len(keys) // 32 * TIMEOUT_S_PER_KEY
        request = pb.MatchRequest(tenant=tenant, space=space, keys=keys)
        try:
            # Two limits: gRPC's own is as late as its loop is, and cancels the call at the server.
            async with asyncio.timeout(timeout_s):
                reply = await self._stubs[self._first].Match(request, timeout=2 * timeout_s)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            self._failed(error)
            return None
        except asyncio.CancelledError:
            self._breaker.return_probe()
            raise
        if self._breaker.succeeded():
            _log.info("the index answers again")
            self.trouble = ""
        found = forms.answer_of(reply)
        peers = frozenset(self.addresses)  # others neither serve blocks nor fetch them
        return PrefixAnswer(found.trust, found.matches, self.epoch, peers)

    def _failed(self, error: grpc.aio.AioRpcError | TimeoutError) -> None:
        self.late_count += 1
        self._first = (self._first + 1) % len(self._stubs)
        if self._breaker.failed(time.monotonic_ns()):
            self.trouble = f"the index is not used: {reason_of(error)}"
            _log.warning("%s; prefixes are those that this router sent", self.trouble)

    async def follow(self, changed: Callable[[], None]) -> None:
        """Follow the engines that nodes list, calling `changed` after each update, until the stream
        ends; its owner repeats it.
        """
        number = self._first
        members: dict[str, Member] = {}
        call = self._stubs[number].Watch(pb.WatchRequest(nodes=True, engines=True))
        try:
            async for reply in call:
                self._lost_count, self.lost = 0, ""
                for row in reply.nodes:
                    members[row.node] = forms.member_of(row)
                for gone in reply.gone:
                    members.pop(gone, None)
                self.addresses = {n: its.address for n, its in members.items() if its.address}
                self.epoch += 1
                self.listed = tuple(
                    (node, entry) for node, its in members.items() for entry in its.engines
                )
                changed()
        except grpc.aio.AioRpcError as error:
            self._first = (number + 1) % len(self._stubs)
            self._unfollowed(error)
        finally:
            call.cancel()

    def _unfollowed(self, error: grpc.aio.AioRpcError) -> None:
        """A replica's stream failed: set `lost` when every replica has failed in a row."""
        self._lost_count += 1
        if self._lost_count < len(self._stubs):
            return
        was, self.lost = self.lost, f"the index is lost: {reason_of(error)}"
        if not was:
            _log.warning("%s; engines that nodes list stay as they are", self.lost)

    async def close(self) -> None:
        for each in self._channels:
            await each.close()


# ── spaces ────────────────────────────────────────────────────────────────────────────────────────
# Scopes of workers in the index: (tenant, space) of each, and how keys of a model are made.
#
#     worker: node, engine, models ─┬─ space= of its flag
#     registry of the index ────────┴─ entries of that node, of that engine or model
#
# Made anew when a worker, the registry or the policy changed. The keys of a LoRA adapter fold in
# its name, its path and the digest of its weights: engines say it (`parity`), and those that say
# another one than most are load-only for its requests.

MODELS_MAX: Final = 1000
"""Most model names that are remembered, unknown ones included."""
OTHER_KEYS: Final = "most engines have other weights under that name, or another path"


def plan_of(worker: Worker) -> KeyPlan:
    """Parameters for the keys of a worker's base models."""
    return KeyPlan(worker.block_tokens, worker.address.hash_seed)


class PrefixScope(NamedTuple):
    """Parameters for the keys of a model, and the (tenant, space) pairs in which the index is asked
    for them.
    """

    model: str
    """Model as engines serve it; of an adapter the base model, whose tokens it shares."""
    plan: KeyPlan
    places: frozenset[tuple[str, bytes]]
    load_only: dict[str, str]
    """Worker → why its prefixes are not known for this adapter."""


class Spaces:
    """Scopes of workers and models in the index; see above."""

    def __init__(
        self, workers: Workers, index: IndexCalls, policy: Callable[[], RoutingPolicy]
    ) -> None:
        self.workers, self.index, self._policy = workers, index, policy
        self._made: dict[str, PrefixScope | None] = {}
        self._version, self._made_by = (-1, -1), policy()

    def of(self, worker: Worker) -> list[tuple[str, bytes]]:
        """(tenant, space) pairs of a worker's engine; several if its node lists several
        that fit.
        """
        address = worker.address
        if address.space:
            return [(address.tenant, bytes.fromhex(address.space))]
        entries = [entry for node, entry in self.index.listed if node == address.node]
        if address.engine:
            entries = [each for each in entries if each.engine == address.engine]
        elif len(entries) > 1 and worker.models:
            entries = [each for each in entries if each.model in worker.models] or entries
        return sorted({(each.tenant, bytes(each.space)) for each in entries})

    def scope(self, model: str) -> PrefixScope | None:
        """Scope of a model as a client names it; None: its prefixes are not in the index."""
        policy, version = self._policy(), (self.workers.version, self.index.epoch)
        if version != self._version or policy is not self._made_by or len(self._made) > MODELS_MAX:
            self._made.clear()
            self._version, self._made_by = version, policy
        if model not in self._made:
            self._made[model] = self._scope(model)
        return self._made[model]

    def _scope(self, model: str) -> PrefixScope | None:
        """Scope by the workers whose keys equal those of most: of an adapter, the same name, path
        and weights. The other workers are load-only for requests of an adapter.
        """
        names = self._served(model)
        able = [
            worker
            for worker in self.workers
            if worker.address.node
            and worker.block_tokens
            and any(worker.serves(name) for name in names)
        ]
        found = [(w, name, w.adapters[name]) for w in able for name in names if name in w.adapters]
        plans = {w: plan_of(w) for w in able if w.has_parity and not found}
        for worker, name, adapter in found:
            if not adapter.is_wanted:
                adapter.is_wanted, adapter.compared_again_s = True, 0.0
            if worker.has_parity and adapter.has_parity:
                plans[worker] = plan_of(worker)._replace(
                    adapter=(name, adapter.path), digest=adapter.digest
                )
        most = Counter(plans.values()).most_common(1)
        chosen = {worker for worker, plan in plans.items() if plan == most[0][0]}
        load_only = dict[str, str]()
        for worker, _, adapter in found:
            adapter.other = OTHER_KEYS if worker in plans and worker not in chosen else ""
            if why := worker.parity or adapter.parity or adapter.other:
                load_only[worker.name] = why
        places = frozenset(place for worker in chosen for place in self.of(worker))
        if not places:
            return None
        bases = (adapter.base for worker, _, adapter in found if worker in chosen)
        served = (name for name in names if any(worker.serves(name) for worker in chosen))
        return PrefixScope(next(chain(bases, served)), most[0][0], places, load_only)

    def _served(self, model: str) -> list[str]:
        for name, rule in self._policy().models.items():
            if model == name or model in rule.aliases:
                return [pool.served or name for pool in rule.pools] or [name]
        return [model]
