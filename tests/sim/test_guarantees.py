"""What the world takes for a broken quota, and what not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.engine.events import Received
from kvstore.types import ConnectionId
from kvstore.wire.messages import Distrust, LeaseRenew
from tests.sim.world.copies import Violation
from tests.sim.world.guarantees import Guarantees


def check(message: Distrust | LeaseRenew, *, lost_by: str) -> None:
    """An engine of tenant t says this, and a group has less than before."""
    guarantees = Guarantees([("t", 100)], arena_bytes=200)
    guarantees._groups[1] = "t"
    before = {"t": 50, "": 50}
    after = before | {lost_by: 40}
    rows = [SimpleNamespace(quota=name, used_bytes=size) for name, size in after.items()]
    engine: Any = SimpleNamespace(quotas=lambda: rows)
    guarantees.check(engine, before, [Received(ConnectionId(1), message)], [])


def test_a_group_loses_nothing_because_another_one_spoke() -> None:
    with pytest.raises(Violation, match="all others lost 10 of the 100 bytes"):
        check(LeaseRenew([1]), lost_by="")
    check(LeaseRenew([1]), lost_by="t")


def test_a_doubt_may_be_about_what_another_node_s_need_brought() -> None:
    check(Distrust(slots=b"", generations=b""), lost_by="")
