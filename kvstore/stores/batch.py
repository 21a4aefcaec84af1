"""Changes of one event, as orders to a shared store (pure): the `Slots` of a node.

Covers: orders, and their division into scripts. Does not cover: the scripts (`scripts`).
"""

from __future__ import annotations

from collections import deque
from typing import Final, cast

from kvstore.index.index import Holder
from kvstore.index.places import Place, Scope
from kvstore.stores.forms import encode, scope_of, slot_name
from kvstore.types import KEY_BYTES, SpaceId, Tier

SCRIPT_KEYS_MAX: Final = 1024
"""A script blocks the whole store: about a millisecond."""

Order = tuple[str, bytes, bytes, bytes]
"""Name, slot, tiers or state, scope and keys or record."""


class StoreBatch:
    """Collects orders until they are taken. `ids`: unused slot numbers."""

    def __init__(self, node: str, ids: deque[int]) -> None:
        self._node = node
        self._ids = ids
        self._orders: list[tuple[int, Order]] = []

    def scope(self, tenant: str, space: SpaceId) -> Scope:
        return scope_of(tenant, space)

    def open(self, place: Place, *, is_hidden: bool) -> int:
        slot = self._ids.popleft()
        record = encode(Holder(self._node, place[0], place[1]))
        self._add(0, "open", slot, b"H" if is_hidden else b"S", record)
        return slot

    def show(self, slot: int) -> None:
        self._add(0, "show", slot)

    def void(self, slot: int) -> None:
        self._add(0, "void", slot)

    def stored(self, slot: int, scope: Scope, tier: Tier, keys: bytes) -> None:
        self._say("store", slot, scope, tier, keys)

    def removed(self, slot: int, scope: Scope, tier: Tier, keys: bytes) -> None:
        self._say("remove", slot, scope, tier, keys)

    def take(self) -> list[list[Order]]:
        """The orders of each script, in order: one script at least."""
        scripts: list[list[Order]] = [[]]
        count = 0
        for keys, order in self._orders:
            if count and count + keys > SCRIPT_KEYS_MAX:
                scripts.append([])
                count = 0
            scripts[-1].append(order)
            count += max(1, keys)
        self._orders = []
        return scripts

    def _say(self, name: str, slot: int, scope: Scope, tier: Tier, keys: bytes) -> None:
        step = SCRIPT_KEYS_MAX * KEY_BYTES
        for at in range(0, len(keys), step):
            piece = keys[at : at + step]
            mask = b"%d" % (1 << tier)
            self._add(len(piece) // KEY_BYTES, name, slot, mask, cast("bytes", scope) + piece)

    def _add(self, keys: int, name: str, slot: int, what: bytes = b"", blob: bytes = b"") -> None:
        self._orders.append((keys, (name, slot_name(slot), what, blob)))
