"""Speeds that engines reported, by tenant and space, for the next engine of that space.

Bounded: the latest reports stay. Reported values are clamped to bounds and serve only for the
start of another engine of the same tenant, which measures for itself from then on.
"""

from __future__ import annotations

from collections import OrderedDict

from kvstore.types import SpaceId
from kvstore.wire.learned import SPACES_MAX, Learned, SpacePace, within_bounds
from kvstore.wire.messages import Measured


class Paces:
    """Paces by (tenant, space), the least recently reported first."""

    def __init__(self, learned: Learned) -> None:
        self._by_space: OrderedDict[tuple[str, str], SpacePace] = OrderedDict()
        for pace in reversed(within_bounds(learned).spaces):
            self._by_space[pace.tenant, pace.space] = pace

    def told(self, tenant: str, space: SpaceId, measured: Measured) -> None:
        """An engine reports its speed. A value that it has not measured stays as it was."""
        old = self.of(tenant, space)
        told = SpacePace(
            tenant,
            space.hex(),
            measured.compute_ns_per_token or old.compute_ns_per_token,
            measured.load_ns_per_token or old.load_ns_per_token,
        )
        (pace,) = within_bounds(Learned(spaces=(told,))).spaces
        self._by_space[tenant, pace.space] = pace
        self._by_space.move_to_end((tenant, pace.space))
        if len(self._by_space) > SPACES_MAX:
            self._by_space.popitem(last=False)

    def of(self, tenant: str, space: SpaceId) -> SpacePace:
        """Pace of this space; zeros where it is not known."""
        nothing = SpacePace(tenant, space.hex())
        return self._by_space.get((tenant, nothing.space), nothing)

    def all(self) -> tuple[SpacePace, ...]:
        """All paces, the last reported first."""
        return tuple(reversed(self._by_space.values()))
