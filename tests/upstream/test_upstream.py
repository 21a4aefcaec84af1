"""vLLM's own connector tests, with kvstore's connector in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.amounts import IS_NIGHTLY
from tests.upstream.run import NoSources, fetch, run

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_NIGHTLY, reason="make upstream and make nightly run vLLM's own"),
]


@pytest.fixture
def sources() -> Path:
    """vLLM's source distribution; fetched once, which takes 20 s."""
    try:
        return fetch()
    except NoSources as error:
        pytest.skip(str(error))


def test_upstreams_tests_hold_for_kvstores_connector(sources: Path, tmp_path: Path) -> None:
    done = run(sources, [], folder=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
