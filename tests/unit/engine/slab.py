"""A node with a slab of hbm, and what of it a rank sees; copies end when a test says so."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.engine.events import Command, Event
from kvstore.tier_events import Promote, Promoted, RaiseGenerations, Shown
from kvstore.types import SLOT_BYTES_MIN, Tier
from kvstore.wire.space import Slab
from tests.unit.engine.harness import Node

GPU = "0000:01:00.0"


class SlabNode(Node):
    """`pages` is what the page of places says, kept as a shell keeps it."""

    def __init__(self, *, hbm_slots: int = 8, **config: Any) -> None:
        self.pages: dict[int, int] = {}
        """Slot of hbm by slot of dram."""
        self.copying: list[Promote] = []
        self.lost: list[int] = []
        """Slots of hbm whose generation was raised, in order."""
        slab = Slab(GPU, hbm_slots * SLOT_BYTES_MIN, b"handle")
        super().__init__(hbm=slab, **config)

    def step(self, *events: Event) -> list[Command]:
        commands = super().step(*events)
        for command in commands:
            match command:
                case RaiseGenerations(slots=slots, tier=Tier.HBM):
                    self.lost += slots.tolist()
                    gone = set(slots.tolist())
                    self.pages = {at: slot for at, slot in self.pages.items() if slot not in gone}
                case Shown(slots=slots, targets=targets):
                    assert not self.pages.keys() & set(slots.tolist()), "a block has two copies"
                    assert not set(self.pages.values()) & set(targets.tolist()), "shown twice"
                    self.pages |= dict(zip(slots.tolist(), targets.tolist(), strict=True))
                case Promote(targets=targets):
                    assert not set(self.pages.values()) & set(targets.tolist()), "readers are there"
                    self.copying.append(command)
        return commands

    def end(self, number: int = 0, *, good: bool = True, trouble: str = "") -> Promote:  # type: ignore[override]
        """A copy ends."""
        order = self.copying.pop(number)
        self.step(Promoted(order.job, bytes([good] * len(order.slots)), trouble))
        return order

    @property
    def copies(self) -> int:
        """Blocks with a copy."""
        return int(np.count_nonzero(self.state.residency.word_of_hbm >= 0))
