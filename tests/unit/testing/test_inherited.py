"""What processes inherit from that of the tests is the same for all tests of a run."""

from __future__ import annotations

import os
import resource

from tests.kit.nursery import Inherited


def test_variables_and_limits_are_as_they_were() -> None:
    before = Inherited.now()
    os.environ["LD_PRELOAD"] = "/nowhere"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    assert Inherited.now() != before
    before.restore()
    assert Inherited.now() == before
    assert "LD_PRELOAD" not in os.environ or before.early["LD_PRELOAD"] == os.environ["LD_PRELOAD"]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
