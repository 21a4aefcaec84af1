"""What tests of the engine share."""

from __future__ import annotations

import pytest

from kvstore.engine.memory.policies import POLICIES
from tests.unit.engine.harness import DEFAULTS


@pytest.fixture(params=sorted(POLICIES))
def each_policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs with every eviction policy."""
    monkeypatch.setattr(DEFAULTS, "policy", request.param)
    name: str = request.param
    return name
