"""State beyond one decision: sessions, clients' pins, blocks brought to dram ahead of time.

    WAITS   a request is held: its likely worker's node has the prefix on disk, or another node does
    HOT     many requests begin with it, and all that hold it are saturated: one node more
    PINNED  a client wants it kept: its node is asked again, before the blocks leave

Rules. 1: nothing waits for a preparation, and nothing follows from one that fails. 2: everything is
bounded: `open_max` without an answer; KEYS_MAX keys each, PARTS_MAX for a request, which gets them
once; `copies_max` copies at a time and `copy_bytes_per_s` in the mean; HEAT_MAX prefixes are
counted. 3: each Prepare is answered by one PrepareAnswered.

Does not cover: what a node does with it (`kvstore.engine.sessions.lookups`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Final

import msgspec
import numpy as np
import xxhash

from kvstore.routing.events import HintAnswer, Prepare, PrepareAnswered, PrepareReason
from kvstore.routing.features import FeatureColumn, load_columns
from kvstore.routing.fleet import Fleet
from kvstore.routing.pressure import SATURATED_S
from kvstore.routing.receipts import Preparation
from kvstore.routing.requests import OpenRequest
from kvstore.routing.rows import WorkerState
from kvstore.routing.values import PrefixAnswer, RouteRequest, WorkerSpec
from kvstore.types import KEY_BYTES, Bucket, Latest
from kvstore.units import NS_PER_S
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX as KEYS_MAX

# ── stays ─────────────────────────────────────────────────────────────────────────────────────────
# Sessions that are remembered: the pool and the worker of a conversation's last request.
#
#     Routed ─▶ `keep` ─▶ pool, worker, when ─▶ next request: the same side, the same worker
#
# A session stays for `session_ttl_s` after its last request, where it can: while a pool has a
# weight above 0 in its rule, its sessions stay when weights change; policy `session` prefers the
# worker, also when others join or leave. Policy `cost` chooses by cost, which the prefix is part
# of. STAYS_MAX sessions, the longest unused leave; a name of any length takes 16 bytes.

STAYS_MAX: Final = 65_536


class Stay(msgspec.Struct):
    """Pool and worker of a session's last request."""

    pool: str
    worker: str
    at_ns: int


class Stays(Latest[bytes, Stay]):
    """Pool and worker of the last request of each session."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(STAYS_MAX)
        self._fleet = fleet

    def find(self, request: RouteRequest, now_ns: int) -> Stay | None:
        """Stay of the request's session; None: the session has none, or its last request was more
        than `session_ttl_s` ago.
        """
        stay = self.get(session_name(request))
        ttl_ns = self._fleet.policy.session_ttl_s * NS_PER_S
        return stay if stay is not None and now_ns - stay.at_ns < ttl_ns else None

    def keep(self, request: RouteRequest, pool: str, worker: str, now_ns: int) -> None:
        """Note that a request of a session goes to this worker of this pool, or ended there now."""
        if name := session_name(request):
            self[name] = Stay(pool, worker, now_ns)

    def home(self, before: str, chosen: str, failed: Collection[str]) -> str:
        """Worker that a session stays at: `before`, the one of its last request, with policy
        `session`, if it is up and no attempt failed there; else `chosen`, the worker of this
        request.
        """
        state, is_on = self._fleet.state(before), self._fleet.policy.policy == "session"
        if state is None or before in failed or not is_on:
            return chosen
        return before if state.is_up else chosen

    def touch(self, request: RouteRequest, now_ns: int) -> None:
        """A request of a session ended: its stay lasts `session_ttl_s` from now."""
        stay = self.find(request, now_ns)
        if stay is not None:
            self.keep(request, stay.pool, stay.worker, now_ns)

    def end(self, request: RouteRequest) -> None:
        """The client says that its session is over: forget the stay."""
        self.pop(session_name(request), None)


def session_name(request: RouteRequest) -> bytes:
    """Name of a request's session among those of all tenants and models; empty: it has none."""
    if not request.session:
        return b""
    text = f"{request.tenant}\0{request.model}\0{request.session}"
    return xxhash.xxh3_128_digest(text.encode(errors="replace"))


# ── pins ──────────────────────────────────────────────────────────────────────────────────────────
# Prompts whose blocks are touched again and again, so that they leave last.
#
#     request with a pin ─▶ `take`: in effect, or why not ─▶ Routed.hints ─▶ the client's answer
#     every `touch_s` ─▶ `due` ─▶ Prepare at the worker that served it     until its time is over
#
# A pin is no lease: the least recently used leave first, and a pinned block is never that for long.
# A tenant has `pins_per_tenant`, all of them PINS_MAX together, of KEYS_MAX blocks each. A pin is
# of keys that this router made of the tenant's own prompt, its salt included: nothing that a client
# names pins blocks of others.

