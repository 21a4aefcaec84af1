"""Clients' pins: prompts whose blocks are touched again and again, so that they leave last.

    request with a pin ─▶ `take`: in effect, or why not ─▶ Routed.hints ─▶ the client's answer
    every `touch_s` ─▶ `due` ─▶ Prepare at the worker that served it        until its time is over

A pin is no lease: the least recently used leave first, and a pinned block is never that for long. A
tenant has `pins_per_tenant`, all of them PINS_MAX together, of KEYS_MAX blocks each. A pin is of
keys that this router made of the tenant's own prompt, its salt included: nothing that a client
names pins blocks of others.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from typing import Final

import msgspec
import xxhash

from kvstore.routing.events import HintAnswer
from kvstore.routing.values import RouteRequest
from kvstore.routing.workers.fleet import Fleet
from kvstore.types import KEY_BYTES
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


class Stays:
    """Pool and worker of the last request of each session."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._stays: OrderedDict[bytes, Stay] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stays)

    def find(self, request: RouteRequest, now_ns: int) -> Stay | None:
        """Stay of the request's session; None: the session has none, or its last request was more
        than `session_ttl_s` ago.
        """
        stay = self._stays.get(session_name(request))
        ttl_ns = self._fleet.policy.session_ttl_s * NS_PER_S
        return stay if stay is not None and now_ns - stay.at_ns < ttl_ns else None

    def keep(self, request: RouteRequest, pool: str, worker: str, now_ns: int) -> None:
        """Note that a request of a session goes to this worker of this pool, or ended there now."""
        name = session_name(request)
        if not name:
            return
        self._stays[name] = Stay(pool, worker, now_ns)
        self._stays.move_to_end(name)
        if len(self._stays) > STAYS_MAX:
            self._stays.popitem(last=False)

    def home(self, before: str, chosen: str, failed: Collection[str]) -> str:
        """Worker that a session stays at: `before`, the one of its last request, with policy
        `session`, if it is up and no attempt failed there; else `chosen`, the worker of this
        request.
        """
        row = self._fleet.row_of.get(before)
        if row is None or before in failed or self._fleet.policy.policy != "session":
            return chosen
        return before if self._fleet.workers[row].health.is_up else chosen

    def touch(self, request: RouteRequest, now_ns: int) -> None:
        """A request of a session ended: its stay lasts `session_ttl_s` from now."""
        stay = self.find(request, now_ns)
        if stay is not None:
            self.keep(request, stay.pool, stay.worker, now_ns)

    def end(self, request: RouteRequest) -> None:
        """The client says that its session is over: forget the stay."""
        self._stays.pop(session_name(request), None)

    def check(self) -> None:
        """Raises AssertionError if a bound is broken."""
        assert len(self._stays) <= STAYS_MAX


def session_name(request: RouteRequest) -> bytes:
    """Name of a request's session among those of all tenants and models; empty: it has none."""
    if not request.session:
        return b""
    text = f"{request.tenant}\0{request.model}\0{request.session}"
    return xxhash.xxh3_128_digest(text.encode(errors="replace"))


# ── pins ──────────────────────────────────────────────────────────────────────────────────────────

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


class PromptPins:
    """All pins in effect, in the order in which they are due; see the module."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._pins: OrderedDict[PinName, Pin] = OrderedDict()
        self._of_tenant = Counter[str]()

    def __len__(self) -> int:
        return len(self._pins)

    def take(
        self, request: RouteRequest, worker: str, now_ns: int, *, has_index: bool
    ) -> HintAnswer:
        """Pin the prompt of a request that goes to `worker`. Returns for how long and how many
        tokens, or the reason why not.
        """
        settings = self._fleet.policy.ahead
        keys = request.keys[: KEYS_MAX * KEY_BYTES]
        name = (request.tenant, session_name(request) or keys[-KEY_BYTES:])
        is_new = name not in self._pins
        if request.pin_s < 0:
            return HintAnswer(refused="invalid")
        if not settings.is_on:
            return HintAnswer(refused="off")
        if not keys or not has_index or request.parts:
            return HintAnswer(refused="no-keys")
        if is_new and self._of_tenant[request.tenant] >= settings.pins_per_tenant:
            return HintAnswer(refused="tenant-full")
        if is_new and len(self._pins) >= PINS_MAX:
            return HintAnswer(refused="full")
        ttl_s = min(request.pin_s, settings.pin_s_max)
        self._of_tenant[request.tenant] += is_new
        due_ns = now_ns + int(settings.touch_s * NS_PER_S)
        until_ns = now_ns + int(ttl_s * NS_PER_S)
        self._pins[name] = Pin(name, worker, keys, request.request_id, until_ns, due_ns)
        self._pins.move_to_end(name)
        tokens = len(keys) // KEY_BYTES * request.block_tokens
        return HintAnswer(pinned_s=ttl_s, pinned_tokens=tokens)

    def due(self, now_ns: int) -> list[Pin]:
        """Pins whose blocks are to be touched now; each is due again later. Expired ones go."""
        found: list[Pin] = []
        for pin in list(self._pins.values())[:DUE_MAX] if self._pins else ():
            if pin.due_ns > now_ns:
                break
            if pin.until_ns <= now_ns:
                self.drop(pin)
                continue
            pin.due_ns = now_ns + int(self._fleet.policy.ahead.touch_s * NS_PER_S)
            self._pins.move_to_end(pin.name)
            found.append(pin)
        return found

    def drop(self, pin: Pin) -> None:
        """End a pin; no error if it has ended."""
        if self._pins.pop(pin.name, None) is not None:
            self._of_tenant[pin.name[0]] -= 1
            if not self._of_tenant[pin.name[0]]:
                del self._of_tenant[pin.name[0]]

    def end_session(self, request: RouteRequest) -> None:
        """Drop the pin of a session."""
        pin = self._pins.get((request.tenant, session_name(request)))
        if pin is not None:
            self.drop(pin)

    def check(self) -> None:
        """Raises AssertionError if a bound is broken."""
        assert len(self._pins) <= PINS_MAX
        assert self._of_tenant == Counter(tenant for tenant, _ in self._pins)
        assert all(len(pin.keys) <= KEYS_MAX * KEY_BYTES for pin in self._pins.values())
