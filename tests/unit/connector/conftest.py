"""What every test of the connector gets: limits of the log that earlier tests have not used up."""

from __future__ import annotations

import logging

import pytest

from kvstore.obs.logs import RateLimit


@pytest.fixture(autouse=True)
def fresh_log_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm.kvstore.rank", "vllm.kvstore.scheduler"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [RateLimit()])
