"""The demos of several nodes, as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.demo import play
from kvstore.demo.stage import Replay
from tests.amounts import IS_NIGHTLY

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def printed(flag: str, folder: Path) -> str:
    """Text of a demo that ended well, in one line."""
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli.main", "demo", flag, "--users", "2", "--rounds", "2"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All answers are identical" in done.stdout
    return " ".join(done.stdout.split())


@pytest.mark.skipif(not IS_NIGHTLY, reason="test_cluster has its parts; make nightly runs it")
def test_the_demo_of_a_cluster_keeps_its_word(tmp_path: Path) -> None:
    assert "came to node b from node a" in printed("--cluster", tmp_path)


@pytest.mark.skipif(not IS_NIGHTLY, reason="test_pd has its parts; make nightly runs it")
def test_the_demo_of_prefill_and_decode_keeps_its_word(tmp_path: Path) -> None:
    assert "blocks were pushed from node p to node d" in printed("--pd", tmp_path)


@pytest.mark.alone
@pytest.mark.skipif(not IS_NIGHTLY, reason="it compares times, and takes three minutes")
def test_engines_estimate_their_savings_within_a_fifth() -> None:
    """Beside the time to first token of the same requests without kvstore. Of the runs that load
    most of their prompts: the first one with kvstore stores them, and loads little."""
    runs: list[Replay] = []
    assert play.main(users=2, rounds=3, finish=lambda its, _: runs.extend(its)) == 0
    alone, _, *loading = runs
    for run in loading:
        measured_s = (sum(alone.ttft_ms()) - sum(run.ttft_ms())) / 1000
        assert run.hits.saved_s == pytest.approx(measured_s, rel=0.2), run.name
