"""vLLM's own connector tests, with kvstore's connector in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.upstream.run import SOURCES, run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.skipif(
    not (SOURCES / "tests").is_dir(), reason="vLLM's sources are not here: run make upstream"
)
def test_upstreams_tests_hold_for_kvstores_connector(tmp_path: Path) -> None:
    done = run(SOURCES, [], folder=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