PINS_MAX: Final = 1024
DUE_MAX: Final = 8
"""Most pins that one tick touches; the next tick goes on with the rest."""
PinName = tuple[str, bytes]
"""(tenant, name of the session; without a session, the last key of the prompt)."""


class Pin(msgspec.Struct):
    """A pin in effect: keys of one prompt, touched at a worker's node until `until_ns`."""

    name: PinName
    worker: str
    keys: bytes
    request_id: str
    until_ns: int
    due_ns: int


class PromptPins(Latest[PinName, Pin]):
    """All pins in effect, in the order in which they are due; see the module."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(PINS_MAX)
        self._fleet = fleet

    def take(self, request: RouteRequest, worker: str, now_ns: int) -> HintAnswer:
        """Pin the prompt of a request that goes to `worker`. Returns for how long and how many
        tokens, or the reason why not.
        """
        settings = self._fleet.policy.ahead
        keys = request.keys[: KEYS_MAX * KEY_BYTES]
        name = (request.tenant, session_name(request) or keys[-KEY_BYTES:])
        is_new = name not in self
        if request.pin_s < 0:
            return HintAnswer(refused="invalid")
        if not settings.is_on:
            return HintAnswer(refused="off")
        if not keys or request.answer is None or request.parts:
            return HintAnswer(refused="no-keys")
        count = sum(tenant == request.tenant for tenant, _ in self)
        if is_new and count >= settings.pins_per_tenant:
            return HintAnswer(refused="tenant-full")
        if is_new and len(self) >= PINS_MAX:
            return HintAnswer(refused="full")
        ttl_s = min(request.pin_s, settings.pin_s_max)
        due_ns = now_ns + int(settings.touch_s * NS_PER_S)
        until_ns = now_ns + int(ttl_s * NS_PER_S)
        self[name] = Pin(name, worker, keys, request.request_id, until_ns, due_ns)
        tokens = len(keys) // KEY_BYTES * request.block_tokens
        return HintAnswer(pinned_s=ttl_s, pinned_tokens=tokens)

    def due(self, now_ns: int) -> list[tuple[Pin, WorkerSpec]]:
        """Pins whose blocks are to be touched now, with their workers; each is due again later.
        Pins that have expired, or whose worker has left, are dropped.
        """
        found: list[tuple[Pin, WorkerSpec]] = []
        for pin in list(self.values())[:DUE_MAX] if self else ():
            if pin.due_ns > now_ns:
                break
            del self[pin.name]
            state = self._fleet.state(pin.worker)
            if pin.until_ns > now_ns and state is not None:
                pin.due_ns = now_ns + int(self._fleet.policy.ahead.touch_s * NS_PER_S)
                self[pin.name] = pin
                found.append((pin, state.spec))
        return found

    def end_session(self, request: RouteRequest) -> None:
        """Drop the pin of a session; no error if there is none."""
        self.pop((request.tenant, session_name(request)), None)


# ── preparations ──────────────────────────────────────────────────────────────────────────────────

PARTS_MAX: Final = 4
"""Most preparations for one request, each of the next KEYS_MAX keys."""
HEAT_MAX: Final = 4096
LOOK_NS: Final = NS_PER_S
"""Time after which a hot prefix is looked at again if no copy was asked for."""
REST_NS: Final = 10 * NS_PER_S
"""Time after which a hot prefix is looked at again once a copy was asked for, so that the index can
show the copy. A node that refused a copy gets no other one for as long.
"""
COPY_S_MIN: Final = 1.0


class _Heat(msgspec.Struct):
    """Requests for one prefix, decayed."""

    count: float
    at_ns: int
    rest_ns: int = 0
    """No copy of the prefix is considered before this time."""


class Ahead:
    """See the module."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.pins = PromptPins(fleet)
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[Prepare, str]] = {}
        """Number of each preparation without an answer → the command and its node."""
        self._heat = Latest[bytes, _Heat](HEAT_MAX)
        self._copies: list[int] = []
        """Estimated end of each copy under way, in ns."""
        self._room = Bucket(int(fleet.policy.ahead.copy_bytes_per_s), NS_PER_S)
        self._rests: dict[str, int] = {}
        """Node that refused a copy → until when it gets none."""

    # ── a request that waits ─────────────────────────────────────────────────────────────────────

    def may_help(self, opened: OpenRequest) -> bool:
        """Whether a preparation is possible for a held request: prefetch is on, the index answered
        for its only prompt, and none was tried yet.
        """
        is_one = opened.request.answer is not None and not opened.request.parts
        return self._fleet.policy.ahead.is_on and is_one and not opened.is_prepared

    def waits(self, opened: OpenRequest) -> list[Prepare]:
        """A request is held: preparations of the blocks that the node of its likely worker should
        bring to dram; empty: none.
        """
        state, request = self._fleet.state(opened.likely_worker or ""), opened.request
        if state is None or not self.may_help(opened):
            return []
        opened.is_prepared = True
        assert request.answer is not None
        if not state.spec.node or state.spec.is_red:
            return []
        near, begin, longest = _reach(request.answer, state.spec)
        if (longest - near) * request.block_tokens < self._fleet.policy.ahead.tokens_min:
            return []
        keys = request.keys[begin * KEY_BYTES : longest * KEY_BYTES]
        return self._prepare(request.request_id, state.spec, keys, PrepareReason.WAITS)

    def _prepare(
        self, request_id: str, spec: WorkerSpec, keys: bytes, reason: PrepareReason
    ) -> list[Prepare]:
        made = []
        size = KEYS_MAX * KEY_BYTES
        for at in range(0, min(len(keys), PARTS_MAX * size), size):
            if len(self._open) >= self._fleet.policy.ahead.open_max:
                break
            part = keys[at : at + size]
            command = Prepare(next(self._numbers), request_id, spec.worker, part, reason)
            self._open[command.number] = command, spec.node
            made.append(command)
        return made

    def prepared(self, event: PrepareAnswered, now_ns: int) -> tuple[str, Preparation]:
        """Take in the answer to a Prepare, or its failure. Returns the request's id and the entry
        for its receipt.
        """
        (command, node), its = self._open.pop(event.number), event.its
        if its.refused and command.reason is PrepareReason.HOT:
            self._rests = {each: at for each, at in self._rests.items() if at > now_ns}
            self._rests[node] = now_ns + REST_NS
        return command.request_id, Preparation(
            worker=command.worker,
            reason=command.reason.value,
            blocks=len(command.keys) // KEY_BYTES,
            dram=its.dram,
            reading=its.reading,
            sought=its.sought,
            trouble=its.refused,
        )

    # ── pins ─────────────────────────────────────────────────────────────────────────────────────

    def hints(self, opened: OpenRequest, worker: str, now_ns: int) -> HintAnswer | None:
        """Answer to the hints (pin, end of session) of a request that goes to `worker`; None: the
        client gave none.
        """
        request = opened.request
        if not request.pin_s and not request.ends_session:
            return None
        answer = self.pins.take(request, worker, now_ns) if request.pin_s else HintAnswer()
        ends = request.ends_session and bool(request.session)
        return msgspec.structs.replace(answer, ends_session=ends)

    def due(self, now_ns: int) -> list[Prepare]:
        """Preparations for the pins whose blocks are to be touched now."""
        made: list[Prepare] = []
        for pin, spec in self.pins.due(now_ns):
            if self._fleet.policy.ahead.is_on:
                made += self._prepare(pin.request_id, spec, pin.keys, PrepareReason.PINNED)
        return made

    # ── a prefix that is hot ─────────────────────────────────────────────────────────────────────

    def arrived(self, opened: OpenRequest, now_ns: int) -> list[Prepare]:
        """Count a request for its prefix. Returns preparations of one more copy if the prefix is
        hot and all workers that have it are saturated.
        """
        request, prefix = opened.request, opened.request.answer
        is_on = self._fleet.policy.ahead.is_on
        if not is_on or prefix is None or not prefix.matches or request.parts:
            return []
        cached = max(match.longest for match in prefix.matches)
        found = self._hottest(request.keys, cached, request.block_tokens, now_ns)
        if found is None or found[1].rest_ns > now_ns:
            return []
        blocks, heat = found
        heat.rest_ns = now_ns + LOOK_NS
        spec = self._target(opened, prefix, blocks, now_ns)
        if spec is None or not self._may_copy(blocks * request.block_tokens, now_ns):
            return []
        heat.rest_ns = now_ns + REST_NS
        keys = request.keys[: min(blocks, KEYS_MAX) * KEY_BYTES]
        return self._prepare(request.request_id, spec, keys, PrepareReason.HOT)

    def _hottest(
        self, keys: bytes, cached: int, block_tokens: int, now_ns: int
    ) -> tuple[int, _Heat] | None:
        """Count a request for its leading runs of some lengths (`_lengths`), of at most `cached`
        blocks. Returns (blocks, heat) of the longest one that is hot; None: none is.
        """
        settings, found = self._fleet.policy.ahead, None
        least = -(-settings.tokens_min // block_tokens)
        for blocks in _lengths(least, min(cached, len(keys) // KEY_BYTES)):
            name = keys[(blocks - 1) * KEY_BYTES : blocks * KEY_BYTES]
            heat = self._heat[name] = self._heat.get(name) or _Heat(0.0, now_ns)
            age_s = (now_ns - heat.at_ns) / NS_PER_S
            heat.count, heat.at_ns = 1 + heat.count * 0.5 ** (age_s / settings.hot_s), now_ns
            if heat.count >= settings.hot_requests:
                found = blocks, heat
        return found

    def _target(
        self, opened: OpenRequest, prefix: PrefixAnswer, blocks: int, now_ns: int
    ) -> WorkerSpec | None:
        """The least loaded worker that could take requests for the prefix if its node had a copy;
        None: a worker whose node has the prefix is not saturated, or no other worker has room.
        """
        pool, limits = opened.pool, self._fleet.policy.limits
        crew = self._fleet.crew(pool, prefill=True)
        if not crew.states or not self._fleet.policy.split.is_on:
            crew = self._fleet.crew(pool, prefill=False)
        columns = load_columns(self._fleet, crew, now_ns)
        queue_s, memory = columns[FeatureColumn.QUEUE_S], columns[FeatureColumn.MEMORY]
        nodes = {m.holder.node for m in prefix.matches if m.longest >= blocks}
        holds = np.array([state.spec.node in nodes for state in crew.states])
        if not holds.any() or queue_s[holds].min() < SATURATED_S:
            return None
        able = ~holds & (queue_s < SATURATED_S) & (memory < limits.memory_ceiling)
        able &= [self._is_fit(state, opened.side.model, now_ns) for state in crew.states]
        if not able.any():
            return None
        place = int(np.where(able, queue_s, np.inf).argmin())
        spec: WorkerSpec = crew.states[place].spec
        return spec

    def _is_fit(self, state: WorkerState, model: str, now_ns: int) -> bool:
        spec = state.spec
        serves = not spec.models or model in spec.models
        is_fine = bool(spec.node) and state.is_up and not spec.is_red
        return is_fine and serves and self._rests.get(spec.node, 0) <= now_ns

    def _may_copy(self, tokens: int, now_ns: int) -> bool:
        """Whether a copy of `tokens` tokens is within the budget (`copies_max`,
        `copy_bytes_per_s`). If so, the copy is charged to it.
        """
        settings, costs = self._fleet.policy.ahead, self._fleet.policy.costs
        self._copies = [end_ns for end_ns in self._copies if end_ns > now_ns]
        self._room.size = int(settings.copy_bytes_per_s)  # of another policy by now, perhaps
        if self._room.left(now_ns) <= 0 or len(self._copies) >= settings.copies_max:
            return False
        size = tokens * costs.kv_bytes_per_token
        self._room.take(int(size))  # below 0: the next one waits for so much longer
        lasts_s = max(COPY_S_MIN, size / costs.network_bytes_per_s)
        self._copies.append(now_ns + int(lasts_s * NS_PER_S))
        return True


def _reach(prefix: PrefixAnswer, spec: WorkerSpec) -> tuple[int, int, int]:
    """(blocks in the engine's memory or its node's dram, those in the engine's memory, the longest
    run that its node has on disk or another node has)."""
    hbm = dram = longest = 0
    for match in prefix.matches:
        if match.holder.node != spec.node:
            longest = max(longest, match.dram_blocks, match.file_blocks)
        elif not match.holder.engine:
            dram, longest = match.dram_blocks, max(longest, match.file_blocks)
        elif (match.holder.engine, match.holder.rank) == (spec.engine, spec.rank):
            hbm = match.hbm_blocks
    return max(hbm, dram), hbm, longest


def _lengths(least: int, most: int) -> list[int]:
    """Lengths of runs that are counted: 1, 1.5, 2, 3, 4, 6, … times the least."""
    found, length = [], least
    while length <= most:
        found += [length, length + length // 2]
        length *= 2
    return [each for each in dict.fromkeys(found) if each <= most]
