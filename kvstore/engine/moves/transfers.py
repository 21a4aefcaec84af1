"""Transfers that engines of this node prefill: how long others wait for blocks that are not here.

    PushOpen ─▶ open ──PushClose──▶ closed, remembered for a while
                  └── the engine's session ends: closed, with that reason

Does not cover: which blocks are moved, and where to (`pushes`): keys decide that.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from kvstore.engine.agenda import Groups
from kvstore.engine.sessions.owners import Connection
from kvstore.engine.state import State
from kvstore.types import SpaceId
from kvstore.units import NS_PER_S
from kvstore.wire.messages import PushClose, PushOpen

TRANSFERS_MAX = 1024
"""Transfers of one engine; one more makes it forget another, if possible one that is closed."""
ALL_MAX = 16 * TRANSFERS_MAX
"""Transfers of all engines; one more makes the node forget a quarter: those of engines that are
gone, then those that are closed, then the oldest."""
UNKNOWN_NS = 2 * NS_PER_S
"""How long others wait for a transfer that no engine has named: both legs of a request are
dispatched together, and the prefill engine may name the transfer late."""
SEALS_NS = NS_PER_S // 4
"""How long after PushClose blocks may still come: seals come by other sockets and may be handled
later."""
EVER: int = 1 << 63


class _Prefill(msgspec.Struct):
    connection: Connection
    session: int
    addresses: frozenset[tuple[str, SpaceId]]
    """(tenant, space) of the engine's groups."""
    node: str
    closed_ns: int = 0
    """When the transfer was closed; 0: it is open."""
    reason: str = ""


class Patience(msgspec.Struct, frozen=True):
    """Time until which blocks of a transfer may still come, and the reason why none come after
    it."""

    until_ns: int
    reason: str


class Transfers:
    """Transfers that engines of this node prefill, by (tenant, name), the oldest first."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._transfers: OrderedDict[tuple[str, str], _Prefill] = OrderedDict()
        self._names = Groups[int, tuple[str, str]]()
        """Names of transfers by session, in the same order."""

    def open(self, connection: Connection, message: PushOpen) -> None:
        """An engine computes blocks of this transfer."""
        owner = connection.owner
        if not owner.open_session:
            return
        addresses = frozenset(group.asker.address for group in owner.groups)
        name = (owner.groups[0].asker.tenant, message.transfer)
        session = owner.open_session
        self._forget(name)
        self._transfers[name] = _Prefill(connection, session, addresses, message.node)
        if self._names.count(session) >= TRANSFERS_MAX:
            own = self._names.of(session)
            closed = (each for each in own if self._transfers[each].closed_ns)
            self._forget(next(closed, own[0]))
        self._names.add(session, name)
        if len(self._transfers) > ALL_MAX:
            for other, _ in sorted(self._transfers.items(), key=_worth)[: ALL_MAX // 4]:
                self._forget(other)

    def _forget(self, name: tuple[str, str]) -> None:
        its = self._transfers.pop(name, None)
        if its is not None:
            self._names.remove(its.session, name)

    def close(self, connection: Connection, message: PushClose) -> None:
        """Record that the engine will seal no more blocks of this transfer."""
        if connection.owner.open_session:
            name = (connection.owner.groups[0].asker.tenant, message.transfer)
            its = self._transfers.get(name)
            if its is not None and its.connection is connection and not its.closed_ns:
                its.closed_ns, its.reason = self._state.now_ns, message.reason

    def patience(
        self, address: tuple[str, SpaceId], transfer: str, node: str, since_ns: int
    ) -> Patience:
        """How long a decode node that has waited since `since_ns` should wait for blocks of this
        transfer and (tenant, space)."""
        its = self._transfers.get((address[0], transfer))
        if its is None:
            return Patience(since_ns + UNKNOWN_NS, "no engine here prefills it")
        if address not in its.addresses:
            return Patience(
                0, "the prefill engine has another space: model, version, format or weights differ"
            )
        if its.node not in ("", node):
            return Patience(0, f"its decode node is {its.node}")
        if not its.closed_ns and its.connection.owner.open_session != its.session:
            its.closed_ns, its.reason = self._state.now_ns, "the prefill engine is gone"
        if not its.closed_ns:
            return Patience(EVER, "")
        if its.reason:
            return Patience(its.closed_ns, its.reason)
        return Patience(
            its.closed_ns + SEALS_NS,
            "not all of its blocks were stored there, or were evicted since",
        )

    def computed_ns(self, tenant: str, transfer: str) -> int:
        """When the engine of this transfer last sealed blocks, of any request: it may have a long
        queue. 0: it has sealed none, or no engine prefills the transfer."""
        its = self._transfers.get((tenant, transfer))
        return its.connection.owner.sealed_ns if its is not None else 0


def _worth(item: tuple[object, _Prefill]) -> int:
    """Sort key of a transfer: 0 for those of engines that are gone, 1 for closed ones, 2 for open
    ones."""
    its = item[1]
    if its.connection.owner.open_session != its.session:
        return 0
    return 1 if its.closed_ns else 2
