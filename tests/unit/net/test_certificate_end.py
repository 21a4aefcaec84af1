"""A certificate that ends is seen coming: by a metric, and at the start. What node and index show
is in `tests/integration/cluster/test_renewal.py`."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from kvstore.client.certificates import load
from kvstore.client.tls import Tls
from kvstore.net.server import certificate_ends, warn_of_its_end
from kvstore.testing.process import Lab

DAY_S = 24 * 60 * 60
NAME = "certificate_expires_timestamp_seconds"


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    return load(Lab(tmp_path).files("index", "i1", days=90))


def ending(tls: Tls, *, days: float) -> Tls:
    return tls._replace(ends_s=int(time.time() + days * DAY_S))


def test_the_metric_is_when_the_certificate_ends(tls: Tls) -> None:
    ends_s = certificate_ends(tls)[NAME]
    assert ends_s == pytest.approx(time.time() + 90 * DAY_S, abs=DAY_S)
    assert certificate_ends(None) == {NAME: {}}


@pytest.mark.parametrize(("days", "left"), [(29.5, "29.5"), (0.5, "0.5")])
def test_who_starts_with_one_that_ends_soon_says_so(
    tls: Tls, caplog: pytest.LogCaptureFixture, days: float, left: str
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_its_end(ending(tls, days=days), renewal="do this")
    (said,) = caplog.messages
    assert said.startswith("the certificate of i1.index.kvstore ends at 2")
    assert said.endswith(f" UTC, in {left} days: replace it; do this")


def test_one_that_lasts_is_not_spoken_of(tls: Tls, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_its_end(ending(tls, days=30.5), renewal="do this")
        warn_of_its_end(None, renewal="do this")
    assert caplog.messages == []
