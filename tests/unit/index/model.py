"""Holdings in dictionaries: as obvious as can be, and never full."""

from __future__ import annotations

from kvstore.types import KEY_BYTES, SpaceId, Tier


class Model:
    """Says of `Holdings` what it would say with room for all."""

    def __init__(self) -> None:
        self.scopes: dict[int, tuple[str, SpaceId]] = {}
        self.hidden: set[int] = set()
        self.blocks: dict[tuple[str, SpaceId, bytes], dict[int, int]] = {}
        """Slots and their tiers, 1 << tier."""

    def open(self, slot: int, tenant: str, space: SpaceId, *, is_hidden: bool) -> None:
        assert slot not in self.scopes
        self.scopes[slot] = (tenant, space)
        if is_hidden:
            self.hidden.add(slot)

    def void(self, slot: int) -> None:
        del self.scopes[slot]
        self.hidden.discard(slot)
        for held in self.blocks.values():
            held.pop(slot, None)

    def stored(self, slot: int, tier: Tier, keys: bytes) -> None:
        for address in self._addresses(slot, keys):
            held = self.blocks.setdefault(address, {})
            held[slot] = held.get(slot, 0) | 1 << tier

    def removed(self, slot: int, tier: Tier, keys: bytes) -> None:
        for address in self._addresses(slot, keys):
            held = self.blocks.get(address, {})
            if slot in held:
                held[slot] &= ~(1 << tier)
                if not held[slot]:
                    del held[slot]

    def match(self, tenant: str, space: SpaceId, keys: bytes) -> dict[int, tuple[int, int, int]]:
        """Lengths of each slot that holds the first block."""
        held = [
            self.blocks.get((tenant, space, keys[at : at + KEY_BYTES]), {})
            for at in range(0, len(keys), KEY_BYTES)
        ]
        shown = {slot for slot in held[0] if slot not in self.hidden} if held else set()
        return {slot: self._lengths([h.get(slot, 0) for h in held]) for slot in shown}

    @staticmethod
    def _lengths(tiers: list[int]) -> tuple[int, int, int]:
        lengths = []
        for or_faster in (0b001, 0b011, 0b111):
            run = [bool(has & or_faster) for has in tiers] + [False]
            lengths.append(run.index(False))
        return lengths[0], lengths[1], lengths[2]

    def entry_count(self) -> int:
        return sum(map(len, self.blocks.values()))

    def _addresses(self, slot: int, keys: bytes) -> list[tuple[str, SpaceId, bytes]]:
        scope = self.scopes[slot]
        return [(*scope, keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]
